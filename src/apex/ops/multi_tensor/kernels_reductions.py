"""Kernels that add up what `apply_rule` measured in each block, and compute factors for the next pass from the sums.

The host never waits for these results. Additions are made in a fixed order.
"""

import triton
import triton.language as tl

from .._launch import kernel


@triton.jit
def _keep_larger(largest, values):
    """Return the larger of two numbers, NaN if one of them is: tl.max and tl.maximum do not guarantee that."""
    return tl.where((values > largest) | (values != values), values, largest)


@triton.jit
def _largest(values):
    return tl.max(values, axis=0) + tl.sum(tl.where(values == values, 0.0, values), axis=0)


@triton.jit
def reduce_rows(
    tensors, numbers, start, stop, quantity,
    QUANTITIES: tl.constexpr, MAXIMUM: tl.constexpr, ROOT: tl.constexpr, AVERAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce rows `start` to `stop` as `reduce_partials` does; loads see rows that the same launch has stored."""
    partials, grad_scale, at, factor = tensors
    limit, margin, share = numbers
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for position in range(start, stop, BLOCK):
        rows = (position + lanes).to(tl.int64)
        source = partials + rows * QUANTITIES + quantity
        value = tl.load(source, mask=rows < stop, other=0.0, cache_modifier=".cg")
        if MAXIMUM:
            total = _keep_larger(total, value)
        else:
            total += value
    if MAXIMUM:
        result = _largest(total)
    else:
        result = tl.sum(total, axis=0)
    if ROOT:
        result = tl.sqrt(result)
    if AVERAGE:
        before = tl.load(at)
        result = tl.where(before < 0, result, before + share * (result - before))
    tl.store(at, result)
    if factor is not None:
        shorter = limit / (result + margin)
        multiplier = tl.where(shorter >= 1.0, 1.0, shorter)  # NaN stays NaN
        if grad_scale is not None:
            multiplier = multiplier * tl.load(grad_scale)
        tl.store(factor, multiplier)


@kernel
@triton.jit
def reduce_partials(
    partials, bounds, noop, grad_scale, out, factor,
    count, limit, margin, share,
    QUANTITIES: tl.constexpr, MAXIMUM: tl.constexpr, COLUMNS: tl.constexpr, ROOT: tl.constexpr, AVERAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sum (or maximum, or root of the sum) of rows `bounds[i]` to `bounds[i + 1]` of `partials` to `out[i]`.

    Without `bounds`, reduce the first `count` rows into `out[0]`. Program (i, q) takes quantity q; `out` has COLUMNS
    columns. With AVERAGE, move the value in `out` towards the sum by `share`, or replace it by the sum if it is
    negative. `factor` gets the factor, at most 1, that brings a norm down to `limit`, times `grad_scale`; `margin` is
    added to the norm first.
    """
    if noop is not None:
        if tl.load(noop) != 0:
            return
    index = tl.program_id(0)
    quantity = tl.program_id(1)
    start = 0
    stop = count
    if bounds is not None:
        start = tl.load(bounds + index)
        stop = tl.load(bounds + index + 1)
    reduce_rows(
        (partials, grad_scale, out + index * COLUMNS + quantity, factor), (limit, margin, share),
        start, stop, quantity,
        QUANTITIES, MAXIMUM, ROOT, AVERAGE, BLOCK,
    )  # fmt: skip


@triton.jit
def _cosine(pg, gg, pp, eps):
    return tl.abs(pg) / ((tl.sqrt(gg) + eps) * (tl.sqrt(pp) + eps))


@triton.jit
def _parallel(pu, pp, eps):
    length = tl.sqrt(pp) + eps
    return pu / (length * length)


@kernel
@triton.jit
def project_rows(sums, bounds, thresholds, decay_on_device, whole, eps, delta, decay, ratio, BLOCK: tl.constexpr):
    """Decide for each tensor, as AdamP does, which part of its rows leaves the step, and how much the rows decay.

    sums             float32 [rows, 4]     sums of p * g, g * g, p * p and p * step over each row
    bounds           int32 [tensors + 1]   the rows of each tensor
    thresholds       float32 [2, tensors]  cosines, over `delta`, below which rows, or the whole tensor, are projected
    decay_on_device  float32 [1]           replaces `decay`
    whole            float32 [rows, 2]     the two numbers of each row that `rules.ADAMP` takes
    """
    index = tl.program_id(0)
    start = tl.load(bounds + index)
    stop = tl.load(bounds + index + 1)
    if decay_on_device is not None:
        decay = tl.load(decay_on_device)
    lanes = tl.arange(0, BLOCK)
    pg = tl.zeros((BLOCK,), tl.float32)
    gg = tl.zeros((BLOCK,), tl.float32)
    pp = tl.zeros((BLOCK,), tl.float32)
    pu = tl.zeros((BLOCK,), tl.float32)
    peak = tl.zeros((BLOCK,), tl.float32)
    for position in range(start, stop, BLOCK):
        rows = (position + lanes).to(tl.int64)
        mask = rows < stop
        row_pg = tl.load(sums + rows * 4, mask=mask, other=0.0)
        row_gg = tl.load(sums + rows * 4 + 1, mask=mask, other=0.0)
        row_pp = tl.load(sums + rows * 4 + 2, mask=mask, other=0.0)
        pg += row_pg
        gg += row_gg
        pp += row_pp
        pu += tl.load(sums + rows * 4 + 3, mask=mask, other=0.0)
        peak = _keep_larger(peak, tl.where(mask, _cosine(row_pg, row_gg, row_pp, eps), 0.0))
    length = tl.sum(pp, axis=0)
    by_row = _largest(peak) < tl.load(thresholds + index) * delta
    cosine = _cosine(tl.sum(pg, axis=0), tl.sum(gg, axis=0), length, eps)
    at_once = cosine < tl.load(thresholds + tl.num_programs(0) + index) * delta
    share = tl.where(at_once, _parallel(tl.sum(pu, axis=0), length, eps), 0.0)
    shrinks = tl.where(by_row | at_once, decay * ratio, decay)
    for position in range(start, stop, BLOCK):
        rows = (position + lanes).to(tl.int64)
        mask = rows < stop
        row_pp = tl.load(sums + rows * 4 + 2, mask=mask, other=0.0)
        row_pu = tl.load(sums + rows * 4 + 3, mask=mask, other=0.0)
        tl.store(whole + rows * 2, tl.where(by_row, _parallel(row_pu, row_pp, eps), share), mask=mask)
        tl.store(whole + rows * 2 + 1, shrinks + tl.zeros((BLOCK,), tl.float32), mask=mask)
