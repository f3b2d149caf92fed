"""From tensors to kernel launches: allocation, launch configuration, tensors in kernel order.

What depends on shapes and dtypes alone is planned once and cached; a call then allocates its results and launches.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _device
from . import config

if TYPE_CHECKING:
    from .._launch import BoundLaunch


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType]:
    """Forward and backward kernels, imported at first use: importing apex needs no Triton."""
    from . import kernels_backward, kernels_forward

    return kernels_forward, kernels_backward


@functools.lru_cache(maxsize=4096)
def _forward_plan(
    rows: int,
    row_length: int,
    eps: float,
    subtract_mean: bool,
    input_dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    out_dtype: torch.dtype,
    device: torch.device,
    facts: _device.DeviceFacts,
) -> BoundLaunch:
    kernels = _kernels()[0]
    chosen = config.forward_config(rows, row_length, input_dtype.itemsize, subtract_mean, facts)
    flags = (subtract_mean, weight_dtype is not None, bias_dtype is not None)
    if chosen.rows_per_program:
        full = row_length == chosen.block and rows % chosen.rows_per_program == 0
        return kernels.norm_forward_rows.bind(
            (-(-rows // chosen.rows_per_program),),
            (rows, row_length, eps),
            (*flags, chosen.rows_per_program, chosen.block, full),
            device=device,
            num_warps=chosen.num_warps,
        )
    return kernels.norm_forward_long.bind(
        (rows,),
        (row_length, eps),
        (*flags, chosen.block, row_length % chosen.block == 0),
        device=device,
        num_warps=chosen.num_warps,
    )


def triton_forward(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    row_length: int,
    eps: float,
    subtract_mean: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor]:
    if not input.is_contiguous():
        input = input.contiguous()
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    device = input.device
    rows = input.numel() // row_length
    launch = _forward_plan(
        rows,
        row_length,
        eps,
        subtract_mean,
        input.dtype,
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
        out_dtype,
        device,
        _device.facts(device),
    )
    output = torch.empty_like(input) if input.dtype == out_dtype else torch.empty_like(input, dtype=out_dtype)
    rstd = torch.empty(rows, dtype=torch.float32, device=device)
    mean = torch.empty_like(rstd) if subtract_mean else None
    launch(input, weight, bias, output, mean, rstd)
    return output, mean, rstd


@dataclass(frozen=True)
class BackwardPlan:
    """The launches of one backward pass.

    `row_means` runs first where rows are too long for one kernel; no `partial_rows` without parameter gradients.
    """

    main: BoundLaunch
    row_means: BoundLaunch | None
    sum_partials: BoundLaunch | None
    rows: int
    row_length: int
    partial_rows: int
    dx_dtype: torch.dtype

    def run(
        self, dy: Tensor, saved: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Gradients of input, weight and bias."""
        if not dy.is_contiguous():
            dy = dy.contiguous()
        if not saved.is_contiguous():
            saved = saved.contiguous()
        dx = torch.empty_like(saved) if saved.dtype == self.dx_dtype else torch.empty_like(saved, dtype=self.dx_dtype)
        partials = None
        if self.partial_rows:
            partials = rstd.new_empty((self.partial_rows, self.row_length))
        if self.row_means is None:
            self.main(dy, saved, weight, bias, mean, rstd, dx, partials)
        else:
            row_means = rstd.new_empty((2, self.rows))
            self.row_means(dy, saved, weight, bias, mean, rstd, row_means)
            self.main(dy, saved, weight, bias, mean, rstd, row_means, dx, partials)
        if self.sum_partials is None:
            return dx, None, None
        assert weight is not None
        dweight = torch.empty_like(weight)
        dbias = None if bias is None else torch.empty_like(bias)
        self.sum_partials(partials, dweight, dbias)
        return dx, dweight, dbias


@functools.lru_cache(maxsize=4096)
def _backward_plan(
    rows: int,
    row_length: int,
    eps: float,
    subtract_mean: bool,
    from_output: bool,
    param_grads: bool,
    saved_dtype: torch.dtype,
    dy_dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    dx_dtype: torch.dtype,
    device: torch.device,
    facts: _device.DeviceFacts,
) -> BackwardPlan:
    kernels = _kernels()[1]
    has_weight, has_bias = weight_dtype is not None, bias_dtype is not None
    flags = (subtract_mean, from_output, has_weight, has_bias)
    chosen = config.backward_config(rows, row_length, saved_dtype.itemsize, has_bias and param_grads, facts)
    row_means = None
    if chosen.kind == "rows":
        full = row_length == chosen.block and rows % chosen.rows_per_program == 0
        main = kernels.norm_backward_rows.bind(
            (chosen.programs,),
            (rows, row_length, eps),
            (*flags, param_grads, chosen.rows_per_program, chosen.block, full, chosen.num_stages),
            device=device,
            num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
        )
    elif chosen.kind == "wide":
        main = kernels.norm_backward_wide.bind(
            (chosen.programs,),
            (rows, row_length, eps),
            (*flags, param_grads, chosen.chunks, chosen.block, row_length == chosen.block * chosen.chunks),
            device=device,
            num_warps=chosen.num_warps,
        )
    else:
        row_means = kernels.norm_backward_row_means.bind(
            (rows,), (row_length, eps), (*flags, 4096), device=device, num_warps=2 * chosen.num_warps
        )
        main = kernels.norm_backward_columns.bind(
            (-(-row_length // chosen.block), chosen.programs),
            (rows, row_length, eps),
            (*flags, param_grads, chosen.rows_per_program, chosen.block),
            device=device,
            num_warps=chosen.num_warps,
        )
    sum_partials = None
    if param_grads:
        sum_partials = kernels.sum_partials.bind(
            (-(-row_length // 32), 2 if has_bias else 1),
            (chosen.programs, row_length),
            (has_bias, 64, 32),
            device=device,
            num_warps=4,
        )
    partial_rows = chosen.programs * (param_grads + (param_grads and has_bias))
    return BackwardPlan(main, row_means, sum_partials, rows, row_length, partial_rows, dx_dtype)


def backward_plan(
    saved: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    row_length: int,
    eps: float,
    subtract_mean: bool,
    from_output: bool,
    dy_dtype: torch.dtype,
    dx_dtype: torch.dtype,
    param_grads: bool,
) -> BackwardPlan:
    """The plan for tensors like these; its `run` takes a contiguous weight and bias."""
    return _backward_plan(
        saved.numel() // row_length,
        row_length,
        eps,
        subtract_mean,
        from_output,
        param_grads and weight is not None,
        saved.dtype,
        dy_dtype,
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
        dx_dtype,
        saved.device,
        _device.facts(saved.device),
    )


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
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    plan = backward_plan(
        saved, weight, bias, row_length, eps, subtract_mean, from_output, dy.dtype, dx_dtype, param_grads
    )
    return plan.run(dy, saved, mean, rstd, weight, bias)
