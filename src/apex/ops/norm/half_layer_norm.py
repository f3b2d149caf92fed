"""Layer norm of half-precision tensors on a CPU, where gradients are wanted.

PyTorch's operator keeps the statistics of each row in half precision there and sums the gradients of weight and bias in
it: 5% off after 4096 rows. With float32 weights it keeps the statistics in float32, in 0.9 times the time, so that is
the forward pass; the backward pass sums in float32.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _library
from . import reference
from .spec import NormSpec

HALF = (torch.float16, torch.bfloat16)
# Below this many elements Python's part in the backward pass takes longer than casting input and output does: a step of
# 64x256 elements takes 1.5 times PyTorch's time, with casts 1.3; of 128x1024, 0.90 and 0.85, its forward 1.0 and 1.3.
SMALLEST = 1 << 16

_ON_ARM = platform.machine() in ("aarch64", "arm64")

_backward = torch.ops.aten.native_layer_norm_backward.default


def is_wanted(input: Tensor, weight: Tensor | None, out_dtype: torch.dtype) -> bool:
    """Whether `layer_norm` is the way; not where something else than autograd differentiates or a graph is compiled."""
    return (
        input.dtype in HALF
        and input.is_cpu
        and out_dtype == input.dtype
        and input.numel() >= SMALLEST
        and (weight is None or weight.dtype != torch.float64)
        and type(input) in (Tensor, torch.nn.Parameter)
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def forward(
    input: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Output, mean and reciprocal deviation of each row, and the parameters in float32."""
    # Without a weight the statistics would be kept in half precision, too.
    wide_weight = input.new_ones(shape, dtype=torch.float32) if weight is None else weight.float()
    wide_bias = None if bias is None else bias.float()
    return *torch.native_layer_norm(input, shape, wide_weight, wide_bias, eps), wide_weight, wide_bias


def backward(
    dy: Tensor,
    input: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    param_grads: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias, these two in the float32 of `weight` and `bias`."""
    dx = None
    arguments = (shape, mean, rstd, weight, bias)
    if not param_grads or input.dtype == torch.float16:
        # An Arm core takes twice as long to round this to float16 in a pass of its own as for PyTorch's whole backward
        # pass; rounding to bfloat16 takes a tenth of that, which is less than float32 gains.
        dx = _backward(dy, input, *arguments, [True, False, False])[0]
        if not param_grads:
            return dx, None, None
    wide_dx, dweight, dbias = _backward(_wide(dy), _wide(input), *arguments, [dx is None, True, bias is not None])
    return wide_dx.to(input.dtype) if dx is None else dx, dweight, dbias


def _wide(tensor: Tensor) -> Tensor:
    """The tensor in float32."""
    if tensor.dtype != torch.float16 or not _ON_ARM:
        return tensor.float()
    # PyTorch's way from contiguous float16 is slow there: a million elements take 2023 us, in halves of rows 723.
    wide = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
    for half, part in zip(wide.chunk(2, -1), tensor.chunk(2, -1), strict=True):
        half.copy_(part)
    return wide


class _HalfLayerNorm(torch.autograd.Function):
    """The norm as an autograd node; its arguments were checked."""

    @staticmethod
    def forward(ctx, input, shape, weight, bias, eps):  # type: ignore[no-untyped-def, override]
        output, mean, rstd, wide_weight, wide_bias = forward(input, shape, weight, bias, eps)
        ctx.save_for_backward(input, weight, bias, mean, rstd)
        ctx.wide = wide_weight, wide_bias
        ctx.shape, ctx.eps = shape, eps
        return output

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def, override]
        input, weight, bias, mean, rstd = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradients themselves must be differentiable
            spec = NormSpec(math.prod(ctx.shape), ctx.eps, True)
            statistics = reference.statistics(input, spec)
            dx, dweight, dbias = reference.backward(dy, input, statistics, weight, bias, spec, input.dtype)
            return dx, None, dweight, dbias, None
        param_grads = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        wide_weight, wide_bias = ctx.wide
        dx, dweight, dbias = backward(dy, input, ctx.shape, mean, rstd, wide_weight, wide_bias, param_grads)
        return dx, None, _of_dtype(dweight, weight), _of_dtype(dbias, bias), None


def _of_dtype(gradient: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    return None if gradient is None or parameter is None else gradient.to(parameter.dtype)


_apply = _library.quick_apply(_HalfLayerNorm)


def layer_norm(input: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm over the trailing `shape`, of arguments for which `is_wanted` says so."""
    return _apply(input, shape, weight, bias, eps)
