"""What follows a convolution, in one pass over its output, in place."""

import triton
import triton.language as tl

from .._launch import kernel


@kernel
@triton.jit
def conv_epilogue(
    values,
    scale,
    bias,
    mask,
    elements,
    channels,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """max(values * scale + bias, 0), and 0 where `mask` is 0; channels lie side by side."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < elements
    channel = (offset % channels).to(tl.int32)
    result = tl.load(values + offset, inside, other=0.0).to(tl.float32)
    if HAS_SCALE:
        result *= tl.load(scale + channel, inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + channel, inside, other=0.0).to(tl.float32)
    result = tl.where(result <= 0.0, 0.0, result)  # not by tl.maximum: NaN must stay NaN
    if HAS_MASK:
        result = tl.where(tl.load(mask + offset, inside, other=0) == 0, 0.0, result)
    tl.store(values + offset, result.to(values.dtype.element_ty), inside)
