"""`layer_norm` and `rms_norm`: the functions that the public modules call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _library
from .._checks import check_tensors
from . import config, half_layer_norm, native
from .autograd import NormFunction
from .checks import as_tuple, check_row_length, checked_shape
from .dispatch import FAMILY, norm_forward
from .plans import plan_for
from .spec import NormSpec

_apply_node = _library.quick_apply(NormFunction)

# PyTorch 2.6 knows of ONNX alone.
_is_exporting = getattr(torch.compiler, "is_exporting", torch.onnx.is_in_onnx_export)


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    memory_efficient: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Layer norm over the trailing `normalized_shape`, computed in float32.

    The output has `out_dtype` (default: the input's dtype). `memory_efficient` saves the output for the backward pass
    instead of the input, so that the input can be freed.
    """
    if not isinstance(input, Tensor):
        check_tensors(input=input)
    if weight is not None and not isinstance(weight, Tensor):
        check_tensors(weight=weight)
    if bias is not None and not isinstance(bias, Tensor):
        check_tensors(bias=bias)
    if not memory_efficient and _is_small(input, weight, bias, out_dtype):
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
        try:
            if input.is_cuda or input.dtype not in half_layer_norm.HALF or not torch.is_grad_enabled():
                if torch._C._is_any_autocast_enabled():
                    return native.layer_norm(input, shape, weight, bias, eps)
                return torch.layer_norm(input, shape, weight, bias, eps)  # what that does, with a call less
            return _layer_norm_without_kernel(input, shape, weight, bias, eps, input.dtype)
        except (RuntimeError, TypeError):
            # Says what is wrong in the same words as for large inputs, or accepts what PyTorch does not.
            normalized_shape = checked_shape(input, normalized_shape, weight, bias)
    return _norm(input, normalized_shape, weight, bias, eps, memory_efficient, True, out_dtype)


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float = 1e-5,
    *,
    memory_efficient: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """RMS norm over the trailing `normalized_shape`; arguments as for `layer_norm`."""
    if not isinstance(input, Tensor):
        check_tensors(input=input)
    if weight is not None and not isinstance(weight, Tensor):
        check_tensors(weight=weight)
    if not memory_efficient and _is_small(input, weight, None, out_dtype):
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
        try:
            if torch._C._is_any_autocast_enabled() or not native.RMS_NORM_IS_FUSED:
                return native.rms_norm(input, shape, weight, eps)
            return torch.rms_norm(input, shape, weight, eps)
        except (RuntimeError, TypeError):
            normalized_shape = checked_shape(input, normalized_shape, weight, None)
    return _norm(input, normalized_shape, weight, None, eps, memory_efficient, False, out_dtype)


def _is_small(input: Tensor, weight: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype | None) -> bool:
    """Whether PyTorch's own operator is the quicker way to the same result, the host being the limit.

    The first thing a small norm runs into, so it asks the cheapest questions only.
    """
    dtype = input.dtype
    numel = input.numel()
    return (
        type(numel) is not Tensor  # as under torch.jit.trace
        and not _is_exporting()  # a comparison would limit the sizes that the program takes
        and (numel < config.NATIVE_BELOW or input.is_cpu)
        and (weight is None or weight.dtype == dtype)
        and (bias is None or bias.dtype == dtype)
        and (out_dtype is None or out_dtype == dtype)
        and _library._requested == "auto"  # what `requested` returns
    )


def _norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    memory_efficient: bool,
    subtract_mean: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:
    shape = as_tuple(normalized_shape)
    plan = plan_for(input, shape, weight, bias, eps, memory_efficient, subtract_mean, out_dtype)
    if plan is not None:
        if torch.is_grad_enabled():
            return _apply_node(input, weight, bias, plan.spec, out_dtype, plan)
        return plan.run(input, weight, bias)[0]
    out_dtype = out_dtype or input.dtype
    shape = checked_shape(input, shape, weight, bias)
    # torch.jit.trace sees operators, not kernel launches; an exported program has PyTorch's operators, which ONNX knows
    # and which run without apex; without elements there is nothing to launch.
    numel = input.numel()
    launchable = type(numel) is not Tensor and not _is_exporting() and numel > 0
    if launchable and _library.runs_triton(FAMILY, input):
        spec = NormSpec(check_row_length(shape), eps, subtract_mean, memory_efficient)
        if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return norm_forward(input, weight, bias, spec, out_dtype)[0]
        return _apply_node(input, weight, bias, spec, out_dtype, None)
    if launchable and memory_efficient and torch.is_grad_enabled():
        spec = NormSpec(check_row_length(shape), eps, subtract_mean, memory_efficient)
        return _apply_node(input, weight, bias, spec, out_dtype, None)
    if subtract_mean and launchable:
        return _layer_norm_without_kernel(input, shape, weight, bias, eps, out_dtype)
    return native.mixed_norm(input, shape, weight, bias, eps, subtract_mean, out_dtype)


def _layer_norm_without_kernel(
    input: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
) -> Tensor:
    if half_layer_norm.is_wanted(input, weight, out_dtype):
        return half_layer_norm.layer_norm(input, shape, weight, bias, eps)
    return native.mixed_norm(input, shape, weight, bias, eps, True, out_dtype)
