"""Layer norm and RMS norm in PyTorch operators: the definition that everything else is held against.

Runs on any device in any floating dtype; half precision is computed in float32, float64 in float64. Differentiable,
so that derivatives of derivatives come out of it too.
"""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any tensor is float64, else float32."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def as_rows(tensor: Tensor, row_length: int) -> Tensor:
    """The tensor as a matrix of rows; without rows where they have no elements."""
    return tensor.reshape(tensor.numel() // max(1, row_length), row_length)


def statistics(input: Tensor, row_length: int, eps: float, subtract_mean: bool) -> tuple[Tensor | None, Tensor]:
    """Mean (None for RMS norm) and reciprocal standard deviation (or root mean square) of each row."""
    rows = as_rows(input, row_length).to(compute_dtype(input))
    mean = rows.mean(1) if subtract_mean else None
    centred = rows if mean is None else rows - mean[:, None]
    return mean, torch.rsqrt(centred.square().mean(1) + eps)


def forward(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    row_length: int,
    eps: float,
    subtract_mean: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Output (shape of `input`), mean and rstd (one value per row)."""
    compute = compute_dtype(input, weight)
    mean, rstd = statistics(input, row_length, eps, subtract_mean)
    output = as_rows(input, row_length).to(compute)
    if mean is not None:
        output = output - mean[:, None]
    output = output * rstd[:, None]
    if weight is not None:
        output = output * weight.reshape(-1).to(compute)
    if bias is not None:
        output = output + bias.reshape(-1).to(compute)
    return output.to(out_dtype).reshape(input.shape), mean, rstd


def backward(
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
    """Gradients of input, weight and bias, from the saved input or (`from_output`) the saved output."""
    compute = compute_dtype(dy, saved, weight)
    gradient = as_rows(dy, row_length).to(compute)
    w = None if weight is None else weight.reshape(-1).to(compute)
    normalised = as_rows(saved, row_length).to(compute)
    rstd = rstd.reshape(-1, 1).to(compute)
    if from_output:
        if bias is not None:
            normalised = normalised - bias.reshape(-1).to(compute)
        if w is not None:
            # A weight of zero has erased its column from the output; bounding it keeps the quotient finite.
            normalised = normalised / torch.where(w < 0, w.clamp(max=-eps), w.clamp(min=eps))
    else:
        if mean is not None:
            normalised = normalised - mean.reshape(-1, 1).to(compute)
        normalised = normalised * rstd
    wdy = gradient if w is None else gradient * w
    correction = normalised * (wdy * normalised).mean(1, keepdim=True)
    if subtract_mean:
        correction = correction + wdy.mean(1, keepdim=True)
    dx = ((wdy - correction) * rstd).to(dx_dtype).reshape(saved.shape)
    dweight = dbias = None
    if param_grads and weight is not None:
        dweight = (gradient * normalised).sum(0).to(weight.dtype).reshape(weight.shape)
        if bias is not None:
            dbias = gradient.sum(0).to(bias.dtype).reshape(bias.shape)
    return dx, dweight, dbias
