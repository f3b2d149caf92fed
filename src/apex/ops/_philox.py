"""Random words for places of tensors with any number of elements."""

import triton
import triton.language as tl


@triton.jit
def four_words(seed, place, ROUNDS: tl.constexpr):
    """Four blocks of random uint32 for a block of int64 places.

    Not `tl.randint4x`, which before Triton 3.4 makes 64-bit words for 64-bit places; later ones make these words.
    """
    low = place.to(tl.uint32)
    none = low * 0
    return tl.philox(seed, low, (place >> 32).to(tl.uint32), none, none, ROUNDS)
