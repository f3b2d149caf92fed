"""Functions that kernels of several families call."""

import triton
import triton.language as tl

from ._launch import kernel


@triton.jit
def is_last_block(counter, blocks):
    """Return whether this program is the last of `blocks` programs to ask; it then sees all that the others stored.

    The last program finishes the work of all, and no program waits. This replaces a second launch, which costs the host
    8 us on a slow machine. Which program is last depends on the run, but the values it adds and their order do not:
    results are deterministic. Only for devices with `publishes_for_all`.

    `counter` points to an int32 that is 0 before the first program asks, and again after the last. Values that other
    programs stored must be loaded with `cache_modifier=".cg"`, past the multiprocessor's own cache.
    """
    tl.debug_barrier()  # all threads of this program have finished their stores
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == blocks - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def mask_if(condition, mask):
    """Return `mask`, a block, if `condition`, a single number, is true, else a mask that is false everywhere.

    Triton's interpreter holds `mask & condition` as integers, which it refuses as a mask from release 3.9 on. Compiled
    code has no trace of the comparison with 0.
    """
    return (mask & condition) != 0


@triton.jit
def sum_rows(rows, number, column, columns, ROWS: tl.constexpr):
    """Return the sum of `number` rows; other programs of this launch may have stored some of them."""
    sums = tl.zeros([ROWS, column.shape[0]], tl.float32)
    for start in tl.range(0, number, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < number)[:, None] & (column < columns)[None, :]
        pointers = rows + row.to(tl.int64)[:, None] * columns + column[None, :]
        sums += tl.load(pointers, mask=mask, other=0.0, cache_modifier=".cg")
    return tl.sum(sums, 0)


@kernel
@triton.jit
def sum_bias_partials(partials, dbias, count, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Add up `count` rows of partial sums in a fixed order: the gradient of a bias or of another broadcast tensor."""
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = sum_rows(partials, count, column, columns, ROWS)
    tl.store(dbias + column, total.to(dbias.dtype.element_ty), mask=column < columns)


@triton.jit
def parameter(pointer, channel, mask, absent: tl.constexpr):
    """Return the weights or biases of channels in float32, or `absent` for each channel if the norm has none."""
    if pointer is not None:
        values = tl.load(pointer + channel, mask, other=0.0).to(tl.float32)
    else:
        values = tl.full(channel.shape, absent, tl.float32)
    return values


@triton.jit
def random_words(seed, counter, ROUNDS: tl.constexpr):
    """Return four blocks of random uint32 by Philox, one word of each per int64 in `counter`.

    Does not use `tl.randint4x`: before Triton 3.4 it makes 64-bit words for 64-bit counters. Later versions make the
    same words as this function.
    """
    low = counter.to(tl.uint32)
    none = low * 0
    return tl.philox(seed, low, (counter >> 32).to(tl.uint32), none, none, ROUNDS)


@triton.jit
def int32(values):
    """Return a sum, cumulative sum or histogram of 32-bit integers.

    The interpreters of Triton 3.2 to 3.5 compute some of them in 64 bits and call them 32, so that a store would write
    twice the bytes. On a GPU both casts vanish.
    """
    return values.to(tl.int64).to(tl.int32)
