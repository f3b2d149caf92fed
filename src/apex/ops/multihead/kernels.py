"""Dropout and the sum with a residual in one pass, for Triton.

A program has four stretches of QUARTER elements: one call of Philox makes four words, one for each stretch, and the
four keep decisions are stored as four bits of a byte.
"""

import triton
import triton.language as tl

from .._kernel_functions import random_words
from .._launch import kernel


@triton.jit
def _is_kept(word, dropout):
    """Return 1 if the word, read as a number from 0 to 1, is not below `dropout`, else 0."""
    return (word.to(tl.float32) * 2.3283064365386963e-10 >= dropout).to(tl.int32)


@triton.jit
def _load(tensor, first, count, SIZE: tl.constexpr):
    """Return a stretch of a tensor from `first` on; zeros if the tensor is None."""
    if tensor is not None:
        index = first + tl.arange(0, SIZE)
        values = tl.load(tensor + index, mask=index < count, other=0.0).to(tl.float32)
    else:
        values = tl.zeros((SIZE,), tl.float32)
    return values


@triton.jit
def _store(output, values, residual, bits, first, count, kept_scale, SIZE: tl.constexpr):
    """Store the residual, plus the scaled values where the lowest of the `bits` is set."""
    index = first + tl.arange(0, SIZE)
    values = tl.where((bits & 1) != 0, values * kept_scale, 0.0) + residual
    tl.store(output + index, values.to(output.dtype.element_ty), mask=index < count)


@kernel
@triton.jit
def dropout_add(x, residual, seed, kept, output, count, dropout, kept_scale, QUARTER: tl.constexpr):
    """Compute output = dropout(x) + residual with a `seed`, and store the keep bits in `kept`.

    Without a seed, compute the gradient: read `kept`, with no residual. The random bits depend only on the seed and on
    an element's index.
    """
    program = tl.program_id(0).to(tl.int64)
    counters = program * QUARTER + tl.arange(0, QUARTER)
    first, second = program * (4 * QUARTER), program * (4 * QUARTER) + QUARTER
    third, fourth = second + QUARTER, second + 2 * QUARTER
    # All loads come before the arithmetic of Philox, which takes as long as they do.
    x_a, r_a = _load(x, first, count, QUARTER), _load(residual, first, count, QUARTER)
    x_b, r_b = _load(x, second, count, QUARTER), _load(residual, second, count, QUARTER)
    x_c, r_c = _load(x, third, count, QUARTER), _load(residual, third, count, QUARTER)
    x_d, r_d = _load(x, fourth, count, QUARTER), _load(residual, fourth, count, QUARTER)
    if seed is not None:
        a, b, c, d = random_words(tl.load(seed), counters, 10)
        bits = _is_kept(a, dropout) + 2 * _is_kept(b, dropout) + 4 * _is_kept(c, dropout) + 8 * _is_kept(d, dropout)
        tl.store(kept + counters, bits.to(tl.uint8))
    else:
        bits = tl.load(kept + counters).to(tl.int32)
    _store(output, x_a, r_a, bits, first, count, kept_scale, QUARTER)
    _store(output, x_b, r_b, bits >> 1, second, count, kept_scale, QUARTER)
    _store(output, x_c, r_c, bits >> 2, third, count, kept_scale, QUARTER)
    _store(output, x_d, r_d, bits >> 3, fourth, count, kept_scale, QUARTER)
