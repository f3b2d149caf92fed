"""The networks that `benchmarks/steps.py` trains, in PyTorch's modules or, with `fused=True`, in those of apex.

Both have the same parameters in the same order, so that one seed gives both the same weights. A network computes its
loss itself: `network(*batch)` is a scalar, and torch.compile sees the loss together with what comes before it. Those
named `-logits` return logits, as most training loops have it, and `step_loss` computes the loss behind them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from amp_models import NormReLU, fused_norm, resnet50
from torch import Tensor, nn

import apex
from apex.contrib.group_norm import GroupNorm
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss, linear_cross_entropy
from apex.fused_bias_swiglu import fused_bias_swiglu
from apex.fused_dense import FusedDenseGeluDense, fused_dense_gelu_dense_function
from apex.normalization import FusedLayerNorm, FusedRMSNorm
from apex.ops.rope import rotary_embedding_pair

Batch = tuple[Tensor, ...]


def layer_norm(width: int, fused: bool) -> nn.Module:
    # The output, which the next layer keeps anyway, is kept in place of the input.
    return FusedLayerNorm(width, memory_efficient=True) if fused else nn.LayerNorm(width)


def rms_norm(width: int, fused: bool) -> nn.Module:
    return FusedRMSNorm(width, eps=1e-6, memory_efficient=True) if fused else nn.RMSNorm(width, eps=1e-6)


def gelu_layers(width: int, fused: bool) -> nn.Module:
    if fused:
        return FusedDenseGeluDense(width, 4 * width, width)
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))


def group_norm_silu(channels: int, fused: bool) -> nn.Module:
    groups = min(32, channels // 4)
    if fused:
        return GroupNorm(groups, channels, act="silu")
    return nn.Sequential(nn.GroupNorm(groups, channels), nn.SiLU())


def token_loss(x: Tensor, weight: Tensor, targets: Tensor, fused: bool) -> Tensor:
    """Cross-entropy of the next token, from the features of every position and the classes' weights."""
    if fused:
        return linear_cross_entropy(x, weight, targets)
    return F.cross_entropy(F.linear(x, weight).flatten(0, 1), targets.flatten())


def without_bias(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the layer's output without its last bias, and that bias for the next norm to add.

    A layer that `apex.fp8` converted has a forward of its own, which must be called: its output comes with None.
    """
    if type(layer) is nn.Linear:
        return F.linear(x, layer.weight), layer.bias
    if type(layer) is FusedDenseGeluDense:
        return fused_dense_gelu_dense_function(x, layer.weight1, layer.bias1, layer.weight2, None), layer.bias2
    return layer(x), None


class GPTBlock(nn.Module):
    """Layer norm, causal attention, layer norm, two dense layers with gelu.

    Of apex, the norms add branches to the residual, with the bias of the layer before: `fused_forward`.
    """

    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = layer_norm(width, fused), layer_norm(width, fused)
        self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dense = gelu_layers(width, fused)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.project(self.mixed(self.norm1(x)))
        return x + self.dense(self.norm2(x))

    def fused_forward(
        self, x: Tensor, branch: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the residual, and the last layer's output and bias, which the next norm adds to it."""
        normed, x = (self.norm1(x), x) if branch is None else self.norm1(branch, x, bias)
        branch, bias = without_bias(self.project, self.mixed(normed))
        normed, x = self.norm2(branch, x, bias)
        return x, *without_bias(self.dense, normed)

    def mixed(self, normed: Tensor) -> Tensor:
        heads = self.attention(normed).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class GPT(nn.Module):
    """GPT-2's architecture: learnt positions, and one weight for embedding and head where `tied`."""

    def __init__(self, depth: int, width: int, vocabulary: int, length: int, fused: bool, tied: bool = False) -> None:
        super().__init__()
        self.fused = fused
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(GPTBlock(width, max(1, width // 64), fused) for _ in range(depth)))
        self.norm = layer_norm(width, fused)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        for parameter in (self.tokens.weight, self.positions.weight, self.head.weight):
            nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """The loss, or without targets the logits."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        x = self.features(x) if self.fused else self.norm(self.blocks(x))
        return self.head(x) if targets is None else token_loss(x, self.head.weight, targets, self.fused)

    def features(self, x: Tensor) -> Tensor:
        branch = bias = None
        for block in self.blocks:
            x, branch, bias = block.fused_forward(x, branch, bias)  # type: ignore[operator]
        return self.norm(branch, x, bias)[0]


def rotated(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [b, s, h, d] as models written in PyTorch have it."""
    first, second = t.chunk(2, -1)
    return t * cos.to(t.dtype) + torch.cat((-second, first), -1) * sin.to(t.dtype)


class LlamaBlock(nn.Module):
    """RMS norm, causal attention with rotary embeddings, RMS norm, SwiGLU; no biases."""

    def __init__(self, width: int, heads: int, hidden: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.norm1, self.norm2 = rms_norm(width, fused), rms_norm(width, fused)
        self.attention, self.project = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.project(self.mixed(self.norm1(x), cos, sin))
        return x + self.down(self.gated(self.up(self.norm2(x))))

    def fused_forward(self, x: Tensor, branch: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The residual, and what the next norm adds to it."""
        normed, x = (self.norm1(x), x) if branch is None else self.norm1(branch, x)
        normed, x = self.norm2(self.project(self.mixed(normed, cos, sin)), x)
        return x, self.down(self.gated(self.up(normed)))

    def mixed(self, normed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = self.attention(normed).unflatten(-1, (3, self.heads, -1)).unbind(2)
        if self.fused:
            query, key = rotary_embedding_pair(query, key, (cos, sin), tensor_format="bshd")
        else:
            cos, sin = cos.squeeze(1), sin.squeeze(1)
            query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)

    def gated(self, x: Tensor) -> Tensor:
        if self.fused:
            return fused_bias_swiglu(x)
        gate, value = x.chunk(2, -1)
        return F.silu(gate) * value


class Llama(nn.Module):
    """Llama's architecture without grouped keys."""

    def __init__(self, depth: int, width: int, hidden: int, vocabulary: int, length: int, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        heads = max(1, width // 64)
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, hidden, fused) for _ in range(depth))
        self.norm, self.head = rms_norm(width, fused), nn.Linear(width, vocabulary, bias=False)
        for parameter in (self.tokens.weight, self.head.weight):
            nn.init.normal_(parameter, std=0.02)
        channels = width // heads
        speeds = 10000.0 ** (-torch.arange(0, channels, 2) / channels)
        angles = torch.outer(torch.arange(length), speeds).repeat(1, 2)[:, None, None]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x, branch = self.tokens(tokens), None
        for block in self.blocks:
            if self.fused:
                x, branch = block.fused_forward(x, branch, self.cos, self.sin)  # type: ignore[operator]
            else:
                x = block(x, self.cos, self.sin)
        x = self.norm(x) if branch is None else self.norm(branch, x)[0]
        return token_loss(x, self.head.weight, targets, self.fused)


class Classifier(nn.Module):
    """A network of ResNet-50's shape and its loss."""

    def __init__(self, fused: bool, first: int = 64) -> None:
        super().__init__()
        self.layers = resnet50(fused_norm if fused else NormReLU, first)
        if fused:
            apex.fuse(self.layers, verbose=False)  # the first convolution and max pooling

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(images).float(), targets)


class UNetBlock(nn.Module):
    """Twice group norm, SiLU and convolution, beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, fused: bool) -> None:
        super().__init__()
        self.norm1, self.convolution1 = group_norm_silu(inputs, fused), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.convolution2 = group_norm_silu(outputs, fused), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolution1(self.norm1(x))
        return self.shortcut(x) + self.convolution2(self.norm2(y))


class UNet(nn.Module):
    """Two blocks at every resolution on the way down, two on the way up, which also see what was there before."""

    def __init__(self, width: int, fused: bool) -> None:
        super().__init__()
        widths = (width, 2 * width, 4 * width)
        self.first, self.last = nn.Conv2d(4, width, 3, padding=1), nn.Conv2d(width, 4, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        before = width
        for each in widths:
            self.down.append(nn.Sequential(UNetBlock(before, each, fused), UNetBlock(each, each, fused)))
            before = each
        for each in widths[-2::-1]:
            self.up.append(nn.Sequential(UNetBlock(before + each, each, fused), UNetBlock(each, each, fused)))
            before = each

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x, seen = self.first(images), []
        for index, blocks in enumerate(self.down):
            x = blocks(F.avg_pool2d(x, 2) if index else x)
            seen.append(x)
        seen.pop()
        for blocks in self.up:
            x = blocks(torch.cat((F.interpolate(x, scale_factor=2.0, mode="nearest"), seen.pop()), 1))
        return F.mse_loss(self.last(x).float(), targets.float())  # which amp may have cast as an input


def _tokens(count: int, length: int, vocabulary: int) -> Callable[[], Batch]:
    def draw() -> Batch:
        tokens = torch.randint(vocabulary, (count, length + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return draw


def _images(count: int, channels: int, size: int, classes: int | None) -> Callable[[], Batch]:
    def draw() -> Batch:
        images = torch.randn(count, channels, size, size)
        return images, torch.randint(classes, (count,)) if classes else torch.randn_like(images)

    return draw


def _gpt(depth: int, width: int, vocabulary: int, count: int, length: int, tied: bool = False):  # type: ignore[no-untyped-def]
    return lambda fused: GPT(depth, width, vocabulary, length, fused, tied), _tokens(count, length, vocabulary)


def _llama(depth: int, width: int, hidden: int, vocabulary: int, count: int, length: int):  # type: ignore[no-untyped-def]
    return lambda fused: Llama(depth, width, hidden, vocabulary, length, fused), _tokens(count, length, vocabulary)


# Network, batch and the same at a size that a CPU takes, in this order: (network, draw), (tiny network, tiny draw).
PROBLEMS = {
    "gpt-12x768": (_gpt(12, 768, 50304, 8, 1024), _gpt(2, 64, 128, 2, 16)),
    "gpt-6x384": (_gpt(6, 384, 50304, 4, 256), _gpt(2, 64, 128, 2, 16)),
    "gpt2-small": (_gpt(12, 768, 50257, 8, 1024, tied=True), _gpt(2, 64, 127, 2, 16, tied=True)),
    "llama": (_llama(12, 1024, 2816, 32000, 4, 2048), _llama(2, 64, 96, 128, 2, 16)),
    "resnet50": (
        (Classifier, _images(64, 3, 224, 1000)),
        (lambda fused: Classifier(fused, 4), _images(2, 3, 64, 1000)),
    ),
    "unet": (
        (lambda fused: UNet(320, fused), _images(8, 4, 64, None)),
        (lambda fused: UNet(8, fused), _images(2, 4, 8, None)),
    ),
}
PROBLEMS |= {f"{name}-logits": PROBLEMS[name] for name in ("gpt-12x768", "gpt-6x384")}
IMAGES = ("resnet50", "unet")


def step_loss(name: str, network: Callable[..., Tensor], fused: bool) -> Callable[..., Tensor]:
    """What a step calls with a batch for its loss: the network, or the loss of its logits, outside of what compiles."""
    if not name.endswith("-logits"):
        return network

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        logits, labels = network(tokens).flatten(0, 1), targets.flatten()
        return (
            SoftmaxCrossEntropyLoss.apply(logits, labels, 0.0, -100).mean()
            if fused
            else F.cross_entropy(logits, labels)
        )

    return loss


def problem(name: str, device: str, fused: bool, tiny: bool) -> tuple[nn.Module, list[Batch]]:
    """A network and four batches, the same ones at every call."""
    torch.manual_seed(0)
    make, draw = PROBLEMS[name][tiny]
    network = make(fused).to(device)
    batches = [draw() for _ in range(4)]
    layout = torch.channels_last if name in IMAGES else torch.preserve_format

    def placed(tensor: Tensor) -> Tensor:
        return tensor.to(device, memory_format=layout if tensor.dim() == 4 else torch.preserve_format)

    return network.to(memory_format=layout), [tuple(map(placed, batch)) for batch in batches]
