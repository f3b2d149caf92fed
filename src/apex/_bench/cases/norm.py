"""Layer norm and RMS norm: forward and backward separately, and whole steps of small shapes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...normalization import FusedLayerNorm, FusedRMSNorm
from ..directions import Random, exact, long_name, passes, prepare, times, with_peers
from ..registry import Case, Family, Prepared, register

EPS = 1e-5
# Our module and PyTorch's.
NORMS: dict[str, tuple[type[nn.Module], type[nn.Module]]] = {
    "layer_norm": (FusedLayerNorm, nn.LayerNorm),
    "rms_norm": (FusedRMSNorm, nn.RMSNorm),
}
DTYPES = (torch.bfloat16, torch.float32)
GPU_SHAPES = ((16384, 1024), (16384, 4096), (8192, 8192), (4096, 16384))
GPU_STEP_SHAPES = ((128, 1024), (1024, 1024), (4096, 1024))
CPU_SHAPES = ((1024, 1024), (4096, 1024))
CPU_STEP_SHAPES = ((128, 1024), (1024, 1024))


def _liger(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    if bias is None:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # type: ignore[import-not-found]

        # weight offset, casting mode, in place
        return lambda values: LigerRMSNormFunction.apply(values, weight, EPS, 0.0, "llama", False)
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction  # type: ignore[import-not-found]

    return lambda values: LigerLayerNormFunction.apply(values, weight, bias, EPS)


def _prepare(norm: str, dtype: torch.dtype, shape: tuple[int, int], direction: str, device: torch.device) -> Prepared:
    rows, columns = shape
    random = Random(device)
    values, gradient = (random.normal(rows, columns, dtype=dtype) for _ in range(2))
    ours, torchs = (kind(columns, eps=EPS) for kind in NORMS[norm])
    parameters = [nn.Parameter(random.weight(columns, dtype)) for _ in torchs.parameters()]
    for name, parameter in zip(("weight", "bias"), parameters, strict=False):
        for module in (ours, torchs):
            module.register_parameter(name, parameter)
    leaves = (values.requires_grad_(), *parameters)
    liger = None if direction == "step" else functools.partial(_liger, *parameters)
    makers = with_peers(ours, torchs, device, compile=direction != "step", liger=liger)
    function: Any = nn.functional.layer_norm if norm == "layer_norm" else nn.functional.rms_norm
    expected = exact(
        lambda x, *parameters: function(x, (columns,), *parameters, eps=EPS),
        leaves,
        gradient,
        direction,
        dtype,
        (1, 1, rows, rows)[: 1 + len(leaves)],
    )
    return prepare(makers, (values,), gradient, direction, expected, leaves)


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Return large shapes in both directions, then steps of small shapes; a CPU gets smaller shapes."""
    on_gpu = device.type == "cuda"
    shapes: Sequence[tuple[int, int]] = GPU_SHAPES if on_gpu else CPU_SHAPES
    step_shapes: Sequence[tuple[int, int]] = GPU_STEP_SHAPES if on_gpu else CPU_STEP_SHAPES
    if quick:
        step_shapes = step_shapes[:1]
        shapes = shapes[:1] if on_gpu else step_shapes
    result = []
    for sizes, ways in ((shapes, {"fwd": 2, "bwd": 3}), (step_shapes, {"step": 5})):  # tensors that are read or written
        for dtype, shape, norm in itertools.product(DTYPES, sizes, NORMS):
            moved = {way: count * math.prod(shape) * dtype.itemsize for way, count in ways.items()}
            result += passes(f"{norm} {long_name(dtype)} {times(shape)}", moved, _prepare, norm, dtype, shape)
    return result


register(Family("norm", "layer norm and RMS norm", cases))
