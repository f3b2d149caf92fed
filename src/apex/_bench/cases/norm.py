"""Layer norm and RMS norm: forward and backward apart, whole steps of small shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ...normalization import FusedLayerNorm, FusedRMSNorm
from ..directions import Random, case, exact, long_name, prepare, with_peers
from ..registry import Case, Family, Prepared, register

EPS = 1e-5
# Ours and PyTorch's.
NORMS: dict[str, tuple[type[nn.Module], type[nn.Module]]] = {
    "layer_norm": (FusedLayerNorm, nn.LayerNorm),
    "rms_norm": (FusedRMSNorm, nn.RMSNorm),
}
DTYPES = (torch.bfloat16, torch.float32)
GPU_SHAPES = ((16384, 1024), (16384, 4096), (8192, 8192), (4096, 16384))
GPU_STEP_SHAPES = ((128, 1024), (1024, 1024), (4096, 1024))
CPU_SHAPES = ((1024, 1024), (4096, 1024))
CPU_STEP_SHAPES = ((128, 1024), (1024, 1024))
# Tensors of the input's size that each direction reads and writes; weights are negligible.
TENSORS_MOVED = {"fwd": 2, "bwd": 3, "step": 5}


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
    function = nn.functional.layer_norm if norm == "layer_norm" else nn.functional.rms_norm
    expected = exact(
        lambda x, *parameters: function(x, (columns,), *parameters, eps=EPS),
        leaves,
        gradient,
        direction,
        dtype,
        (1, 1, rows, rows)[: 1 + len(leaves)],
    )
    return prepare(makers, (values,), gradient, direction, expected, leaves)


def _case(norm: str, dtype: torch.dtype, shape: tuple[int, int], direction: str) -> Case:
    moved = TENSORS_MOVED[direction] * shape[0] * shape[1] * dtype.itemsize
    name = f"{norm} {long_name(dtype)} {shape[0]}x{shape[1]}"
    return case(name, moved, _prepare, norm, dtype, shape, direction=direction)


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Large shapes in both directions, then steps of small ones; a processor gets smaller shapes."""
    on_gpu = device.type == "cuda"
    shapes: Sequence[tuple[int, int]] = GPU_SHAPES if on_gpu else CPU_SHAPES
    step_shapes: Sequence[tuple[int, int]] = GPU_STEP_SHAPES if on_gpu else CPU_STEP_SHAPES
    if quick:
        step_shapes = step_shapes[:1]
        shapes = shapes[:1] if on_gpu else step_shapes
    apart = [_case(n, d, s, way) for d in DTYPES for s in shapes for n in NORMS for way in ("fwd", "bwd")]
    return apart + [_case(n, d, s, "step") for d in DTYPES for s in step_shapes for n in NORMS]


register(Family("norm", "layer norm and RMS norm", cases))
