"""Triton kernel that merges partial results of attention, each computed from another block of keys."""

import triton
import triton.language as tl

from .._launch import kernel


@triton.jit
def _logs(lse, h, row, count, inside):
    """Return the logs of one head's sums of exponentials in a block, -inf for rows that the block lacks."""
    return tl.load(lse + h * count + row, mask=inside, other=float("-inf"))


@triton.jit
def _values(block, h, row, heads, head_dim, inside, BD: tl.constexpr):
    """Return one head's rows of a block in float32, 0 for rows that the block lacks."""
    d = tl.arange(0, BD)
    pointers = block + (row * heads + h)[:, None] * head_dim + d[None, :]
    return tl.load(pointers, mask=inside[:, None] & (d < head_dim)[None, :], other=0.0).to(tl.float32)


@kernel
@triton.jit
def attention_merge(
    block_0, block_1, block_2, block_3, lse_0, lse_1, lse_2, lse_3, places, result, lse,
    rows, partial_rows, heads, head_dim,
    BLOCKS: tl.constexpr, PARTIAL_0: tl.constexpr, PARTIAL_1: tl.constexpr, PARTIAL_2: tl.constexpr,
    PARTIAL_3: tl.constexpr, WEIGHTED: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Sum BLOCKS results [rows, H, D], each weighted by its share of the sum of exponentials if WEIGHTED.

    A block that is PARTIAL has only `partial_rows` rows: `places` [rows] is the index of each row in it, or -1. `lse`
    becomes the log of each row's whole sum of exponentials, [H, rows].
    """
    h = (tl.program_id(0) % heads).to(tl.int64)
    row = (tl.program_id(0) // heads).to(tl.int64) * BR + tl.arange(0, BR)
    inside = row < rows
    partial = row
    if PARTIAL_0 or PARTIAL_1 or PARTIAL_2 or PARTIAL_3:
        partial = tl.load(places + row, mask=inside, other=-1)
    inside_partial = partial >= 0
    place_0 = partial if PARTIAL_0 else row
    place_1 = partial if PARTIAL_1 else row
    place_2 = partial if PARTIAL_2 else row
    place_3 = partial if PARTIAL_3 else row
    inside_0 = inside_partial if PARTIAL_0 else inside
    inside_1 = inside_partial if PARTIAL_1 else inside
    inside_2 = inside_partial if PARTIAL_2 else inside
    inside_3 = inside_partial if PARTIAL_3 else inside
    weight_0 = tl.full((BR,), 1.0, tl.float32)
    weight_1 = weight_0
    weight_2 = weight_0
    weight_3 = weight_0
    if WEIGHTED:
        log_0 = _logs(lse_0, h, place_0, partial_rows if PARTIAL_0 else rows, inside_0)
        log_1 = tl.full((BR,), float("-inf"), tl.float32)
        log_2 = log_1
        log_3 = log_1
        if BLOCKS > 1:
            log_1 = _logs(lse_1, h, place_1, partial_rows if PARTIAL_1 else rows, inside_1)
        if BLOCKS > 2:
            log_2 = _logs(lse_2, h, place_2, partial_rows if PARTIAL_2 else rows, inside_2)
        if BLOCKS > 3:
            log_3 = _logs(lse_3, h, place_3, partial_rows if PARTIAL_3 else rows, inside_3)
        largest = tl.maximum(tl.maximum(log_0, log_1), tl.maximum(log_2, log_3))
        largest = tl.where(largest == float("-inf"), 0.0, largest)  # a row that sees no key
        weight_0 = tl.exp(log_0 - largest)
        weight_1 = tl.exp(log_1 - largest)
        weight_2 = tl.exp(log_2 - largest)
        weight_3 = tl.exp(log_3 - largest)
        total = weight_0 + weight_1 + weight_2 + weight_3
        tl.store(lse + h * rows + row, largest + tl.log(total), mask=inside)
        share = tl.where(total == 0.0, 0.0, 1.0 / total)
        weight_0 *= share
        weight_1 *= share
        weight_2 *= share
        weight_3 *= share
    values = _values(block_0, h, place_0, heads, head_dim, inside_0, BD) * weight_0[:, None]
    if BLOCKS > 1:
        values += _values(block_1, h, place_1, heads, head_dim, inside_1, BD) * weight_1[:, None]
    if BLOCKS > 2:
        values += _values(block_2, h, place_2, heads, head_dim, inside_2, BD) * weight_2[:, None]
    if BLOCKS > 3:
        values += _values(block_3, h, place_3, heads, head_dim, inside_3, BD) * weight_3[:, None]
    d = tl.arange(0, BD)
    pointers = result + (row * heads + h)[:, None] * head_dim + d[None, :]
    tl.store(pointers, values.to(result.dtype.element_ty), mask=inside[:, None] & (d < head_dim)[None, :])
