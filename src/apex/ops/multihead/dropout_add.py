"""`dropout_add`: residual + dropout(x) in one pass that keeps a bit per element for the backward pass."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _library
from .checks import check_dropout
from .self_check import self_check

if TYPE_CHECKING:
    from .._launch import BoundLaunch

# A program has four stretches of this many elements.
QUARTER = 1024
# Below this many elements the host is the limit, and two calls into C++ are quicker than one into Python: 5.2 million
# take 20 us instead of 23, and the host 23 us more.
NATIVE_BELOW = 1 << 23

FAMILY = _library.register_family(
    _library.OpFamily(
        "multihead",
        "multihead attention: PyTorch's attention on packed projections; dropout and residual in one pass",
        self_check,
        small_inputs=f"PyTorch's dropout below {NATIVE_BELOW:,} elements",
    )
)


def dropout_add(x: Tensor, residual: Tensor, dropout: float) -> Tensor:
    """residual + dropout(x), in the wider of the two dtypes; the random numbers come from the device's generator.

    `torch.compile` fuses PyTorch's own operators into as good a kernel, so it gets those.
    """
    check_dropout(dropout)
    if x.shape != residual.shape:
        raise ValueError(f"x has shape {list(x.shape)}, the residual {list(residual.shape)}: they must be equal")
    if dropout == 0.0:
        return residual + x
    if torch.compiler.is_compiling() or not _worth_a_launch(x) or not _runs_kernels(x, residual):
        return residual + F.dropout(x, dropout)
    seed = torch.empty(1, dtype=torch.int64, device=x.device).random_()
    return DropoutAdd.apply(x, residual, seed, dropout)


def _worth_a_launch(x: Tensor) -> bool:
    return x.numel() >= NATIVE_BELOW or (x.numel() > 0 and _library.requested() == "triton")


def _runs_kernels(x: Tensor, residual: Tensor) -> bool:
    return x.device == residual.device and _library.runs_triton(FAMILY, x) and _library.runs_triton(FAMILY, residual)


class DropoutAdd(torch.autograd.Function):
    """residual + dropout(x)."""

    @staticmethod
    def forward(ctx, x: Tensor, residual: Tensor, seed: Tensor, dropout: float) -> Tensor:  # type: ignore[override]
        output, kept = launch_forward(x, residual, seed, dropout)
        ctx.save_for_backward(kept)
        ctx.dropout = dropout
        ctx.dtypes = x.dtype, residual.dtype
        return output

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        (kept,) = ctx.saved_tensors
        x_dtype, residual_dtype = ctx.dtypes
        wanted, residual_wanted, *_ = ctx.needs_input_grad
        dx = _Drop.apply(gradient, kept, ctx.dropout, x_dtype) if wanted else None
        return dx, gradient.to(residual_dtype) if residual_wanted else None, None, None


class _Drop(torch.autograd.Function):
    """Drops again what was dropped before: the gradient of `DropoutAdd`, and of itself."""

    @staticmethod
    def forward(ctx, x: Tensor, kept: Tensor, dropout: float, out_dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(kept)
        ctx.dropout, ctx.dtype = dropout, x.dtype
        return launch_backward(x, kept, dropout, out_dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        (kept,) = ctx.saved_tensors
        return _Drop.apply(gradient, kept, ctx.dropout, ctx.dtype), None, None, None


def launch_forward(x: Tensor, residual: Tensor, seed: Tensor, dropout: float) -> tuple[Tensor, Tensor]:
    """Output and the bits of what was kept, without autograd."""
    x, residual = x.contiguous(), residual.contiguous()
    output = torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
    kept = torch.empty(_programs(x.numel()) * QUARTER, dtype=torch.uint8, device=x.device)
    _plan(True, x.numel(), dropout, (x.dtype, residual.dtype), x.device)(x, residual, seed, kept, output)
    return output, kept


def launch_backward(gradient: Tensor, kept: Tensor, dropout: float, out_dtype: torch.dtype) -> Tensor:
    """The gradient of x, without autograd."""
    gradient = gradient.contiguous()
    output = torch.empty_like(gradient, dtype=out_dtype)
    _plan(False, gradient.numel(), dropout, (gradient.dtype, out_dtype), gradient.device)(
        gradient, None, None, kept, output
    )
    return output


def _programs(count: int) -> int:
    return -(-count // (4 * QUARTER))


@functools.lru_cache(maxsize=1024)
def _plan(
    forward: bool, count: int, dropout: float, dtypes: tuple[torch.dtype, torch.dtype], device: torch.device
) -> BoundLaunch:
    from . import kernels

    return kernels.dropout_add.bind(
        (_programs(count),),
        (count, dropout, 1.0 / (1.0 - dropout)),
        (forward, forward, QUARTER),
        device=device,
        num_warps=8,  # 16.8 million elements of float16: 35 us where 4 warps take 38, in trials without the bits
    )
