"""From tensors to kernel launches: allocation, launch configuration, tensors in kernel order.

What depends on shapes and dtypes alone is planned once and cached; a call then allocates its results and launches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _device
from .._results import Like, Maker, like, maker
from .._workspace import partial_sums_on
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
        device: torch.device,
        output: Maker,
        statistics: Maker,
        backward: Callable[[bool], BackwardPlan],
    ) -> None:
        self.spec = spec
        self._launch, self._index = launch, device.index
        self._output, self._statistics = output, statistics
        self._plan_backward = backward
        self._backward: dict[bool, BackwardPlan] = {}

    def run(self, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output and statistics; weight and bias must be contiguous."""
        if not input.is_contiguous():
            input = input.contiguous()
        stream = _device.stream_here(self._index)
        output, statistics = self._output(stream), self._statistics(stream)
        self._launch(input, weight, bias, output, statistics, stream=stream)
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
    input: Like,
    weight: Like | None,
    bias: Like | None,
    out_dtype: torch.dtype,
    device: torch.device,
    facts: _device.DeviceFacts,
) -> ForwardPlan:
    kernels = _kernels()[0]
    row_length, eps, subtract_mean, from_output = spec
    rows = math.prod(input.sizes) // row_length
    chosen = config.forward_config(rows, row_length, input.dtype.itemsize, subtract_mean, facts)
    flags = (subtract_mean, weight is not None, bias is not None)
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

    output = Like(input.sizes, out_dtype)

    def backward(param_grads: bool) -> BackwardPlan:
        saved = output if from_output else input
        return _backward_plan(
            spec, saved, out_dtype, weight, bias, input.dtype, param_grads and weight is not None, device, facts
        )

    statistics = maker((2 if subtract_mean else 1, rows), torch.float32, device)
    return ForwardPlan(spec, launch, device, maker(*output, device), statistics, backward)


def forward_plan(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec, out_dtype: torch.dtype
) -> ForwardPlan:
    """The plan for tensors like these."""
    device = input.device
    kind = Like(tuple(input.shape), input.dtype)
    return _forward_plan(spec, kind, like(weight), like(bias), out_dtype, device, _device.facts(device))


def triton_forward(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    weight, bias = _contiguous(weight), _contiguous(bias)
    return forward_plan(input, weight, bias, spec, out_dtype).run(input, weight, bias)


class BackwardPlan:
    """The launches of one backward pass."""

    def __init__(
        self,
        spec: NormSpec,
        dx: Like,
        parameters: tuple[Like | None, Like | None],
        device: torch.device,
        partial_sums: int,
        main: BoundLaunch,
        main_may_sum: bool,
        sum_partials: BoundLaunch | None,
        row_means: tuple[BoundLaunch, int] | None,
    ) -> None:
        """`parameters` are those whose gradients are wanted, which need `partial_sums`.

        `sum_partials` adds them up, unless the `main` launch is one that may and does. `row_means`, a launch and the
        number of rows, runs first where rows are too long for one kernel.
        """
        self.spec, self.dx_dtype = spec, dx.dtype
        self._dx = maker(*dx, device)
        self._dweight, self._dbias = (None if each is None else maker(*each, device) for each in parameters)
        self._device, self._partial_sums = device, partial_sums
        self._main, self._main_may_sum, self._sum_partials = main, main_may_sum, sum_partials
        self._measure = self._row_means = None
        if row_means is not None:
            self._measure, rows = row_means
            self._row_means = maker((2, rows), torch.float32, device)

    def run(
        self, dy: Tensor, saved: Tensor, statistics: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Gradients of input, weight and bias; the latter two must be contiguous."""
        if not dy.is_contiguous():
            dy = dy.contiguous()
        if not saved.is_contiguous():
            saved = saved.contiguous()
        stream = _device.stream_here(self._device.index)
        dx = self._dx(stream)
        partials = tickets = dweight = dbias = None
        if self._dweight is not None:
            dweight = self._dweight(stream)
            if self._dbias is not None:
                dbias = self._dbias(stream)
            partials, tickets = partial_sums_on(stream, self._partial_sums, self._device)
        if self._main_may_sum:
            self._main(dy, saved, weight, bias, statistics, dx, partials, tickets, dweight, dbias, stream=stream)
        elif self._measure is None or self._row_means is None:
            self._main(dy, saved, weight, bias, statistics, dx, partials, stream=stream)
        else:
            row_means = self._row_means(stream)
            self._measure(dy, saved, weight, bias, statistics, row_means, stream=stream)
            self._main(dy, saved, weight, bias, statistics, row_means, dx, partials, stream=stream)
        if self._sum_partials is not None:
            self._sum_partials(partials, dweight, dbias, stream=stream)
        return dx, dweight, dbias


@functools.lru_cache(maxsize=4096)
def _backward_plan(
    spec: NormSpec,
    saved: Like,
    dy_dtype: torch.dtype,  # asked for by none, but a bound launch is for one set of dtypes
    weight: Like | None,
    bias: Like | None,
    dx_dtype: torch.dtype,
    param_grads: bool,
    device: torch.device,
    facts: _device.DeviceFacts,
) -> BackwardPlan:
    kernels = _kernels()[1]
    row_length, _, subtract_mean, from_output = spec
    limit = math.sqrt(row_length)
    rows = math.prod(saved.sizes) // row_length
    has_weight, has_bias = weight is not None, bias is not None
    flags = (subtract_mean, from_output, has_weight, has_bias)
    chosen = config.backward_config(rows, row_length, saved.dtype.itemsize, has_bias and param_grads, facts)
    row_means = None
    group = chosen.group if param_grads else 0
    if chosen.kind == "rows":
        full = row_length == chosen.block and rows % chosen.rows_per_program == 0
        main = kernels.norm_backward_rows.bind(
            (chosen.programs,),
            (rows, row_length, limit),
            (*flags, param_grads, chosen.rows_per_program, chosen.block, full, chosen.num_stages, group),
            device=device,
            num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
        )
    elif chosen.kind == "wide":
        main = kernels.norm_backward_wide.bind(
            (chosen.programs,),
            (rows, row_length, limit),
            (*flags, param_grads, chosen.chunks, chosen.held, chosen.block, row_length == chosen.block * chosen.chunks),
            device=device,
            num_warps=chosen.num_warps,
        )
    elif chosen.kind == "held":
        main = kernels.norm_backward_held.bind(
            (chosen.programs,),
            (rows, row_length, limit),
            (*flags, param_grads, chosen.block, row_length == chosen.block, chosen.num_stages, facts.backend == "cuda"),
            device=device,
            num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
        )
    else:
        row_means = kernels.norm_backward_row_means.bind(
            (rows,), (row_length, limit), (*flags, 4096), device=device, num_warps=2 * chosen.num_warps
        )
        main = kernels.norm_backward_columns.bind(
            (-(-row_length // chosen.block), chosen.programs),
            (rows, row_length, limit),
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
    return BackwardPlan(
        spec,
        Like(saved.sizes, dx_dtype),
        (weight, bias) if param_grads else (None, None),
        device,
        partial_sums,
        main,
        chosen.kind == "rows",
        sum_partials,
        None if row_means is None else (row_means, rows),
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
    device = saved.device
    plan = _backward_plan(
        spec,
        Like(tuple(saved.shape), saved.dtype),
        dy.dtype,
        like(weight),
        like(bias),
        dx_dtype,
        param_grads and weight is not None,
        device,
        _device.facts(device),
    )
    return plan.run(dy, saved, statistics, weight, bias)


def _contiguous(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()
