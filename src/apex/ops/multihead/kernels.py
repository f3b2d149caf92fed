"""Dropout and the sum with a residual in one pass, for Triton.

A program has four stretches of QUARTER elements: one call of Philox makes four words, one for each stretch, and what
they decide is kept as four bits of a byte.
"""

import triton
import triton.language as tl

from .._launch import kernel


@triton.jit
def _is_kept(word, dropout):
    """The word, taken as a number from 0 to 1, is not below `dropout`."""
    return (word.to(tl.uint32, bitcast=True).to(tl.float32) * 2.3283064365386963e-10 >= dropout).to(tl.int32)


@triton.jit
def _stretch(x, residual, output, bits, first, count, kept_scale, HAS_RESIDUAL: tl.constexpr, SIZE: tl.constexpr):
    """Elements from `first` on, kept where the last of their bits is set."""
    index = first + tl.arange(0, SIZE)
    inside = index < count
    values = tl.load(x + index, mask=inside, other=0.0).to(tl.float32) * kept_scale
    values = tl.where((bits & 1) != 0, values, 0.0)
    if HAS_RESIDUAL:
        values += tl.load(residual + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + index, values.to(output.dtype.element_ty), mask=inside)


@kernel
@triton.jit
def dropout_add(
    x, residual, seed, kept, output, count, dropout, kept_scale,
    DRAWS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, QUARTER: tl.constexpr,
):  # fmt: skip
    """output = dropout(x) + residual; writes the bits of what is `kept` if it DRAWS, else reads them.

    What is drawn depends on the seed and on an element's place alone.
    """
    program = tl.program_id(0).to(tl.int64)
    places = program * QUARTER + tl.arange(0, QUARTER)
    if DRAWS:
        a, b, c, d = tl.randint4x(tl.load(seed), places)
        bits = _is_kept(a, dropout) + 2 * _is_kept(b, dropout) + 4 * _is_kept(c, dropout) + 8 * _is_kept(d, dropout)
        tl.store(kept + places, bits.to(tl.uint8))
    else:
        bits = tl.load(kept + places).to(tl.int32)
    first = program * (4 * QUARTER)
    _stretch(x, residual, output, bits, first, count, kept_scale, HAS_RESIDUAL, QUARTER)
    _stretch(x, residual, output, bits >> 1, first + QUARTER, count, kept_scale, HAS_RESIDUAL, QUARTER)
    _stretch(x, residual, output, bits >> 2, first + 2 * QUARTER, count, kept_scale, HAS_RESIDUAL, QUARTER)
    _stretch(x, residual, output, bits >> 3, first + 3 * QUARTER, count, kept_scale, HAS_RESIDUAL, QUARTER)
