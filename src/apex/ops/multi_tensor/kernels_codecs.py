"""Codecs of slots as Triton functions: see `codecs.py`, which has the formulas.

`pointer` and `companions` belong to one tensor. `offset` is a block's first element, a multiple of the block size and
so of a group. Scales are computed for groups of 64 elements of the block.

While an H200 moves the 12 bytes of an element of AdamW with int8 state, it has time for less than 90 instructions. So
quotients are products with the square of `tl.rsqrt`, which takes 2 instructions where a division takes 8, and numbers
are rounded by additions that leave the code in the lower digits: 12582912 is 1.5 * 2**23.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codecs import NUMBERS

# Codecs are numbers here: tuples of constants hold no strings.
PLAIN = tl.constexpr(0)
SIGNED8 = tl.constexpr(NUMBERS["signed8"])
ROOT8 = tl.constexpr(NUMBERS["root8"])
BFLOAT16 = tl.constexpr(NUMBERS["bfloat16"])
REMAINDER8 = tl.constexpr(NUMBERS["remainder8"])
REMAINDER16 = tl.constexpr(NUMBERS["remainder16"])


@triton.jit
def noise_bits(seed, tensor, index, SLOT: tl.constexpr):
    """Return 16 bits of noise per element; `codecs.noise` returns the same bits.

    Murmur's finaliser hashes the place of 64 elements, which lie in few threads: each of these hashes only once.
    """
    seed = tl.full((1,), seed, tl.float32).to(tl.uint32)  # an integer below 2**24, which float32 holds exactly
    salt = (SLOT * 0x27D4EB2F) & 0xFFFFFFFF
    index = index.to(tl.uint32)
    noise = (index >> 6) * 0x9E3779B1 + (seed * 0x85EBCA6B + tensor.to(tl.uint32) * 0xC2B2AE35 + salt)
    noise = (noise ^ (noise >> 16)) * 0x85EBCA6B
    noise = (noise ^ (noise >> 13)) * 0xC2B2AE35
    return ((noise ^ (noise >> 16)) + (index & 63) * 0x9E3779B1) >> 16


@triton.jit
def round_stochastically(x, noise):
    """Round to a float32 that bfloat16 can hold, up or down at random, so that the mean error is zero."""
    bits = (x.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


@triton.jit
def _spread(scales, BLOCK: tl.constexpr):
    """Return each group's scale for all of its elements."""
    return tl.reshape(tl.broadcast_to(scales[:, None], (BLOCK // 64, 64)), (BLOCK,))


@triton.jit
def _codes(pointer, offset, mask, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    if MASKED:
        codes = tl.load(pointer + offset + tl.arange(0, BLOCK), mask=mask, other=0)
    else:
        codes = tl.load(pointer + offset + tl.arange(0, BLOCK))
    return codes


@triton.jit
def _store_codes(pointer, offset, codes, mask, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    if MASKED:
        tl.store(pointer + offset + tl.arange(0, BLOCK), codes, mask=mask)
    else:
        tl.store(pointer + offset + tl.arange(0, BLOCK), codes)


@triton.jit
def decoded(pointer, companions, offset, size, mask, CODEC: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Return a block of a slot as float32."""
    codes = _codes(pointer, offset, mask, MASKED, BLOCK)
    if CODEC == BFLOAT16:
        x = codes.to(tl.float32)
    elif CODEC == REMAINDER8:
        bits = (codes.to(tl.int32) << 16) + (_codes(companions, offset, mask, MASKED, BLOCK).to(tl.int32) << 8)
        x = bits.to(tl.float32, bitcast=True)
    elif CODEC == REMAINDER16:
        bits = (codes.to(tl.int32) << 16) + _codes(companions, offset, mask, MASKED, BLOCK).to(tl.int32)
        x = bits.to(tl.float32, bitcast=True)
    else:
        group = offset // 64 + tl.arange(0, BLOCK // 64)
        if MASKED:
            scales = tl.load(companions + group, mask=group * 64 < size, other=0.0)
        else:
            scales = tl.load(companions + group)
        if CODEC == SIGNED8:
            number = codes.to(tl.float32)
            root = tl.rsqrt(254.0 - tl.abs(number))
            x = number * (root * root) * _spread(scales, BLOCK)
        elif CODEC == ROOT8:
            root = codes.to(tl.float32) * _spread(scales * (1 / 255), BLOCK)
            x = root * root
        else:
            # By integers: not every GPU has float8. Exponents of e4m3 are biased by 7, of float32 by 127. The product
            # is right for the smallest exponent too, which has no leading 1 in either of them.
            bits = codes.to(tl.int32)
            number = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 2.0**120
            x = number * _spread(scales * (1 / 448), BLOCK)
    return x


@triton.jit
def store_encoded(
    pointer, companions, offset, size, x, mask, noise,
    CODEC: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a block of float32 numbers in a slot."""
    if CODEC == BFLOAT16:
        _store_codes(pointer, offset, round_stochastically(x, noise).to(tl.bfloat16), mask, MASKED, BLOCK)
    elif CODEC == REMAINDER8 or CODEC == REMAINDER16:
        bits = tl.minimum(x.to(tl.int32, bitcast=True), 0x7FC00000)  # NaN of an NVIDIA GPU, 0x7FFFFFFF, would overflow
        if CODEC == REMAINDER8:
            bits += 0x80
            lower = (bits >> 8).to(tl.int8)
        else:
            lower = bits.to(tl.int16)
        _store_codes(pointer, offset, ((bits + 0x8000) >> 16).to(tl.int16), mask, MASKED, BLOCK)
        _store_codes(companions, offset, lower, mask, MASKED, BLOCK)
    else:
        magnitudes = x
        if CODEC == ROOT8:
            magnitudes = tl.sqrt(x)
        if MASKED:
            magnitudes = tl.where(mask, magnitudes, 0.0)
        scales = tl.max(tl.abs(tl.reshape(magnitudes, (BLOCK // 64, 64))), axis=1)
        known = scales >= 1.1754943508222875e-38  # the smallest number whose reciprocal is finite
        root = tl.rsqrt(scales)
        inverse = tl.where(known, root * root, 0.0)
        if CODEC == SIGNED8:
            share = x * _spread(inverse, BLOCK)
            root = tl.rsqrt(1.0 + tl.abs(share))
            codes = tl.fma(share * root, root * 254.0, 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
        elif CODEC == ROOT8:
            # Less than 255 by more than the error of `inverse`, 2**-21, so that no noise makes 256 of it.
            number = magnitudes * _spread(inverse * 254.9998, BLOCK)
            least = tl.minimum(tl.maximum(x * 3e38, 0.0), 1.0)  # 1 unless x is 0, in one instruction
            # From 256 to 511 a float32 has 15 binary digits after the point.
            number = tl.maximum(number, least) + 256.0
            codes = ((number.to(tl.uint32, bitcast=True) + (noise >> 1)) >> 15).to(tl.uint8)
        else:
            share = x * _spread(inverse, BLOCK)
            bits = (tl.abs(share) * (448 * 2.0**-120)).to(tl.int32, bitcast=True)
            codes = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20  # to 3 bits of mantissa, halves to even
            codes = (codes | ((share.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
        _store_codes(pointer, offset, codes, mask, MASKED, BLOCK)
        group = offset // 64 + tl.arange(0, BLOCK // 64)
        if MASKED:
            tl.store(companions + group, scales, mask=group * 64 < size)
        else:
            tl.store(companions + group, scales)
