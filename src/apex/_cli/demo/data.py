"""The synthetic data of `apex demo`. Equal seeds give equal data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]  # inputs, targets


@dataclass(frozen=True)
class Language:
    """A random Markov chain of order two: the next character depends on the two before it.

    A model has to attend to the past, and the lowest loss that any model can reach is known.
    """

    alphabet: int
    context: int
    batch: int
    seed: int

    def model_arguments(self) -> dict[str, int]:
        """Return the sizes that a model needs to know."""
        return {"alphabet": self.alphabet, "context": self.context}

    def transitions(self) -> Tensor:
        """Return the probability of each character after each pair of characters, of shape (V, V, V)."""
        generator = torch.Generator().manual_seed(self.seed)
        size = self.alphabet
        # Sharp transitions leave much to learn: a factor of 3 puts most of the probability on two or three characters.
        return (3 * torch.randn(size, size, size, generator=generator)).softmax(-1)

    def batches(self) -> Iterator[Batch]:
        """Yield endless pairs of (B, T) characters and the (B, T) characters that follow them."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        transitions = self.transitions()
        while True:
            characters = list(torch.randint(self.alphabet, (2, self.batch), generator=generator))
            while len(characters) < self.context + 1:
                probabilities = transitions[characters[-2], characters[-1]]
                characters.append(torch.multinomial(probabilities, 1, generator=generator)[:, 0])
            sequences = torch.stack(characters, 1)
            yield sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()

    def lowest_loss(self, sample: list[Batch]) -> float:
        """Return the loss, in nats, of a model that knows the chain.

        The second character of a sequence is drawn evenly and can only be guessed.
        """
        inputs, targets = (torch.cat(tensors) for tensors in zip(*sample, strict=True))
        known = self.transitions()[inputs[:, :-1], inputs[:, 1:]].gather(-1, targets[:, 1:, None]).log().neg()
        return float((known.sum(1).mean() + math.log(self.alphabet)) / self.context)


@dataclass(frozen=True)
class Pictures:
    """Pictures of stripes with noise and random phase. The direction of the stripes is the kind to recognise."""

    kinds: int
    side: int
    batch: int
    seed: int

    def model_arguments(self) -> dict[str, int]:
        """Return the sizes that a model needs to know."""
        return {"kinds": self.kinds}

    def lowest_loss(self, sample: list[Batch]) -> None:
        """Return None: the lowest possible loss is not known."""

    def batches(self) -> Iterator[Batch]:
        """Yield endless pairs of (B, 1, S, S) pictures and (B,) kinds."""
        generator = torch.Generator().manual_seed(self.seed)
        row, column = torch.meshgrid(torch.arange(self.side), torch.arange(self.side), indexing="ij")
        while True:
            kinds = torch.randint(self.kinds, (self.batch,), generator=generator)
            angles = (math.pi * kinds / self.kinds)[:, None, None]
            phases = 2 * math.pi * torch.rand(self.batch, 1, 1, generator=generator)
            across = row * angles.sin() + column * angles.cos()
            stripes = (across * (math.pi / 2) + phases).sin()
            noise = torch.randn(self.batch, self.side, self.side, generator=generator)
            yield (stripes + 0.5 * noise)[:, None], kinds
