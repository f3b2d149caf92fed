"""From tensors to kernel launches: allocation, launch configuration, tensors in kernel order.

What depends on shapes and dtypes alone is planned once and cached; a call then allocates its results and launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _device
from .._workspace import partial_sums
from . import config
from .spec import NormSpec

if TYPE_CHECKING:
    from .._launch import BoundLaunch


# Bytes of an output that no L2 cache holds.
_STREAMED = 128 << 20


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType, ModuleType]:
    """Forward and backward kernels and sums, imported at first use: importing apex needs no Triton."""
    from . import kernels_backward, kernels_forward, kernels_sums

    return kernels_forward, kernels_backward, kernels_sums


class ForwardPlan:
    """The launch of a forward pass, and the way to the backward pass of the same tensors."""

    def __init__(
        self,
        spec: NormSpec,
        launch: BoundLaunch,
        statistics_shape: tuple[int, int],
        out_dtype: torch.dtype | None,
        device: torch.device,
        backward: Callable[[bool], BackwardPlan],
    ) -> None:
        self.spec = spec
        self._launch = launch
        self._statistics_shape = statistics_shape
        self._out_dtype = out_dtype  # None where it is the input's
        self._device = device
        self._plan_backward = backward
        self._backward: dict[bool, BackwardPlan] = {}

    def run(self, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output and statistics; weight and bias must be contiguous."""
        if not input.is_contiguous():
            input = input.contiguous()
        output = torch.empty_like(input, dtype=self._out_dtype) if self._out_dtype else torch.empty_like(input)
        statistics = torch.empty(*self._statistics_shape, dtype=torch.float32, device=self._device)
        self._launch(input, weight, bias, output, statistics)
        return output, statistics

    def backward(self, param_grads: bool) -> BackwardPlan:
        """The plan for gradients in the output's dtype, made when it is first asked for."""
        plan = self._backward.get(param_grads)
        if plan is None:
            plan = self._backward[param_grads] = self._plan_backward(param_grads)
        return plan


@functools.lru_cache(maxsize=4096)
def _forward_plan(
    spec: NormSpec,
    rows: int,
    input_dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    out_dtype: torch.dtype,
    device: torch.device,
    facts: _device.DeviceFacts,
) -> ForwardPlan:
    kernels = _kernels()[0]
    row_length, eps, subtract_mean, from_output = spec
    chosen = config.forward_config(rows, row_length, input_dtype.itemsize, subtract_mean, facts)
    flags = (subtract_mean, weight_dtype is not None, bias_dtype is not None)
    if chosen.rows_per_program:
        full = row_length == chosen.block and rows % chosen.rows_per_program == 0
        launch = kernels.norm_forward_rows.bind(
            (-(-rows // chosen.rows_per_program),),
            (rows, row_length, eps),
            (*flags, chosen.rows_per_program, chosen.block, full),
            device=device,
            num_warps=chosen.num_warps,
        )
    else:
        launch = kernels.norm_forward_long.bind(
            (rows,),
            (row_length, eps),
            (*flags, chosen.block, row_length % chosen.block == 0, rows * row_length * out_dtype.itemsize >= _STREAMED),
            device=device,
            num_warps=chosen.num_warps,
        )

    def backward(param_grads: bool) -> BackwardPlan:
        saved_dtype = out_dtype if from_output else input_dtype
        dtypes = (saved_dtype, out_dtype, weight_dtype, bias_dtype, input_dtype)
        return _backward_plan(spec, rows, param_grads and weight_dtype is not None, *dtypes, device, facts)

    statistics = (2 if subtract_mean else 1, rows)
    return ForwardPlan(spec, launch, statistics, None if out_dtype == input_dtype else out_dtype, device, backward)


def forward_plan(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec, out_dtype: torch.dtype
) -> ForwardPlan:
    """The plan for tensors like these."""
    device = input.device
    return _forward_plan(
        spec,
        input.numel() // spec.row_length,
        input.dtype,
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
        out_dtype,
        device,
        _device.facts(device),
    )


def triton_forward(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    weight, bias = _contiguous(weight), _contiguous(bias)
    return forward_plan(input, weight, bias, spec, out_dtype).run(input, weight, bias)


@dataclass(frozen=True)
class BackwardPlan:
    """The launches of one backward pass.

    `row_means` runs first where rows are too long for one kernel; no `partial_sums` without parameter gradients.
    `dx_dtype` is None where it is that of the saved tensor. `sum_partials` adds up the partial sums,
    unless the main launch is one that may and does.
    """

    spec: NormSpec
    main: BoundLaunch
    row_means: BoundLaunch | None
    sum_partials: BoundLaunch | None
    rows: int
    partial_sums: int
    dx_dtype: torch.dtype | None
    device: torch.device
    main_may_sum: bool

    def run(
        self, dy: Tensor, saved: Tensor, statistics: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Gradients of input, weight and bias; the latter two must be contiguous."""
        if not dy.is_contiguous():
            dy = dy.contiguous()
        if not saved.is_contiguous():
            saved = saved.contiguous()
        dx = torch.empty_like(saved) if self.dx_dtype is None else torch.empty_like(saved, dtype=self.dx_dtype)
        partials = tickets = dweight = dbias = None
        if self.partial_sums:
            partials, tickets = partial_sums(self.partial_sums, self.device)
            dweight = torch.empty_like(weight)  # type: ignore[arg-type]
            dbias = None if bias is None else torch.empty_like(bias)
        if self.row_means is not None:
            row_means = statistics.new_empty(2, self.rows)
            self.row_means(dy, saved, weight, bias, statistics, row_means)
            self.main(dy, saved, weight, bias, statistics, row_means, dx, partials)
        elif self.main_may_sum:
            self.main(dy, saved, weight, bias, statistics, dx, partials, tickets, dweight, dbias)
        else:
            self.main(dy, saved, weight, bias, statistics, dx, partials)
        if self.sum_partials is not None:
            self.sum_partials(partials, dweight, dbias)
        return dx, dweight, dbias


@functools.lru_cache(maxsize=4096)
def _backward_plan(
    spec: NormSpec,
    rows: int,
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
    row_length, eps, subtract_mean, from_output = spec
    has_weight, has_bias = weight_dtype is not None, bias_dtype is not None
    flags = (subtract_mean, from_output, has_weight, has_bias)
    chosen = config.backward_config(rows, row_length, saved_dtype.itemsize, has_bias and param_grads, facts)
    row_means = None
    group = chosen.group if param_grads else 0
    if chosen.kind == "rows":
        full = row_length == chosen.block and rows % chosen.rows_per_program == 0
        main = kernels.norm_backward_rows.bind(
            (chosen.programs,),
            (rows, row_length, eps),
            (*flags, param_grads, chosen.rows_per_program, chosen.block, full, chosen.num_stages, group),
            device=device,
            num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
        )
    elif chosen.kind == "wide":
        main = kernels.norm_backward_wide.bind(
            (chosen.programs,),
            (rows, row_length, eps),
            (*flags, param_grads, chosen.chunks, chosen.held, chosen.block, row_length == chosen.block * chosen.chunks),
            device=device,
            num_warps=chosen.num_warps,
        )
    elif chosen.kind == "held":
        main = kernels.norm_backward_held.bind(
            (chosen.programs,),
            (rows, row_length, eps),
            (*flags, param_grads, chosen.block, row_length == chosen.block, chosen.num_stages, facts.backend == "cuda"),
            device=device,
            num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
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
    if param_grads and not group:
        sum_partials = _kernels()[2].sum_partials.bind(
            (-(-row_length // 16), 2 if has_bias else 1),
            (chosen.programs, row_length),
            (has_bias, 256, 16),  # nearly all in one step: 2 us less than 64 by 32 at 16384x1024, no more elsewhere
            device=device,
            num_warps=4,
        )
    sums = chosen.programs + -(-chosen.programs // group) if group else chosen.programs
    partial_sums = sums * row_length * (param_grads + (param_grads and has_bias))
    own_dtype = None if dx_dtype == saved_dtype else dx_dtype
    return BackwardPlan(
        spec, main, row_means, sum_partials, rows, partial_sums, own_dtype, device, chosen.kind == "rows"
    )


def triton_backward(
    dy: Tensor,
    saved: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: NormSpec,
    dx_dtype: torch.dtype,
    param_grads: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    weight, bias = _contiguous(weight), _contiguous(bias)
    plan = _backward_plan(
        spec,
        saved.numel() // spec.row_length,
        param_grads and weight is not None,
        saved.dtype,
        dy.dtype,
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
        dx_dtype,
        saved.device,
        _device.facts(saved.device),
    )
    return plan.run(dy, saved, statistics, weight, bias)


def _contiguous(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()
