"""The two models of `apex demo`: a decoder-only transformer and a convolutional net with batch norm.

B: batch, T: characters in a sequence, V: characters in the alphabet, D: width, K: kinds of pictures, S: side.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...normalization import FusedLayerNorm


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each behind a norm and beside a residual path."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = FusedLayerNorm(width)
        self.projections = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.perceptron_norm = FusedLayerNorm(width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # B, T, D
        split = self.projections(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        return x + self.perceptron(self.perceptron_norm(x))


class Gpt(nn.Module):
    """A decoder-only transformer from characters (B, T) to logits (B, T, V)."""

    def __init__(self, alphabet: int, context: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(alphabet, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = FusedLayerNorm(width)
        self.logits = nn.Linear(width, alphabet)

    def forward(self, characters: Tensor) -> Tensor:
        positions = torch.arange(characters.shape[1], device=characters.device)
        return self.logits(self.norm(self.blocks(self.characters(characters) + self.positions(positions))))


class ConvNet(nn.Module):
    """A conv net from pictures (B, 1, S, S) to logits (B, K); each stage halves the side and doubles the channels."""

    def __init__(self, kinds: int, channels: int, stages: int) -> None:
        super().__init__()
        widths = [1, *(channels * 2**stage for stage in range(stages))]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.logits = nn.Linear(widths[-1], kinds)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.logits(self.features(pictures).mean((2, 3)))
