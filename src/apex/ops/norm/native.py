"""PyTorch's own norm operators, used where there is no kernel and where they are the quicker way to the same result.

PyTorch on the CPU sums the gradients of half-precision layer-norm weights in half precision: 5% off after 4096 rows.
Where gradients are wanted, they are summed in float32 here and in `half_layer_norm`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from . import half_layer_norm
from .reference import as_rows, compute_dtype, normalised_from_output
from .spec import NormSpec

# Before it had a fused RMS norm, PyTorch computed the one of half-precision tensors in half precision.
RMS_NORM_IS_FUSED = hasattr(torch.ops.aten, "_fused_rms_norm")


def layer_norm(input: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`torch.layer_norm` in the input's dtype, also under autocast."""
    if torch._C._is_any_autocast_enabled():
        with _autocast_off(input):
            return torch.layer_norm(input, shape, weight, bias, eps)
    return torch.layer_norm(input, shape, weight, bias, eps)


def rms_norm(input: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float) -> Tensor:
    """`torch.rms_norm` in the input's dtype, also under autocast."""
    if not RMS_NORM_IS_FUSED and input.dtype in half_layer_norm.HALF:
        return rms_norm(input.float(), shape, None if weight is None else weight.float(), eps).to(input.dtype)
    if torch._C._is_any_autocast_enabled():
        with _autocast_off(input):
            return torch.rms_norm(input, shape, weight, eps)
    return torch.rms_norm(input, shape, weight, eps)


def _autocast_off(input: Tensor) -> contextlib.AbstractContextManager:
    """Autocast would turn a norm's result into float32."""
    device_type = input.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def mixed_norm(
    input: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    subtract_mean: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """A differentiable norm whose input, weight and output may have different dtypes."""
    dtypes = {input.dtype, out_dtype}  # an output of more digits has them
    if weight is not None:
        dtypes.add(weight.dtype)
    # ONNX from torch.jit.trace has no RMS norm.
    in_parts = not subtract_mean and torch.jit.is_tracing()
    if in_parts or (subtract_mean and input.device.type == "cpu" and torch.is_grad_enabled()):
        dtypes.add(torch.float32)
    # As torch.promote_types, which torch.export would take for an operator.
    compute = dtypes.pop() if len(dtypes) == 1 else torch.float64 if torch.float64 in dtypes else torch.float32
    wide_weight, wide_bias = (None if t is None else t.to(compute) for t in (weight, bias))
    if subtract_mean:
        return layer_norm(input.to(compute), shape, wide_weight, wide_bias, eps).to(out_dtype)
    if in_parts:
        dimensions = tuple(range(-len(shape), 0))
        output = input.to(compute)
        output = output * torch.rsqrt(output.square().mean(dimensions, keepdim=True) + eps)
        return (output if wide_weight is None else output * wide_weight).to(out_dtype)
    return rms_norm(input.to(compute), shape, wide_weight, eps).to(out_dtype)


def layer_norm_forward(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Output and statistics of each row, without autograd."""
    compute = compute_dtype(input, weight)
    shape = (spec.row_length,)
    rows, weight, bias = as_rows(input, spec.row_length), _flat(weight, compute), _flat(bias, compute)
    if input.is_cpu and input.dtype in half_layer_norm.HALF and out_dtype == input.dtype and compute == torch.float32:
        output, mean, rstd, _, _ = half_layer_norm.forward(rows, shape, weight, bias, spec.eps)
    else:
        output, mean, rstd = torch.native_layer_norm(rows.to(compute), shape, weight, bias, spec.eps)
    # Whatever the weight's dtype, as the other implementations have them.
    statistics = torch.stack((rstd.flatten(), mean.flatten())).to(compute_dtype(input))
    return output.to(out_dtype).reshape(input.shape), statistics


def layer_norm_backward(
    dy: Tensor,
    saved: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: NormSpec,
    dx_dtype: torch.dtype,
    param_grads: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias, without autograd."""
    compute = compute_dtype(dy, saved, weight)
    rows = as_rows(saved, spec.row_length)
    wanted = [True, param_grads and weight is not None, param_grads and bias is not None]
    rstd = statistics[0, :, None].to(compute)
    if spec.from_output:
        # The norm of rows that are normalised already, whose gradient lacks but the factor rstd.
        rows = normalised_from_output(rows, weight, bias, compute)
        mean, deviation = torch.zeros_like(rstd), torch.ones_like(rstd)
    else:
        rows, mean, deviation = rows.to(compute), statistics[1, :, None].to(compute), rstd
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        as_rows(dy, spec.row_length).to(compute),
        rows,
        (spec.row_length,),
        mean,
        deviation,
        _flat(weight, compute),
        _flat(bias, compute),
        wanted,
    )
    if spec.from_output:
        dx *= rstd
    return (
        dx.to(dx_dtype).reshape(saved.shape),
        dweight.to(weight.dtype).reshape(weight.shape) if wanted[1] and weight is not None else None,
        dbias.to(bias.dtype).reshape(bias.shape) if wanted[2] and bias is not None else None,
    )


def _flat(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if parameter is None else parameter.reshape(-1).to(dtype)
