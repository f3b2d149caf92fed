"""Dropout and the sum with a residual in one pass, for Triton."""

import triton
import triton.language as tl

from .._launch import kernel


@triton.jit
def _some(
    x, residual, output, words, first, count, dropout, kept_scale, HAS_RESIDUAL: tl.constexpr, SIZE: tl.constexpr
):
    """SIZE elements from `first` on, kept where the random word, taken as a number below 1, is not below `dropout`."""
    index = first + tl.arange(0, SIZE)
    inside = index < count
    kept = words.to(tl.uint32, bitcast=True).to(tl.float32) * 2.3283064365386963e-10 >= dropout
    values = tl.load(x + index, mask=inside, other=0.0).to(tl.float32) * kept_scale
    values = tl.where(kept, values, 0.0)
    if HAS_RESIDUAL:
        values += tl.load(residual + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + index, values.to(output.dtype.element_ty), mask=inside)


@kernel
@triton.jit
def dropout_add(
    x, residual, seed, output, count, dropout, kept_scale, HAS_RESIDUAL: tl.constexpr, QUARTER: tl.constexpr
):  # fmt: skip
    """output = dropout(x) + residual; the random words depend on the seed and on an element's place alone."""
    program = tl.program_id(0).to(tl.int64)
    first = program * (4 * QUARTER)
    # One call of Philox makes four words: a program has four stretches of elements, one for each.
    a, b, c, d = tl.randint4x(tl.load(seed), program * QUARTER + tl.arange(0, QUARTER))
    _some(x, residual, output, a, first, count, dropout, kept_scale, HAS_RESIDUAL, QUARTER)
    _some(x, residual, output, b, first + QUARTER, count, dropout, kept_scale, HAS_RESIDUAL, QUARTER)
    _some(x, residual, output, c, first + 2 * QUARTER, count, dropout, kept_scale, HAS_RESIDUAL, QUARTER)
    _some(x, residual, output, d, first + 3 * QUARTER, count, dropout, kept_scale, HAS_RESIDUAL, QUARTER)
