"""Launches of the forward pass of a mixture's experts. See `reference` for the letters."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _library
from .._device import next_power_of_2
from ..glu.op import launch_forward as launch_glu
from . import config, grouped, reference
from .problem import Problem, problem_of, takes

sort_kernels = _library.LazyModule(f"{__package__}.kernels_sort")
product_kernels = _library.LazyModule(f"{__package__}.kernels_products")


def launch_sort(index: Tensor, problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `order`, `inverse`, `offsets` and the table of tiles."""
    rows, experts = problem.rows, problem.experts
    chunk, bins = config.SORT_CHUNK, next_power_of_2(experts + 2)
    chunks = -(-rows // chunk)
    order, inverse, offsets, totals, counts = (
        torch.empty(size, dtype=torch.int32, device=index.device)
        for size in (rows, rows, experts + 1, experts + 1, (experts + 1) * chunks)
    )
    warps = config.SORT_WARPS
    sort_kernels.moe_count(
        (chunks,), (index, counts), (rows, experts, chunks), CHUNK=chunk, EXPERTS=bins, num_warps=warps
    )
    sort_kernels.moe_scan((experts + 1,), (counts, totals), (chunks,), BLOCK=config.SCAN_BLOCK, num_warps=warps)
    tiles = launch_plan(totals, offsets, problem)
    sort_kernels.moe_scatter(
        (chunks,), (index, counts, offsets, order, inverse), (rows, experts, chunks), CHUNK=chunk, num_warps=warps
    )
    return order, inverse, offsets, tiles


def launch_plan(totals: Tensor | None, offsets: Tensor, problem: Problem) -> Tensor:
    """Return the table of tiles from `offsets`, which are filled first if `totals` are given."""
    bins, bound = next_power_of_2(problem.experts + 2), problem.tiles
    at_a_time = max(1, config.PLAN_ELEMENTS // bins)
    tiles = torch.empty(2, bound, dtype=torch.int32, device=offsets.device)
    sort_kernels.moe_plan(
        (-(-bound // at_a_time),),
        (offsets, tiles, totals),
        (problem.experts, bound),
        BLOCK_ROWS=problem.tile_rows,
        EXPERTS=bins,
        TILES=at_a_time,
        num_warps=4,
    )
    return tiles


def launch_product(
    left: Tensor, right: Tensor, bias: Tensor | None, plan: tuple[Tensor, Tensor], problem: Problem, out_first: bool
) -> Tensor:
    """Return sorted rows `left` [N, inner] times their expert's matrix, [N, columns]; skip rows without an expert."""
    inner = left.shape[1]
    columns = right[0].numel() // inner
    output = left.new_empty(left.shape[0], columns)
    programs, blocks, constants = problem.product(inner, columns, 1, out_first)
    sizes = (problem.tiles, blocks, inner, columns)
    product_kernels.moe_product((programs,), (left, right, bias, *plan, output), sizes, **constants)
    return output


def launch_combine(
    rows: Tensor, inverse: Tensor, offsets: Tensor, weight: Tensor | None, problem: Problem, pre: Tensor | None = None
) -> Tensor:
    """Return the sum of each token's rows, times their weights if given; zero rows of `pre` without an expert."""
    output = rows.new_empty(problem.tokens, problem.hidden)
    block = min(config.COMBINE_BLOCK, max(16, next_power_of_2(problem.hidden)))
    blocks = -(-problem.hidden // block)
    product_kernels.moe_combine(
        (problem.tokens * blocks,),
        (rows, inverse, offsets, weight, output, pre),
        (problem.experts, problem.chosen, problem.hidden, blocks, 2 * problem.width),
        ALIGN=problem.align,
        BLOCK=block,
        num_warps=4,
    )
    return output


def launch_forward(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    index: Tensor,
    weight: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    interleaved: bool,
    transposed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the results of `reference.forward`, computed by kernels."""
    if not takes(gate_up, down, index):
        settings = (activation, interleaved, transposed)
        return reference.forward(x, gate_up, down, index, weight, gate_up_bias, down_bias, *settings)
    problem = problem_of(x, gate_up, index, activation, interleaved, transposed)
    order, inverse, offsets, tiles = launch_sort(index, problem)
    if problem.route(x, gate_up, down, gate_up_bias, down_bias).products:
        first, second = (matrix if transposed else matrix.transpose(1, 2) for matrix in (gate_up, down))
        pre = grouped.multiply(x.index_select(0, order // problem.chosen), first, offsets)
        rows = grouped.multiply(launch_glu(pre, None, activation), second, offsets)
    else:
        pre, active = launch_gate_up(x, gate_up, gate_up_bias, order, (tiles, offsets), problem)
        rows = launch_product(active, down, down_bias, (tiles, offsets), problem, transposed)
    return launch_combine(rows, inverse, offsets, weight, problem, pre), pre, order, inverse, offsets


def launch_gate_up(
    x: Tensor, gate_up: Tensor, bias: Tensor | None, order: Tensor, plan: tuple[Tensor, Tensor], problem: Problem
) -> tuple[Tensor, Tensor]:
    """Return sorted rows before and after the gated unit, [N, 2F] and [N, F]."""
    pre, active = (x.new_empty(problem.rows, columns) for columns in (2 * problem.width, problem.width))
    programs, blocks, constants = problem.product(problem.hidden, problem.width, 2, problem.transposed)
    product_kernels.moe_gate_up(
        (programs,),
        (x, gate_up, bias, order, *plan, pre, active),
        (problem.tiles, blocks, problem.chosen, problem.hidden, problem.width),
        **constants,
        **problem.unit(),
    )
    return pre, active
