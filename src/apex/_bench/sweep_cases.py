"""Random cases of each family for `apex bench --sweep`: shapes, dtypes, strides and alignments that models have.

A family is a function of a `Draw` and a device that returns a case's name and what makes its passes, "fwd" and "bwd".
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..contrib.openfold_triton import AttnTri
from ..contrib.xentropy import SoftmaxCrossEntropyLoss
from ..ops import _tolerance
from ..ops.batch_norm import batch_norm
from ..ops.glu import bias_glu
from ..ops.group_norm import group_norm
from ..ops.norm import layer_norm, rms_norm
from ..ops.softmax import masked_softmax
from .cases import dense, focal_loss, optimizers, rope
from .list_passes import PASSES, prepare_pass
from .problems import make_parameters, prepared_steps
from .registry import OURS, Expected, Prepared

KNOWN_LENGTHS = (7000, 3000, 1160, 1544, 5120, 12288)  # of rows at which something was slow once, or which many have

Passes = dict[str, Prepared]
Drawn = tuple[str, Callable[[], Passes]]


class Draw(random.Random):
    """Random numbers of one case, which has at most about `most` elements."""

    def __init__(self, seed: str, most: int) -> None:
        super().__init__(seed)
        self.most = most

    def size(self, low: int, high: int, multiple: int = 1) -> int:
        """A multiple of `multiple`, its logarithm evenly distributed."""
        value = math.exp(self.uniform(math.log(low), math.log(max(low, high))))
        return max(1, round(value / multiple)) * multiple

    def length(self, low: int, high: int) -> int:
        """The length of a row: mostly a multiple of a power of two, seldom odd."""
        high = min(high, self.most)
        known = min(self.choice(KNOWN_LENGTHS), high)
        drawn = self.size(low, high, self.choice((256, 128, 64, 8, 8, 8, 4, 1)))
        return known if self.random() < 0.1 else min(drawn, high)

    def rows(self, row_length: int) -> int:
        """So many rows that a case has between 2^20 and `most` elements."""
        most = max(1, self.most // row_length)
        return self.size(max(1, min(most, (1 << 20) // row_length)), most)

    def dtype(self) -> torch.dtype:
        return self.choice((torch.bfloat16, torch.float16, torch.float32))

    def layout(self, dimensions: int) -> str:
        """Mostly contiguous; else part of wider rows, one element off in memory, or the first dimensions exchanged."""
        others = ["sliced", "oddly sliced", "offset"] + ["transposed"] * (dimensions > 2)
        return self.choice(others) if self.random() < 0.2 else ""

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, layout: str = "") -> Tensor:
        """Normal values that lie in memory as `layout` says."""
        generator = torch.Generator(device).manual_seed(self.getrandbits(32))
        outer, last, first = list(shape[:-1]), shape[-1], int(layout == "offset")
        if layout == "transposed":
            outer[:2] = outer[1::-1]
        width = last + {"sliced": 64, "oddly sliced": 3}.get(layout, 0)
        values = torch.randn(math.prod(outer) * width + first, generator=generator, device=device).to(dtype)
        values = values[first:].view(*outer, width)[..., :last]
        return values.transpose(0, 1) if layout == "transposed" else values

    def around_one(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A weight or a bias."""
        return self.tensor((size,), dtype, device).mul_(0.2).add_(1)


def _name(dtype: torch.dtype, shape: Sequence[int], *words: object) -> str:
    words = tuple(str(word).removeprefix("torch.") for word in words if word)
    return " ".join([str(dtype).removeprefix("torch."), "x".join(map(str, shape)), *words])


def _tolerant(expected: Expected) -> Expected:
    """Errors are also measured by the usual size of the values, whose rounding single elements inherit."""
    usual = float(expected.value.square().mean().sqrt())
    return replace(expected, slack=expected.slack + 4 * _tolerance.tolerance(expected.dtype)[0] * usual)


def _as_benchmarked(prepare: Callable[..., Prepared], device: torch.device) -> Passes:
    """Both passes of a case that `apex bench` has with other sizes; of its peers PyTorch's operators only."""
    passes = {way: prepare(direction=way, device=device) for way in ("fwd", "bwd")}
    return {
        way: Prepared({n: each.implementations[n] for n in (OURS, "torch")}, [_tolerant(e) for e in each.expected])
        for way, each in passes.items()
    }


def _both_passes(
    leaves: Sequence[Tensor],
    ours: Callable[..., Tensor],
    eager: Callable[..., Tensor],
    kink: Callable[..., Tensor] | None = None,
) -> Passes:
    """Forward and backward of a function of `leaves`; `eager` in float64 is right.

    Elements for which `kink` is nearly zero get no gradient: on which side they lie depends on rounding.
    """
    leaves = [leaf.requires_grad_() for leaf in leaves]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    output, result = eager(*wide), ours(*leaves)
    gradient = torch.randn_like(result)
    if kink is not None:
        gradient.masked_fill_(kink(*wide).abs() < (1e-3 if leaves[0].dtype == torch.float32 else 0.05), 0)
    largest = max(leaf.numel() for leaf in leaves)
    expected = {
        "fwd": [Expected(output.detach(), result.dtype)],
        "bwd": [
            Expected(exact, leaf.dtype, largest // leaf.numel())
            for exact, leaf in zip(torch.autograd.grad(output, wide, gradient.double()), leaves, strict=True)
        ],
    }

    def call(function: Callable[..., Tensor], way: str) -> Callable[[], Sequence[Tensor]]:
        if way == "fwd":
            return lambda: (function(*leaves),)
        own = function(*leaves)
        return lambda: torch.autograd.grad(own, leaves, gradient, retain_graph=True)

    both = {OURS: ours, "torch": eager}
    return {
        way: Prepared({n: functools.partial(call, f, way) for n, f in both.items()}, [_tolerant(e) for e in values])
        for way, values in expected.items()
    }


def _norm(draw: Draw, device: torch.device, mean: bool) -> Drawn:
    columns, dtype, parts = draw.length(32, 20000), draw.dtype(), draw.choice((1, 2, 8))
    shape = (parts, -(-draw.rows(columns) // parts), columns)
    layout, affine = draw.layout(3), draw.random() < 0.9
    ours, eager = (layer_norm, F.layer_norm) if mean else (rms_norm, F.rms_norm)

    def make() -> Passes:
        parameters = [draw.around_one(columns, dtype, device) for _ in range(1 + mean) if affine]
        leaves = [draw.tensor(shape, dtype, device, layout), *parameters]
        calls = (lambda x, *p, function=f: function(x, (columns,), *p, eps=1e-5) for f in (ours, eager))
        return _both_passes(leaves, *calls)

    return _name(dtype, shape, layout, "plain" * (not affine)), make


def _softmax(draw: Draw, device: torch.device) -> Drawn:
    kind, dtype, scale = draw.choice(("causal", "masked", "scaled")), draw.dtype(), 0.125
    keys = min(draw.length(16, 8192), math.isqrt(draw.most))
    queries = keys if kind == "causal" or draw.random() < 0.7 else draw.size(1, keys)
    heads = min(draw.choice((1, 4, 8, 12, 16)), max(1, draw.most // (queries * keys)))
    shape = (draw.size(1, min(64, draw.most // (heads * queries * keys))), heads, queries, keys)
    layout = draw.layout(4)

    def make() -> Passes:
        mask = draw.tensor((shape[0], 1, queries, keys), torch.float32, device) > 1 if kind == "masked" else None
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=device).triu_(1) if kind == "causal" else mask

        def eager(x: Tensor) -> Tensor:
            return torch.softmax(x * scale if hidden is None else (x * scale).masked_fill(hidden, -10000.0), -1)

        def ours(x: Tensor) -> Tensor:
            return masked_softmax(x, mask, scale=scale, causal=kind == "causal")

        return _both_passes([draw.tensor(shape, dtype, device, layout)], ours, eager)

    return f"{kind} {_name(dtype, shape, layout)}", make


def _xentropy(draw: Draw, device: torch.device) -> Drawn:
    classes = draw.choice((2, 10, 1000, 1000, 30522, 32000, 50257, 128256, 151936, draw.length(16, 200_000)))
    classes, dtype, layout = min(classes, draw.most), draw.dtype(), draw.layout(2)
    shape = (draw.size(16, min(16384, 2 * draw.most // classes)), classes)
    smoothing = draw.choice((0.0, 0.1))

    def make() -> Passes:
        labels = torch.randint(classes, shape[:1], device=device)

        def eager(x: Tensor) -> Tensor:
            wide = x if x.dtype == torch.float64 else x.float()
            return F.cross_entropy(wide, labels, reduction="none", label_smoothing=smoothing)

        def ours(x: Tensor) -> Tensor:
            return SoftmaxCrossEntropyLoss.apply(x, labels, smoothing, -100, True)

        return _both_passes([draw.tensor(shape, dtype, device, layout)], ours, eager)

    return _name(dtype, shape, layout, "smoothing" * (smoothing > 0)), make


def _rope(draw: Draw, device: torch.device) -> Drawn:
    channels, heads = draw.choice((16, 32, 64, 80, 96, 128, 256)), draw.size(1, 64)
    dtype, which = draw.dtype(), draw.choice(("sbhd", "cached", "thd", "qk"))
    tokens = draw.size(256, max(256, min(65536, draw.most // (heads * channels))))
    batches = 1 if which == "thd" else draw.choice((1, 1, 2, 4, 8))
    length, key_heads = -(-tokens // batches), draw.choice((1, heads)) if which == "qk" else 0
    outer = {"thd": (max(16, length),), "qk": (batches, length)}.get(which, (length, batches))
    shape = (*outer, heads, channels)

    def prepare(direction: str, device: torch.device) -> Prepared:
        return rope._prepare(rope.Kind(which, dtype, shape, direction, key_heads), device)

    return f"{which} {_name(dtype, shape, key_heads)}", functools.partial(_as_benchmarked, prepare, device)


def _image(draw: Draw, multiple: int, most_channels: int) -> tuple[tuple[int, ...], torch.memory_format]:
    channels = draw.size(max(8, multiple), min(most_channels, draw.most // 64), multiple)
    side = draw.choice((4, 7, 8, 14, 16, 28, 32, 40, 48, 56, 64, 96, 112, 128))
    side = max(2, min(side, math.isqrt(draw.most // channels)))
    images = draw.size(1, min(128, draw.most // (channels * side * side)))
    return (images, channels, side, side), draw.choice((torch.channels_last, torch.contiguous_format))


def _group_norm(draw: Draw, device: torch.device) -> Drawn:
    groups, dtype, silu = draw.choice((8, 16, 32, 32)), draw.dtype(), draw.random() < 0.7
    shape, memory = _image(draw, groups, 2560)

    def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        output = F.group_norm(x, groups, weight, bias, 1e-5)
        return F.silu(output) if silu else output

    def make() -> Passes:
        parameters = [draw.around_one(shape[1], dtype, device) for _ in range(2)]
        leaves = [draw.tensor(shape, dtype, device).contiguous(memory_format=memory), *parameters]
        return _both_passes(leaves, lambda x, *p: group_norm(x, groups, *p, 1e-5, "silu" * silu), eager)

    return _name(dtype, shape, memory, f"groups {groups}", "silu" * silu), make


def _batch_norm(draw: Draw, device: torch.device) -> Drawn:
    dtype, relu, addend = draw.dtype(), draw.random() < 0.7, draw.random() < 0.3
    shape, memory = _image(draw, draw.choice((1, 8, 16, 64)), 2048)

    def plain(x: Tensor, weight: Tensor, bias: Tensor, z: Tensor | None = None) -> Tensor:
        output = F.batch_norm(x, None, None, weight, bias, True, 0.1, 1e-5)
        return output if z is None else output + z

    def ours(x: Tensor, weight: Tensor, bias: Tensor, z: Tensor | None = None) -> Tensor:
        return batch_norm(x, None, None, weight, bias, True, 0.1, 1e-5, z=z, relu=relu)

    def make() -> Passes:
        x, *z = (draw.tensor(shape, dtype, device).contiguous(memory_format=memory) for _ in range(1 + addend))
        leaves = [x, *(draw.around_one(shape[1], torch.float32, device) for _ in range(2)), *z]
        return _both_passes(leaves, ours, (lambda *t: F.relu(plain(*t))) if relu else plain, plain if relu else None)

    return _name(dtype, shape, memory, "add" * addend, "relu" * relu), make


def _glu(draw: Draw, device: torch.device) -> Drawn:
    columns, dtype, layout = 2 * draw.length(32, 24000), draw.dtype(), draw.layout(2)
    shape, biased, gelu = (draw.rows(columns), columns), draw.random() < 0.5, draw.random() < 0.3

    def eager(x: Tensor, bias: Tensor | None = None) -> Tensor:
        gate, value = (x if bias is None else x + bias).chunk(2, -1)
        return (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * value

    def make() -> Passes:
        leaves = [draw.tensor(shape, dtype, device, layout), *([draw.around_one(columns, dtype, device)] * biased)]
        return _both_passes(leaves, lambda *t: bias_glu(*t, activation="gelu_tanh" if gelu else "silu"), eager)

    return _name(dtype, shape, layout, "bias" * biased, "gelu" * gelu), make


def _dense(draw: Draw, device: torch.device) -> Drawn:
    dtype, multiple, two = draw.dtype(), draw.choice((64, 64, 8, 1)), draw.random() < 0.5
    most = max(16, math.isqrt(draw.most) // 2)
    rows, *sizes = (draw.size(16, 2 * most), *(draw.size(16, most, multiple) for _ in range(4)))
    prepare = functools.partial(dense._prepare_mlp, dtype, rows, sizes)
    if two:
        prepare = functools.partial(dense._prepare_gelu, dtype, rows, *sizes[:2], False)
    shape = (rows, *sizes[: 2 if two else 4])
    return ("gelu " if two else "mlp ") + _name(dtype, shape), functools.partial(_as_benchmarked, prepare, device)


def _attention(draw: Draw, device: torch.device) -> Drawn:
    dtype, head, heads = draw.dtype(), draw.choice((8, 16, 32, 32, 64)), draw.choice((1, 2, 4, 8))
    length = draw.size(16, min(768, math.isqrt(draw.most // heads)), draw.choice((1, 8, 16)))
    batch = draw.size(1, min(512, draw.most // (heads * length * max(length, head))))

    def make() -> Passes:
        query, key, value = (draw.tensor((batch, length, heads, head), dtype, device).transpose(1, 2) for _ in range(3))
        bias = draw.tensor((1, heads, length, length), dtype, device)
        mask = (draw.tensor((batch, 1, 1, length), torch.float32, device) > -1.3).to(dtype)
        mask[..., 0] = 1

        def eager(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, bias + (mask.to(bias.dtype) - 1) * 1e4)

        return _both_passes([query, key, value, bias], lambda q, k, v, bias: AttnTri(q, k, v, mask, bias, 1e4), eager)

    return _name(dtype, (batch, heads, length, head)), make


def _focal_loss(draw: Draw, device: torch.device) -> Drawn:
    classes, dtype = draw.choice((1, 2, 20, 80, 90, 91, draw.size(2, 400))), draw.dtype()
    images = draw.choice((1, 2, 4, 8, 16))
    shape = (images, draw.size(64, min(200_000, draw.most // (images * classes))), classes)
    prepare = functools.partial(focal_loss._prepare, dtype, shape)
    return _name(dtype, shape), functools.partial(_as_benchmarked, prepare, device)


def _optimizers(draw: Draw, device: torch.device) -> Drawn:
    """An optimizer that PyTorch has too, or a pass over all gradients, on tensors of very different sizes."""
    algorithms = [a for a in optimizers.ALGORITHMS if "eager" not in a.peers and "distributed" not in a.name]
    algorithm, count = draw.choice(algorithms), draw.size(1, 300)
    shapes: list[tuple[int, ...]] = [(draw.size(1, max(2, draw.most // (2 * count)), 4),) for _ in range(count)]
    words = f"{count} tensors {sum(map(math.prod, shapes))} elements"
    if draw.random() < 0.3:
        chosen = draw.choice(PASSES)
        return f"{chosen.name} {words}", lambda: {"": prepare_pass(chosen, shapes, shapes, device)}
    parameters = functools.partial(make_parameters, shapes, device, algorithm.dtype)
    makers, dtypes = algorithm.implementations(device), algorithm.result_dtypes
    return f"{algorithm.name} {words}", lambda: {
        "": prepared_steps(makers, algorithm.exact, parameters(), parameters, dtypes)
    }


FAMILIES: dict[str, Callable[[Draw, torch.device], Drawn]] = {
    "layer_norm": functools.partial(_norm, mean=True),
    "rms_norm": functools.partial(_norm, mean=False),
    "softmax": _softmax,
    "xentropy": _xentropy,
    "rope": _rope,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    "glu": _glu,
    "dense": _dense,
    "attention": _attention,
    "focal_loss": _focal_loss,
    "optimizers": _optimizers,
}
