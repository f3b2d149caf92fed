"""What fills the rows of a packed tensor that belong to no sequence."""

import triton
import triton.language as tl

from .._launch import kernel

PROGRAMS = 64
# Numbers of elements come in two parts, because a float of 32 bits holds 24.
LOW_BITS = 20


@kernel
@triton.jit
def transducer_fill_rest(
    batch_offset, target, last, high, low, value, COLUMNS: tl.constexpr, LOW: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes `value` behind the last sequence, whose end is `batch_offset[last]`, up to high * 2**LOW + low elements.

    Mostly there is nothing to write; how much there is the host does not know. Its numbers are floats, so that one
    launch serves all numbers of rows.
    """
    total = (tl.cast(high, tl.int64) << LOW) + tl.cast(low, tl.int64)
    end = tl.load(batch_offset + tl.cast(last, tl.int64)).to(tl.int64) * COLUMNS
    at = end + tl.program_id(0) * BLOCK
    fill = tl.zeros([BLOCK], tl.float32) + value
    while at < total:
        element = at + tl.arange(0, BLOCK)
        tl.store(target + element, fill.to(target.dtype.element_ty), mask=element < total)
        at += tl.num_programs(0) * BLOCK
