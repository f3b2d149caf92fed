"""Layer norm and RMS norm in PyTorch operators: the definition that other implementations are tested against.

Runs on any device in any floating dtype; half precision is computed in float32, float64 in float64. Differentiable
twice. When autograd is off, a layer norm and its derivative are PyTorch's own operators, which take a third of the time
on a CPU. `torch_norm` always uses PyTorch's fused operators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .._library import autocast_dtype, compute_dtype


def is_exporting() -> bool:
    """Return whether torch.export or torch.onnx is active.

    Does not use torch.compiler.is_exporting: up to PyTorch 2.10 at least it is True in torch.compile too. PyTorch 2.6
    only knows about ONNX.
    """
    return getattr(torch.compiler, "_is_exporting_flag", False) or torch.onnx.is_in_onnx_export()


# Before it had a fused RMS norm, PyTorch computed the RMS norm of half-precision tensors in half precision.
_RMS_NORM_IS_FUSED = hasattr(torch.ops.aten, "_fused_rms_norm")


def as_rows(tensor: Tensor, row_length: int) -> Tensor:
    """Return the tensor as a matrix of rows, with no rows if it has no elements."""
    return tensor.reshape(tensor.numel() // max(1, row_length), row_length)


def _flat(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if parameter is None else parameter.reshape(-1).to(dtype)


def _statistics(input: Tensor, row_length: int, eps: float, subtract_mean: bool) -> Tensor:
    """Return the reciprocal standard deviation (or root mean square) of each row; then, for layer norm, the means."""
    rows = as_rows(input, row_length).to(compute_dtype(input))
    mean = rows.mean(1) if subtract_mean else None
    centred = rows if mean is None else rows - mean[:, None]
    rstd = torch.rsqrt(centred.square().mean(1) + eps)
    return rstd[None] if mean is None else torch.stack((rstd, mean))


def forward(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    row_length: int,
    eps: float,
    subtract_mean: bool,
    from_output: bool,
    out_dtype: torch.dtype,
    input_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return output (shape of `input`) and statistics."""
    compute = compute_dtype(input, weight)
    if subtract_mean and not torch.is_grad_enabled():
        parameters = _flat(weight, compute), _flat(bias, compute)
        rows = as_rows(input, row_length).to(compute)
        output, mean, rstd = torch.native_layer_norm(rows, (row_length,), *parameters, eps)
        statistics = torch.stack((rstd[:, 0], mean[:, 0])).to(compute_dtype(input))
        return output.to(out_dtype).reshape(input.shape), statistics
    statistics = _statistics(input, row_length, eps, subtract_mean)
    output = as_rows(input, row_length).to(compute)
    if subtract_mean:
        output = output - statistics[1, :, None]
    output = output * statistics[0, :, None]
    if weight is not None:
        output = output * weight.reshape(-1).to(compute)
    if bias is not None:
        output = output + bias.reshape(-1).to(compute)
    return output.to(out_dtype).reshape(input.shape), statistics


def _normalised_from_output(output: Tensor, weight: Tensor | None, bias: Tensor | None, compute: torch.dtype) -> Tensor:
    """Return the normalised input, computed from rows of the output."""
    normalised = output.to(compute)
    if bias is not None:
        normalised = normalised - bias.reshape(-1).to(compute)
    if weight is not None:
        w = weight.reshape(-1).to(compute)
        # A weight of zero has erased its column from the output: only the bias' rounding, if any, is left there. A
        # weight near zero magnifies that rounding, but no normalised value exceeds the root of the row's length.
        limit = math.sqrt(output.shape[1])
        normalised = (normalised / torch.where(w == 0, 1.0, w)).clamp_(-limit, limit)
    return normalised


def backward(
    dy: Tensor,
    saved: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    row_length: int,
    eps: float,
    subtract_mean: bool,
    from_output: bool,
    out_dtype: torch.dtype,
    input_dtype: torch.dtype,
    wanted: Sequence[bool] = (True, True, True),
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight and bias, from the saved input or (`from_output`) the saved output."""
    if torch.is_grad_enabled() and saved.requires_grad:  # a second derivative goes through the statistics too
        statistics = _statistics(saved, row_length, eps, subtract_mean)
    compute = compute_dtype(dy, saved, weight)
    gradient = as_rows(dy, row_length).to(compute)
    rows = as_rows(saved, row_length)
    rstd = statistics[0, :, None].to(compute)
    if from_output:
        normalised = _normalised_from_output(rows, weight, bias, compute)
    else:
        normalised = rows.to(compute)
        if subtract_mean:
            normalised = normalised - statistics[1, :, None].to(compute)
        normalised = normalised * rstd
    wanted = (True, weight is not None and wanted[1], bias is not None and wanted[2])
    if subtract_mean and not torch.is_grad_enabled():
        # Moments of the normalised rows, whose mean is 0 and whose deviation is 1.
        moments = torch.zeros_like(rstd), torch.ones_like(rstd)
        parameters = _flat(weight, compute), _flat(bias, compute)
        dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            gradient, normalised, (row_length,), *moments, *parameters, wanted
        )
    else:
        wdy = gradient if weight is None else gradient * weight.reshape(-1).to(compute)
        correction = normalised * (wdy * normalised).mean(1, keepdim=True)
        if subtract_mean:
            correction = correction + wdy.mean(1, keepdim=True)
        dx = wdy - correction
        dweight = (gradient * normalised).sum(0) if wanted[1] else None
        dbias = gradient.sum(0) if wanted[2] else None
    dx *= rstd
    if weight is not None and dweight is not None:
        dweight = dweight.to(weight.dtype).reshape(weight.shape)
    if bias is not None and dbias is not None:
        dbias = dbias.to(bias.dtype).reshape(bias.shape)
    return dx.to(input_dtype).reshape(saved.shape), dweight, dbias


def torch_norm(
    input: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    subtract_mean: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """Return the norm by PyTorch's fused operators; input, weight and output may have different dtypes."""
    if autocast_dtype(input) is not None:
        with torch.autocast(input.device.type, enabled=False):  # autocast would make the output float32
            return torch_norm(input, shape, weight, bias, eps, subtract_mean, out_dtype)
    dtype = input.dtype
    # ONNX from torch.jit.trace has no RMS norm, and ONNX from torch.export lacks PyTorch's RMS norm on a GPU.
    tracing = is_exporting() if torch.compiler.is_compiling() else torch._C._is_tracing()
    # PyTorch's RMS norm adds eps in place, which raises for a DTensor that is sharded over the normalised dimension.
    in_parts = (tracing or hasattr(input, "device_mesh")) and not subtract_mean
    # On a CPU PyTorch sums the gradients of half-precision layer-norm weights in half precision: 5% off after 4096
    # rows. Before it had a fused RMS norm, it computed all of it in half precision.
    widen = (input.is_cpu if subtract_mean else not _RMS_NORM_IS_FUSED) and dtype.itemsize == 2
    same_dtype = (weight is None or weight.dtype == dtype) and (bias is None or bias.dtype == dtype)
    if same_dtype and out_dtype == dtype and not widen and not in_parts:
        if subtract_mean:
            return torch.layer_norm(input, shape, weight, bias, eps)
        return torch.rms_norm(input, shape, weight, eps)
    compute = torch.promote_types(compute_dtype(input, weight), out_dtype)
    wide, weight, bias = (None if t is None else t.to(compute) for t in (input, weight, bias))
    assert wide is not None
    if subtract_mean:
        return torch.layer_norm(wide, shape, weight, bias, eps).to(out_dtype)
    if not in_parts:
        return torch.rms_norm(wide, shape, weight, eps).to(out_dtype)
    mean_square = wide.square().mean(tuple(range(-len(shape), 0)), keepdim=True)
    output = wide * torch.rsqrt(mean_square + eps)
    return (output if weight is None else output * weight).to(out_dtype)
