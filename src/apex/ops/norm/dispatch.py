"""The norms without autograd: which implementation runs, given tensors that were found fit."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _library
from . import config, native, reference
from .checks import check_backward
from .launches import triton_backward, triton_forward
from .self_check import self_check

FAMILY = _library.register_family(
    _library.OpFamily(
        "norm",
        "layer norm and RMS norm, forward and backward",
        self_check,
        small_inputs=f"PyTorch's operator below {config.NATIVE_BELOW:,} elements",
    )
)


def norm_forward(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    row_length: int,
    eps: float,
    subtract_mean: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Output, mean (None for RMS norm) and reciprocal deviation per row."""
    if input.numel() and _library.runs_triton(FAMILY, input):
        return triton_forward(input, weight, bias, row_length, eps, subtract_mean, out_dtype)
    if subtract_mean and input.numel():
        return native.layer_norm_forward(input, weight, bias, row_length, eps, out_dtype)
    return reference.forward(input, weight, bias, row_length, eps, subtract_mean, out_dtype)


def norm_backward(
    dy: Tensor,
    saved: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    row_length: int,
    eps: float,
    subtract_mean: bool,
    from_output: bool,
    dx_dtype: torch.dtype,
    param_grads: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias from the saved input, or output when `from_output`."""
    check_backward(dy, saved, mean, rstd, row_length, needs_mean=subtract_mean and not from_output)
    if saved.numel() and _library.runs_triton(FAMILY, saved):
        mean = None if mean is None else mean.to(torch.float32).contiguous()
        rstd = rstd.to(torch.float32).contiguous()
        return triton_backward(
            dy, saved, mean, rstd, weight, bias, row_length, eps, subtract_mean, from_output, dx_dtype, param_grads
        )
    if saved.numel() and mean is not None and subtract_mean and not from_output:
        return native.layer_norm_backward(dy, saved, mean, rstd, weight, bias, row_length, dx_dtype, param_grads)
    return reference.backward(
        dy, saved, mean, rstd, weight, bias, row_length, eps, subtract_mean, from_output, dx_dtype, param_grads
    )
