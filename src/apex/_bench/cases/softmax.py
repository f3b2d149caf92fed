"""Softmax of attention scores: causal, masked and scaled, forward and backward separately, and small steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...ops.softmax import SoftmaxSpec, reference
from ...transformer.functional import scaled_masked_softmax, scaled_softmax, scaled_upper_triang_masked_softmax
from ..directions import SHORT, Random, passes, prepare, times, with_peers
from ..registry import Case, Expected, Family, Prepared, register

SCALE = 0.125
BF16, FP32 = torch.bfloat16, torch.float32
Shape = tuple[int, ...]
# Kind, dtype and shape; [b, heads, queries, keys], or with batch and heads combined.
GPU_SHAPES: Sequence[tuple[str, torch.dtype, Shape]] = (
    ("causal_softmax", BF16, (64, 1024, 1024)),
    ("causal_softmax", BF16, (64, 2048, 2048)),
    ("causal_softmax", BF16, (16, 8192, 8192)),
    ("masked_softmax", BF16, (8, 16, 2048, 2048)),
    ("scaled_softmax", BF16, (8, 16, 2048, 2048)),
    ("scaled_softmax", FP32, (8, 16, 1024, 1024)),
)
CPU_SHAPES: Sequence[tuple[str, torch.dtype, Shape]] = tuple(
    (kind, dtype, shape)
    for dtype in (FP32, BF16)
    for kind, shape in (
        ("causal_softmax", (16, 512, 512)),
        ("masked_softmax", (4, 4, 512, 512)),
        ("scaled_softmax", (4, 4, 512, 512)),
    )
)
STEP_SHAPE = (4, 16, 128, 128)
STEPS = tuple((kind, BF16, STEP_SHAPE) for kind in ("causal_softmax", "masked_softmax", "scaled_softmax"))

Softmax = Callable[[Tensor], Tensor]


def _bytes_moved(kind: str, dtype: torch.dtype, shape: Shape, direction: str) -> int:
    """Return the bytes that a direction moves.

    A causal pass reads half of its inputs and writes its whole output; a mask is a byte per batch, query and key.
    """
    tensor = math.prod(shape) * dtype.itemsize
    read = 0.5 if kind == "causal_softmax" else 1.0
    forward, backward = (1 + read) * tensor, (1 + 2 * read) * tensor
    if kind == "masked_softmax":
        forward += math.prod(shape) // shape[1]
    return round({"fwd": forward, "bwd": backward, "step": forward + backward}[direction])


def _mask(kind: str, shape: Shape, random: Random) -> Tensor | None:
    """Return the eager code's mask: the future for a causal softmax, a fifth of the keys for a masked one, or None."""
    if kind == "causal_softmax":
        return reference.causal_mask(shape[-2], shape[-1], random.device)
    if kind == "masked_softmax":
        return random.uniform(shape[0], 1, *shape[2:]) < 0.2
    return None


def _eager(input: Tensor, mask: Tensor | None) -> Tensor:
    scores = input * SCALE
    return torch.softmax(scores if mask is None else scores.masked_fill(mask, -10000.0), -1)


def _ours(kind: str, mask: Tensor | None) -> Softmax:
    if kind == "causal_softmax":
        return lambda input: scaled_upper_triang_masked_softmax(input, None, SCALE)
    if kind == "masked_softmax":
        return lambda input: scaled_masked_softmax(input, mask, SCALE)
    return lambda input: scaled_softmax(input, SCALE)


def _liger() -> Softmax:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction  # type: ignore[import-not-found]

    return lambda input: LigerSoftmaxFunction.apply(input * SCALE)


def _expected(kind: str, input: Tensor, mask: Tensor | None, gradient: Tensor, direction: str) -> Expected:
    """Compute the expected result one batch at a time: the float64 intermediates of all batches would not fit.

    A gradient is computed from the rounded output, like in a backward pass.
    """
    keys = input.shape[-1]
    expected = torch.empty(input.shape, dtype=torch.float64, device=input.device)
    spec = SoftmaxSpec(SCALE, kind == "causal_softmax")
    for i in range(input.shape[0]):
        hidden = None if mask is None or spec.causal else mask[i]
        expected[i], _ = reference.forward(input[i].detach().double(), hidden, None, *spec)
        if direction != "fwd":
            expected[i] = reference.backward(gradient[i].double(), expected[i].to(input.dtype).double(), None, *spec)
    return Expected(expected, input.dtype, 1 if direction == "fwd" else keys)


def _prepare(kind: str, dtype: torch.dtype, shape: Shape, direction: str, device: torch.device) -> Prepared:
    random = Random(device)
    input, gradient = (random.normal(*shape, dtype=dtype) for _ in range(2))
    mask = _mask(kind, shape, random)
    apart = direction != "step"
    makers = with_peers(
        _ours(kind, mask),
        lambda input: _eager(input, mask),
        device,
        compile=apart,
        liger=_liger if apart and kind == "scaled_softmax" else None,
    )
    expected = [_expected(kind, input, mask, gradient, direction)]
    return prepare(makers, (input.requires_grad_(),), gradient, direction, expected)


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Return large shapes in both directions, then steps of small shapes; a CPU gets smaller shapes."""
    shapes = GPU_SHAPES if device.type == "cuda" else CPU_SHAPES
    rows: list[tuple[str, torch.dtype, Shape, tuple[str, ...]]]
    rows = [(*shape, ("fwd", "bwd")) for shape in (shapes[:1] if quick else shapes)]
    rows += [(*step, ("step",)) for step in (STEPS[:1] if quick else STEPS)]
    result = []
    for kind, dtype, shape, ways in rows:
        moved = {way: _bytes_moved(kind, dtype, shape, way) for way in ways}
        result += passes(f"{kind} {SHORT[dtype]} {times(shape)}", moved, _prepare, kind, dtype, shape)
    return result


register(Family("softmax", "scaled and masked softmax of attention scores", cases))
