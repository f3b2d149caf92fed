"""`dropout_add`: residual + dropout(x), in one pass, keeping eight bytes for the backward pass instead of a mask."""

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

# Elements per program, in quarters; and the size below which the host is the limit and two calls into C++ are quicker
# than one into Python.
QUARTER = 1024
NATIVE_BELOW = 1 << 22

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
    if torch.compiler.is_compiling() or not _worth_a_launch(x) or not _library.runs_triton(FAMILY, x):
        return residual + F.dropout(x, dropout)
    seed = torch.empty(1, dtype=torch.int64, device=x.device).random_()
    return DropoutAdd.apply(x, residual, seed, dropout, torch.promote_types(x.dtype, residual.dtype))


def _worth_a_launch(x: Tensor) -> bool:
    return x.numel() >= NATIVE_BELOW or (x.numel() > 0 and _library.requested() == "triton")


class DropoutAdd(torch.autograd.Function):
    """(residual or nothing) + dropout(x), whose own gradient is dropout again with the same seed."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx, x: Tensor, residual: Tensor | None, seed: Tensor, dropout: float, out_dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.dropout = dropout
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        return launch(x, residual, seed, dropout, out_dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        (seed,) = ctx.saved_tensors
        x_dtype, residual_dtype = ctx.dtypes
        wanted, residual_wanted, *_ = ctx.needs_input_grad
        dx = DropoutAdd.apply(gradient, None, seed, ctx.dropout, x_dtype) if wanted else None
        return dx, gradient.to(residual_dtype) if residual_wanted else None, None, None, None


def launch(x: Tensor, residual: Tensor | None, seed: Tensor, dropout: float, out_dtype: torch.dtype) -> Tensor:
    """The kernel, without autograd."""
    x = x.contiguous()
    output = torch.empty_like(x, dtype=out_dtype)
    bound = _plan(x.numel(), dropout, x.dtype, None if residual is None else residual.dtype, out_dtype, x.device)
    bound(x, None if residual is None else residual.contiguous(), seed, output)
    return output


@functools.lru_cache(maxsize=1024)
def _plan(
    count: int,
    dropout: float,
    x_dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
    out_dtype: torch.dtype,
    device: torch.device,
) -> BoundLaunch:
    from . import kernels

    return kernels.dropout_add.bind(
        (-(-count // (4 * QUARTER)),),
        (count, dropout, 1.0 / (1.0 - dropout)),
        (residual_dtype is not None, QUARTER),
        device=device,
        num_warps=4,
    )
