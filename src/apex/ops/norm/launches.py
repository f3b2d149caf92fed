"""From tensors to kernel launches: allocation, launch configuration, arguments in kernel order."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from .. import _device
from . import config


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType]:
    """Forward and backward kernels, imported at first use: importing apex needs no Triton."""
    from . import kernels_backward, kernels_forward

    return kernels_forward, kernels_backward


def triton_forward(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    row_length: int,
    eps: float,
    subtract_mean: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor]:
    input = input.contiguous()
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    device = input.device
    rows = input.numel() // row_length
    output = torch.empty_like(input, dtype=out_dtype)
    mean = torch.empty(rows, dtype=torch.float32, device=device) if subtract_mean else None
    rstd = torch.empty(rows, dtype=torch.float32, device=device)
    chosen = config.forward_config(rows, row_length, input.element_size(), subtract_mean, _device.facts(device))
    flags = (subtract_mean, weight is not None, bias is not None)
    kernels = _kernels()[0]
    if chosen.rows_per_program:
        full = row_length == chosen.block and rows % chosen.rows_per_program == 0
        kernels.norm_forward_rows.launch(
            (-(-rows // chosen.rows_per_program),),
            (input, weight, bias, output, mean, rstd, rows, row_length, eps),
            (*flags, chosen.rows_per_program, chosen.block, full),
            device=device,
            num_warps=chosen.num_warps,
        )
    else:
        kernels.norm_forward_long.launch(
            (rows,),
            (input, weight, bias, output, mean, rstd, row_length, eps),
            (*flags, chosen.block, row_length % chosen.block == 0),
            device=device,
            num_warps=chosen.num_warps,
        )
    return output, mean, rstd


def triton_backward(
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
    param_grads: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    dy, saved = dy.contiguous(), saved.contiguous()
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    device = saved.device
    rows = saved.numel() // row_length
    param_grads = param_grads and weight is not None
    dx = torch.empty_like(saved, dtype=dx_dtype)
    chosen = config.backward_config(
        rows, row_length, saved.element_size(), subtract_mean, param_grads, _device.facts(device)
    )
    weight_partials = bias_partials = None
    if param_grads:
        weight_partials = torch.empty((chosen.programs, row_length), dtype=torch.float32, device=device)
        if bias is not None:
            bias_partials = torch.empty_like(weight_partials)
    tensors = (dy, saved, weight, bias, mean, rstd)
    flags = (subtract_mean, from_output, weight is not None, bias is not None)
    kernels = _kernels()[1]
    if chosen.kind == "rows":
        full = row_length == chosen.block and rows % chosen.rows_per_program == 0
        kernels.norm_backward_rows.launch(
            (chosen.programs,),
            (*tensors, dx, weight_partials, bias_partials, rows, row_length, eps),
            (*flags, param_grads, chosen.rows_per_program, chosen.block, full, chosen.num_stages),
            device=device,
            num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
        )
    elif chosen.kind == "wide":
        full = row_length == chosen.block * chosen.chunks
        kernels.norm_backward_wide.launch(
            (chosen.programs,),
            (*tensors, dx, weight_partials, bias_partials, rows, row_length, eps),
            (*flags, param_grads, chosen.chunks, chosen.block, full),
            device=device,
            num_warps=chosen.num_warps,
        )
    else:
        mean_products = torch.empty(rows, dtype=torch.float32, device=device)
        mean_sums = torch.empty(rows, dtype=torch.float32, device=device)
        kernels.norm_backward_row_means.launch(
            (rows,),
            (*tensors, mean_products, mean_sums, row_length, eps),
            (*flags, 4096),
            device=device,
            num_warps=chosen.num_warps * 2,
        )
        kernels.norm_backward_columns.launch(
            (-(-row_length // chosen.block), chosen.programs),
            (*tensors, mean_products, mean_sums, dx, weight_partials, bias_partials, rows, row_length, eps),
            (*flags, param_grads, chosen.rows_per_program, chosen.block),
            device=device,
            num_warps=chosen.num_warps,
        )
    if not param_grads:
        return dx, None, None
    assert weight is not None
    dweight = torch.empty_like(weight)
    dbias = None if bias is None else torch.empty_like(bias)
    kernels.sum_partials.launch(
        (-(-row_length // 32), 1 if bias is None else 2),
        (weight_partials, bias_partials, dweight, dbias, chosen.programs, row_length),
        (bias is not None, 64, 32),
        device=device,
        num_warps=4,
    )
    return dx, dweight, dbias
