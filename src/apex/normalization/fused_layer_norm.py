"""Fused layer norm and RMS norm: modules, functions and the autograd Functions that clients call by name.

A `Fused*` norm returns the input's dtype, a `MixedFused*` norm the weight's. Under autocast every floating-point
argument is cast to the autocast dtype first, as upstream does.
"""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init

from .._arguments import checked
from ..ops import norm
from ..ops._checks import check_floats, check_parameters, check_tensors
from ..ops._library import cast_for_autocast

NormalizedShape = int | Sequence[int]


class FusedLayerNormAffineFunction(torch.autograd.Function):
    """The autograd node of layer norm with weight and bias; the output has the input's dtype."""

    @staticmethod
    def forward(ctx, input, weight, bias, normalized_shape, eps, memory_efficient=False):  # type: ignore[override]
        return norm.forward_and_save(
            ctx, input, weight, bias, normalized_shape, eps, memory_efficient, True, input.dtype
        )

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[override]
        return *norm.NORM.backward_from_saved(ctx, grad_output), None, None, None


class FusedLayerNormAffineMixedDtypesFunction(FusedLayerNormAffineFunction):
    """The autograd node of layer norm with weight and bias; the output has the weight's dtype."""

    @staticmethod
    def forward(ctx, input, weight, bias, normalized_shape, eps, memory_efficient=False):  # type: ignore[override]
        return norm.forward_and_save(
            ctx, input, weight, bias, normalized_shape, eps, memory_efficient, True, weight.dtype
        )


class FusedLayerNormFunction(torch.autograd.Function):
    """The autograd node of layer norm without parameters."""

    @staticmethod
    def forward(ctx, input, normalized_shape, eps, memory_efficient=False):  # type: ignore[override]
        return norm.forward_and_save(ctx, input, None, None, normalized_shape, eps, memory_efficient, True, input.dtype)

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[override]
        return norm.NORM.backward_from_saved(ctx, grad_output)[0], None, None, None


class FusedRMSNormAffineFunction(torch.autograd.Function):
    """The autograd node of RMS norm with a weight; the output has the input's dtype."""

    @staticmethod
    def forward(ctx, input, weight, normalized_shape, eps, memory_efficient=False):  # type: ignore[override]
        return norm.forward_and_save(
            ctx, input, weight, None, normalized_shape, eps, memory_efficient, False, input.dtype
        )

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[override]
        return *norm.NORM.backward_from_saved(ctx, grad_output)[:2], None, None, None


class FusedRMSNormAffineMixedDtypesFunction(FusedRMSNormAffineFunction):
    """The autograd node of RMS norm with a weight; the output has the weight's dtype."""

    @staticmethod
    def forward(ctx, input, weight, normalized_shape, eps, memory_efficient=False):  # type: ignore[override]
        return norm.forward_and_save(
            ctx, input, weight, None, normalized_shape, eps, memory_efficient, False, weight.dtype
        )


class FusedRMSNormFunction(torch.autograd.Function):
    """The autograd node of RMS norm without parameters."""

    @staticmethod
    def forward(ctx, input, normalized_shape, eps, memory_efficient=False):  # type: ignore[override]
        return norm.forward_and_save(
            ctx, input, None, None, normalized_shape, eps, memory_efficient, False, input.dtype
        )

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[override]
        return norm.NORM.backward_from_saved(ctx, grad_output)[0], None, None, None


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: NormalizedShape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Compute layer norm with weight and bias; the output has the input's dtype."""
    input, weight, bias = cast_for_autocast(input, weight, bias)
    return norm.layer_norm(input, normalized_shape, weight, bias, eps, memory_efficient=memory_efficient)


def fused_layer_norm(
    input: Tensor, normalized_shape: NormalizedShape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Compute layer norm without parameters."""
    (input,) = cast_for_autocast(input)
    return norm.layer_norm(input, normalized_shape, eps=eps, memory_efficient=memory_efficient)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: NormalizedShape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Compute layer norm with weight and bias; the output has the weight's dtype."""
    check_tensors(weight=weight, bias=bias)
    input, weight, bias = cast_for_autocast(input, weight, bias)
    return norm.layer_norm(
        input, normalized_shape, weight, bias, eps, memory_efficient=memory_efficient, out_dtype=weight.dtype
    )


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor | None,
    normalized_shape: NormalizedShape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Compute RMS norm with a weight; the output has the input's dtype."""
    input, weight = cast_for_autocast(input, weight)
    return norm.rms_norm(input, normalized_shape, weight, eps, memory_efficient=memory_efficient)


def fused_rms_norm(
    input: Tensor, normalized_shape: NormalizedShape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Compute RMS norm without parameters."""
    (input,) = cast_for_autocast(input)
    return norm.rms_norm(input, normalized_shape, eps=eps, memory_efficient=memory_efficient)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: NormalizedShape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Compute RMS norm with a weight; the output has the weight's dtype."""
    check_tensors(weight=weight)
    input, weight = cast_for_autocast(input, weight)
    return norm.rms_norm(
        input, normalized_shape, weight, eps, memory_efficient=memory_efficient, out_dtype=weight.dtype
    )


@checked
def manual_rms_norm(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float) -> Tensor:
    """Compute RMS norm by PyTorch's operators: statistics in float32, the product in a half weight's dtype."""
    check_floats(input=input)
    shape = tuple(normalized_shape)
    if not shape or input.shape[-len(shape) :] != shape:
        raise ValueError(f"normalized_shape={list(shape)} does not end the input's shape {list(input.shape)}")
    if weight is not None:
        check_parameters(input, shape, weight=weight)
    dimensions = tuple(range(-len(normalized_shape), 0))
    mean_square = input.float().square().mean(dimensions, keepdim=True)
    normalised = input * torch.rsqrt(mean_square + eps)
    if weight is None:
        return normalised
    if weight.dtype in (torch.float16, torch.bfloat16):
        normalised = normalised.to(weight.dtype)
    return weight * normalised


class _Norm(nn.Module):
    """Base of the four norms: a trailing shape, eps and optional parameters."""

    normalized_shape: tuple[int, ...]
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    _has_bias = False

    def __init__(
        self,
        normalized_shape: NormalizedShape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(normalized_shape, numbers.Integral):
            normalized_shape = (int(normalized_shape),)
        self.normalized_shape = torch.Size(normalized_shape)  # type: ignore[arg-type]
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.memory_efficient = memory_efficient
        for name, exists in (("weight", elementwise_affine), ("bias", elementwise_affine and self._has_bias)):
            self.register_parameter(name, nn.Parameter(torch.empty(self.normalized_shape)) if exists else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            init.ones_(self.weight)
        if self.bias is not None:
            init.zeros_(self.bias)

    def _add(self, input: Tensor, residual: Any, input_bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the norm of residual + input and that sum; see `FusedLayerNorm`."""
        norm.check_addends(input, residual, input_bias)
        if torch._C._is_any_autocast_enabled():  # the sum has the residual's dtype, its norm autocast's
            total = residual + (input if input_bias is None else input + input_bias)
            return self.forward(total), total
        return norm.add_norm(
            input,
            residual,
            input_bias,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            subtract_mean=self._has_bias,
            memory_efficient=self.memory_efficient,
        )

    def extra_repr(self) -> str:
        return f"{tuple(self.normalized_shape)}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class FusedLayerNorm(_Norm):
    """`torch.nn.LayerNorm` with fused kernels; state dicts are interchangeable.

    `memory_efficient=True` saves the output for the backward pass instead of the input.

    With a `residual` it returns two tensors: the norm of residual + input, and that sum, which is the next layer's
    residual. `input_bias`, the bias of the layer that computed the input, is added to both. One pass computes all of
    this, and one pass all gradients, including the gradient of `input_bias`.
    """

    _has_bias = True

    def forward(self, input: Tensor, residual: Tensor | None = None, input_bias: Tensor | None = None) -> Any:
        if residual is not None or input_bias is not None:
            return self._add(input, residual, input_bias)
        parameters = self._parameters  # reading `self.weight` would take a microsecond longer
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if weight is None or bias is None:  # `weight` or `bias` may be something other than a parameter
            weight, bias = self.weight, self.bias
        if torch._C._is_any_autocast_enabled():  # checked here too: every microsecond counts for a small norm
            input, weight, bias = cast_for_autocast(input, weight, bias)
        return norm.layer_norm(
            input, self.normalized_shape, weight, bias, self.eps, memory_efficient=self.memory_efficient
        )


class FusedRMSNorm(_Norm):
    """`torch.nn.RMSNorm` with fused kernels; state dicts are interchangeable. `FusedLayerNorm` describes `residual`."""

    def forward(self, input: Tensor, residual: Tensor | None = None, input_bias: Tensor | None = None) -> Any:
        if residual is not None or input_bias is not None:
            return self._add(input, residual, input_bias)
        weight = self._parameters.get("weight")
        if weight is None:
            weight = self.weight
        if torch._C._is_any_autocast_enabled():
            input, weight = cast_for_autocast(input, weight)
        return norm.rms_norm(input, self.normalized_shape, weight, self.eps, memory_efficient=self.memory_efficient)


class _MixedNorm(_Norm):
    """A norm that always has parameters. It ignores unknown keywords with a warning, because clients pass some."""

    def __init__(
        self, normalized_shape: NormalizedShape, eps: float = 1e-5, *, memory_efficient: bool = False, **kwargs: Any
    ) -> None:
        name = type(self).__name__
        if not kwargs.pop("elementwise_affine", True):
            raise RuntimeError(f"{name} does not support `elementwise_affine = False`")
        if kwargs:
            accepted = "normalized_shape, eps, memory_efficient and elementwise_affine=True"
            warnings.warn(f"{name} ignores {', '.join(sorted(kwargs))}; it takes {accepted}", stacklevel=2)
        super().__init__(normalized_shape, eps, True, memory_efficient)


class MixedFusedLayerNorm(_MixedNorm, FusedLayerNorm):
    """Layer norm whose output has the weight's dtype, regardless of the input's."""

    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]
        settings = self.normalized_shape, self.eps, self.memory_efficient
        return mixed_dtype_fused_layer_norm_affine(input, self.weight, self.bias, *settings)  # type: ignore[arg-type]


class MixedFusedRMSNorm(_MixedNorm, FusedRMSNorm):
    """RMS norm whose output has the weight's dtype, regardless of the input's."""

    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]
        settings = self.normalized_shape, self.eps, self.memory_efficient
        return mixed_dtype_fused_rms_norm_affine(input, self.weight, *settings)  # type: ignore[arg-type]
