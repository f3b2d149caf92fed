"""Triton kernels that sort rows by expert, stably and without atomics: counts, prefix sums, a scatter.

Row n of `index` has an expert from 0 to `experts` - 1; any other value means no expert, and is taken as `experts`. Rows
are counted in chunks of CHUNK. `counts` is [experts + 1, chunks], int32. EXPERTS is a power of two of at least
`experts` + 2: the last bin holds rows past the end.
"""

import triton
import triton.language as tl

from .._kernel_functions import int32, mask_if
from .._launch import kernel


@triton.jit
def _experts_of(index, row, rows, experts):
    """Return the expert of each row as int32: `experts` for none, one more past the end."""
    expert = tl.load(index + row, mask=row < rows, other=0)
    expert = tl.where((expert >= 0) & (expert < experts), expert, experts).to(tl.int32)
    return tl.where(row < rows, expert, experts + 1)


@kernel
@triton.jit
def moe_count(index, counts, rows, experts, chunks, CHUNK: tl.constexpr, EXPERTS: tl.constexpr):
    """Count the rows of each expert in one chunk."""
    chunk = tl.program_id(0)
    row = chunk * CHUNK + tl.arange(0, CHUNK)
    bins = int32(tl.histogram(_experts_of(index, row, rows, experts), EXPERTS))
    expert = tl.arange(0, EXPERTS)
    tl.store(counts + expert.to(tl.int64) * chunks + chunk, bins, mask=expert <= experts)


@kernel
@triton.jit
def moe_scan(counts, totals, chunks, BLOCK: tl.constexpr):
    """Replace one expert's counts by the rows that it has in earlier chunks, and store its total."""
    expert = tl.program_id(0)
    before = counts + expert.to(tl.int64) * chunks
    total = 0
    for start in tl.range(0, chunks, BLOCK):
        chunk = start + tl.arange(0, BLOCK)
        count = tl.load(before + chunk, mask=chunk < chunks, other=0)
        tl.store(before + chunk, total + int32(tl.cumsum(count, 0)) - count, mask=chunk < chunks)
        total += tl.sum(count, 0)
    tl.store(totals + expert, total)


@kernel
@triton.jit
def moe_plan(
    offsets, tiles, totals,
    experts, bound,
    BLOCK_ROWS: tl.constexpr, EXPERTS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Cut each expert's rows into tiles of BLOCK_ROWS: `tiles` is [2, bound], the expert and the first row of each.

    The expert of a tile that is not needed is -1. `offsets` [experts + 1] are written from `totals`, or read if
    `totals` is None.
    """
    program = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    inside = expert < experts
    if totals is None:
        start = tl.load(offsets + expert, mask=inside, other=0)
        total = tl.load(offsets + expert + 1, mask=inside, other=0) - start
    else:
        total = tl.load(totals + expert, mask=inside, other=0)
        start = int32(tl.cumsum(total, 0)) - total
        tl.store(offsets + expert, start, mask=mask_if(program == 0, expert <= experts))
    pieces = (total + BLOCK_ROWS - 1) // BLOCK_ROWS
    ends = int32(tl.cumsum(pieces, 0))
    tile = program * TILES + tl.arange(0, TILES)
    owner = int32(tl.sum(((ends[None, :] <= tile[:, None]) & inside[None, :]).to(tl.int32), 1))
    first = tl.where(expert[None, :] == owner[:, None], (start - (ends - pieces) * BLOCK_ROWS)[None, :], 0)
    row = int32(tl.sum(first, 1)) + tile * BLOCK_ROWS
    tl.store(tiles + tile, tl.where(owner < experts, owner, -1), mask=tile < bound)
    tl.store(tiles + bound + tile, row, mask=tile < bound)


@kernel
@triton.jit
def moe_scatter(index, counts, offsets, order, inverse, rows, experts, chunks, CHUNK: tl.constexpr):
    """Store the parts of `order` and `inverse` for the rows of one chunk."""
    chunk = tl.program_id(0)
    row = chunk * CHUNK + tl.arange(0, CHUNK)
    peer = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = row < rows
    expert = _experts_of(index, row, rows, experts)
    same = _experts_of(index, peer, rows, experts)[None, :] == expert[:, None]
    rank = int32(tl.sum((same & (peer[None, :] < row[:, None])).to(tl.int32), 1))
    before = tl.load(counts + expert.to(tl.int64) * chunks + chunk, mask=inside, other=0)
    position = tl.load(offsets + expert, mask=inside, other=0) + before + rank
    tl.store(inverse + row, position, mask=inside)
    tl.store(order + position, row, mask=inside)
