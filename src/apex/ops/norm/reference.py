"""Layer norm and RMS norm in PyTorch operators: the definition that everything else is held against.

Runs on any device in any floating dtype; half precision is computed in float32, float64 in float64. Differentiable,
so that derivatives of derivatives come out of it too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .spec import NormSpec


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any tensor is float64, else float32."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def as_rows(tensor: Tensor, row_length: int) -> Tensor:
    """The tensor as a matrix of rows; without rows where they have no elements."""
    return tensor.reshape(tensor.numel() // max(1, row_length), row_length)


def statistics(input: Tensor, spec: NormSpec) -> Tensor:
    """Reciprocal standard deviation (or root mean square) of each row; below it, for layer norm, the mean."""
    rows = as_rows(input, spec.row_length).to(compute_dtype(input))
    mean = rows.mean(1) if spec.subtract_mean else None
    centred = rows if mean is None else rows - mean[:, None]
    rstd = torch.rsqrt(centred.square().mean(1) + spec.eps)
    return rstd[None] if mean is None else torch.stack((rstd, mean))


def forward(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Output (shape of `input`) and `statistics`."""
    compute = compute_dtype(input, weight)
    moments = statistics(input, spec)
    output = as_rows(input, spec.row_length).to(compute)
    if spec.subtract_mean:
        output = output - moments[1, :, None]
    output = output * moments[0, :, None]
    if weight is not None:
        output = output * weight.reshape(-1).to(compute)
    if bias is not None:
        output = output + bias.reshape(-1).to(compute)
    return output.to(out_dtype).reshape(input.shape), moments


def normalised_from_output(output: Tensor, weight: Tensor | None, bias: Tensor | None, compute: torch.dtype) -> Tensor:
    """The normalised input, given rows of the output."""
    normalised = output.to(compute)
    if bias is not None:
        normalised = normalised - bias.reshape(-1).to(compute)
    if weight is not None:
        w = weight.reshape(-1).to(compute)
        # A weight of zero has erased its column from the output: what is left there is the bias' rounding, if any. A
        # weight near zero magnifies that rounding, but no normalised value exceeds the root of the row's length.
        limit = math.sqrt(output.shape[1])
        normalised = (normalised / torch.where(w == 0, 1.0, w)).clamp(-limit, limit)
    return normalised


def backward(
    dy: Tensor,
    saved: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: NormSpec,
    dx_dtype: torch.dtype,
    param_grads: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias, from the saved input or (`spec.from_output`) the saved output."""
    compute = compute_dtype(dy, saved, weight)
    gradient = as_rows(dy, spec.row_length).to(compute)
    rows = as_rows(saved, spec.row_length)
    rstd = statistics[0, :, None].to(compute)
    if spec.from_output:
        normalised = normalised_from_output(rows, weight, bias, compute)
    else:
        normalised = rows.to(compute)
        if spec.subtract_mean:
            normalised = normalised - statistics[1, :, None].to(compute)
        normalised = normalised * rstd
    wdy = gradient if weight is None else gradient * weight.reshape(-1).to(compute)
    correction = normalised * (wdy * normalised).mean(1, keepdim=True)
    if spec.subtract_mean:
        correction = correction + wdy.mean(1, keepdim=True)
    dx = ((wdy - correction) * rstd).to(dx_dtype).reshape(saved.shape)
    dweight = dbias = None
    if param_grads and weight is not None:
        dweight = (gradient * normalised).sum(0).to(weight.dtype).reshape(weight.shape)
        if bias is not None:
            dbias = gradient.sum(0).to(bias.dtype).reshape(bias.shape)
    return dx, dweight, dbias
