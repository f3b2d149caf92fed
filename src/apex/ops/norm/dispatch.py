"""The norms without autograd: which implementation runs, given tensors that were found fit."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _library
from . import config, native, reference
from .checks import check_backward
from .launches import triton_backward, triton_forward
from .self_check import self_check
from .spec import NormSpec

FAMILY = _library.register_family(
    _library.OpFamily(
        "norm",
        "layer norm and RMS norm, forward and backward",
        self_check,
        small_inputs=f"PyTorch's operator below {config.NATIVE_BELOW:,} elements",
    )
)


def norm_forward(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Output and statistics: per row the reciprocal deviation, and below it, for layer norm, the mean."""
    if input.numel() and _library.runs_triton(FAMILY, input):
        return triton_forward(input, weight, bias, spec, out_dtype)
    if spec.subtract_mean and input.numel():
        return native.layer_norm_forward(input, weight, bias, spec, out_dtype)
    return reference.forward(input, weight, bias, spec, out_dtype)


def norm_backward(
    dy: Tensor,
    saved: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: NormSpec,
    dx_dtype: torch.dtype,
    param_grads: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias from the saved input, or output when `spec.from_output`."""
    check_backward(dy, saved, statistics, spec)
    arguments = (weight, bias, spec, dx_dtype, param_grads)
    if saved.numel() and _library.runs_triton(FAMILY, saved):
        return triton_backward(dy, saved, statistics.to(torch.float32).contiguous(), *arguments)
    if saved.numel() and spec.subtract_mean:
        return native.layer_norm_backward(dy, saved, statistics, *arguments)
    return reference.backward(dy, saved, statistics, *arguments)
