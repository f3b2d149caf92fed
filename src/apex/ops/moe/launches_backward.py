"""Launches of the backward pass of a mixture's experts. See `reference` for the letters and formulas."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _library
from .._device import next_power_of_2
from ..attention.config import precision
from . import config, grouped, reference
from .launches import launch_combine, launch_plan, launch_product
from .problem import Problem, problem_of, takes

gradient_kernels = _library.LazyModule(f"{__package__}.kernels_gradients")


def launch_backward(
    dy: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    index: Tensor,
    weight: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    pre: Tensor,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    activation: str,
    interleaved: bool,
    transposed: bool,
    wanted: Sequence[bool],
    into: Sequence[Tensor | None] = (None, None),
) -> tuple[Tensor | None, ...]:
    """Return the results of `reference.backward`; add the matrices' gradients to tensors in `into`, if given."""
    if not takes(gate_up, down, index):
        tensors = (x, gate_up, down, index, weight, gate_up_bias, down_bias, pre, order, inverse, offsets)
        return reference.backward(dy, *tensors, activation, interleaved, transposed, wanted)
    problem = problem_of(x, gate_up, index, activation, interleaved, transposed)
    want_x, want_gate_up, want_down, want_weight, want_bias, want_down_bias = wanted
    by_torch = problem.route(x, gate_up, down, gate_up_bias, down_bias)
    tiles = launch_plan(None, offsets, problem)
    # Tokens in the order of experts are read by PyTorch's products only.
    token = order // problem.chosen if by_torch.gradients else None
    dy_rows = None if token is None else dy.index_select(0, token)
    if by_torch.products and dy_rows is not None:
        dactive = grouped.multiply(dy_rows, down.transpose(1, 2) if transposed else down, offsets)
        dpre, scaled, partials = launch_unit_backward(dactive, pre, weight, order, offsets, problem, want_down)
    else:
        dpre, scaled, partials = launch_down_backward(
            dy, down, pre, weight, order, (tiles, offsets), problem, want_down
        )
    dx = dgate_up = ddown = dweight = dbias = ddown_bias = None
    if want_weight:
        dweight = launch_router_gradient(partials, index, inverse, dy, down_bias, torch.empty_like(weight), problem)
    if want_down and scaled is not None:
        if into[1] is not None:
            launch_matrix_gradient(dy, scaled, order, offsets, into[1], problem, (True, False), accumulate=True)
        elif dy_rows is not None:
            ddown = grouped.matrix_gradient(dy_rows, scaled, offsets, transposed)
        else:
            ddown = launch_matrix_gradient(dy, scaled, order, offsets, torch.empty_like(down), problem, (True, False))
    del dy_rows, scaled
    if want_down_bias and down_bias is not None:
        ddown_bias = launch_bias_gradient(dy, weight, order, offsets, torch.empty_like(down_bias), problem)
    if want_x:
        if by_torch.products:
            rows = grouped.multiply(dpre, gate_up.transpose(1, 2) if transposed else gate_up, offsets)
        else:
            rows = launch_product(dpre, gate_up, None, (tiles, offsets), problem, not transposed)
        dx = launch_combine(rows, inverse, offsets, None, problem)
        del rows
    if want_gate_up:
        if into[0] is not None:
            launch_matrix_gradient(dpre, x, order, offsets, into[0], problem, (False, True), accumulate=True)
        elif token is not None:
            dgate_up = grouped.matrix_gradient(dpre, x.index_select(0, token), offsets, transposed)
        else:
            dgate_up = launch_matrix_gradient(
                dpre, x, order, offsets, torch.empty_like(gate_up), problem, (False, True)
            )
    if want_bias and gate_up_bias is not None:
        dbias = launch_bias_gradient(dpre, None, order, offsets, torch.empty_like(gate_up_bias), problem)
    return dx, dgate_up, ddown, dweight, dbias, ddown_bias


def launch_unit_backward(
    dactive: Tensor,
    pre: Tensor,
    weight: Tensor,
    order: Tensor,
    offsets: Tensor,
    problem: Problem,
    want_scaled: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the results of `launch_down_backward`, from `dactive` [N, F] = dy @ down^T, before routing weights."""
    rows, columns = config.UNIT_ROWS, min(config.UNIT_COLUMNS, max(16, next_power_of_2(problem.width)))
    blocks = -(-problem.width // columns)
    dpre = torch.empty_like(pre)
    scaled = torch.empty_like(dactive) if want_scaled else None
    partials = pre.new_empty(blocks, problem.rows, dtype=torch.float32)
    gradient_kernels.moe_unit_backward(
        (-(-problem.rows // rows) * blocks,),
        (dactive, pre, weight, order, offsets, dpre, scaled, partials),
        (problem.experts, blocks, problem.rows, problem.width),
        ALIGN=problem.align,
        **problem.unit(),
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )
    return dpre, scaled, partials


def launch_down_backward(
    dy: Tensor,
    down: Tensor,
    pre: Tensor,
    weight: Tensor,
    order: Tensor,
    plan: tuple[Tensor, Tensor],
    problem: Problem,
    want_scaled: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return dz [N, 2F], the unit times the rows' weights [N, F] if wanted, and parts of dp, [blocks, N] float32."""
    programs, blocks, constants = problem.product(problem.hidden, problem.width, 2, not problem.transposed)
    dpre = torch.empty_like(pre)
    scaled = pre.new_empty(problem.rows, problem.width) if want_scaled else None
    partials = pre.new_empty(blocks, problem.rows, dtype=torch.float32)
    gradient_kernels.moe_down_backward(
        (programs,),
        (dy, down, pre, weight, order, *plan, dpre, scaled, partials),
        (problem.tiles, blocks, problem.rows, problem.chosen, problem.hidden, problem.width),
        **constants,
        **problem.unit(),
    )
    return dpre, scaled, partials


def launch_router_gradient(
    partials: Tensor,
    index: Tensor,
    inverse: Tensor,
    dy: Tensor,
    down_bias: Tensor | None,
    dweight: Tensor,
    problem: Problem,
) -> Tensor:
    """Fill and return the gradient of the rows' weights."""
    gradient_kernels.moe_router_gradient(
        (-(-problem.rows // config.ROUTER_ROWS),),
        (partials, index, inverse, dy, down_bias, dweight),
        (problem.rows, problem.experts, problem.chosen, problem.hidden, partials.shape[0]),
        ROWS=config.ROUTER_ROWS,
        COLUMNS=config.ROUTER_COLUMNS,
        num_warps=4,
    )
    return dweight


def launch_matrix_gradient(
    left: Tensor,
    right: Tensor,
    order: Tensor,
    offsets: Tensor,
    output: Tensor,
    problem: Problem,
    tokens: tuple[bool, bool],
    accumulate: bool = False,
) -> Tensor:
    """Fill and return the gradient of the experts' matrices, left^T right over each expert's rows, or add it.

    `tokens` says for `left` and for `right` whether its rows are tokens instead of sorted rows. The result is
    transposed if the matrices are.
    """
    if problem.transposed:
        left, right, tokens = right, left, tokens[::-1]
    outs, ins = left.shape[1], right.shape[1]
    tile = config.gradient_tile(outs, ins, left.dtype, problem.device)
    gradient_kernels.moe_matrix_gradient(
        (-(-outs // tile.rows) * -(-ins // tile.columns), problem.experts),
        (left, right, order, offsets, output),
        (problem.chosen, outs, ins),
        ALIGN=problem.align,
        LEFT_TOKENS=tokens[0],
        RIGHT_TOKENS=tokens[1],
        ACCUMULATE=accumulate,
        FULL=outs % tile.rows == 0 and ins % tile.columns == 0,
        PRECISION=precision(left.dtype, problem.device),
        OUT=tile.rows,
        INTO=tile.columns,
        ROWS=tile.inner,
        BAND=config.BAND,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return output


def launch_bias_gradient(
    values: Tensor, weight: Tensor | None, order: Tensor, offsets: Tensor, dbias: Tensor, problem: Problem
) -> Tensor:
    """Fill and return the gradient of a bias: sums of sorted rows or, with weights, of tokens' rows times these."""
    columns = values.shape[1]
    gradient_kernels.moe_bias_gradient(
        (-(-columns // config.BIAS_BLOCK), problem.experts),
        (values, weight, order, offsets, dbias),
        (problem.chosen, columns),
        ROWS=config.BIAS_ROWS,
        BLOCK=config.BIAS_BLOCK,
        num_warps=4,
    )
    return dbias
