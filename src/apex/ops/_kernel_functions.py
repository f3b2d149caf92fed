"""Functions that kernels of several families call."""

import triton
import triton.language as tl

from ._launch import kernel


@triton.jit
def is_last_block(counter, blocks):
    """Whether this program is the last of `blocks` to ask; then it sees all that the others stored before they did.

    The last one finishes the work of all, none of them waiting: what a second launch would do costs the host nothing
    this way, 8 us of it on a slow one. Which is last depends on the run, what it adds up and in which order does not:
    results are deterministic. Only for devices that `publishes_for_all`.

    `counter` points to an int32 that is 0 before the first asks, and again after the last. What others stored must be
    loaded with `cache_modifier=".cg"`, past the multiprocessor's own cache.
    """
    tl.debug_barrier()  # all threads of this program have stored what they had to
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
    """The sum of `number` rows, of which other programs of this launch may have stored some."""
    sums = tl.zeros([ROWS, column.shape[0]], tl.float32)
    for start in tl.range(0, number, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < number)[:, None] & (column < columns)[None, :]
        place = rows + row.to(tl.int64)[:, None] * columns + column[None, :]
        sums += tl.load(place, mask=mask, other=0.0, cache_modifier=".cg")
    return tl.sum(sums, 0)


@kernel
@triton.jit
def sum_bias_partials(partials, dbias, count, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds up `count` rows of partial sums in a fixed order: for the gradient of a bias, or of what is broadcast."""
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = sum_rows(partials, count, column, columns, ROWS)
    tl.store(dbias + column, total.to(dbias.dtype.element_ty), mask=column < columns)


@triton.jit
def parameter(pointer, channel, mask, absent: tl.constexpr):
    """Weights or biases of channels in float32, or what stands for those that a norm does not have."""
    if pointer is not None:
        values = tl.load(pointer + channel, mask, other=0.0).to(tl.float32)
    else:
        values = tl.full(channel.shape, absent, tl.float32)
    return values


@triton.jit
def random_words(seed, place, ROUNDS: tl.constexpr):
    """Four blocks of random uint32 for a block of int64 places, by Philox.

    Not `tl.randint4x`, which before Triton 3.4 makes 64-bit words for 64-bit places; later ones make these words.
    """
    low = place.to(tl.uint32)
    none = low * 0
    return tl.philox(seed, low, (place >> 32).to(tl.uint32), none, none, ROUNDS)
