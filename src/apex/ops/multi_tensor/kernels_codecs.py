"""Codecs of slots as Triton functions: see `codecs.py`, which has the formulas.

`pointer` and `companions` belong to one tensor. `offset` is a block's first element, a multiple of the block size and
so of a group. Scales are computed for groups of 64 elements of the block.
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
    """Return 16 bits of noise per element by Murmur's finaliser; `codecs.noise` returns the same bits."""
    seed = tl.full((1,), seed, tl.float32).to(tl.uint32)  # an integer below 2**24, which float32 holds exactly
    salt = (SLOT * 0x27D4EB2F) & 0xFFFFFFFF
    noise = index.to(tl.uint32) * 0x9E3779B1 + (seed * 0x85EBCA6B + tensor.to(tl.uint32) * 0xC2B2AE35 + salt)
    noise = (noise ^ (noise >> 16)) * 0x85EBCA6B
    noise = (noise ^ (noise >> 13)) * 0xC2B2AE35
    return (noise ^ (noise >> 16)) & 0xFFFF


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
        scales = _spread(scales, BLOCK)
        if CODEC == SIGNED8:
            number = codes.to(tl.float32)
            x = number / (254.0 - tl.abs(number)) * scales
        elif CODEC == ROOT8:
            root = codes.to(tl.float32) * (1 / 255) * scales
            x = root * root
        else:
            # By integers: not every GPU has float8. Exponents of e4m3 are biased by 7; the smallest one has no
            # leading 1, and steps of 2**-9.
            bits = codes.to(tl.int32)
            magnitude = bits & 0x7F
            normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
            number = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
            x = tl.where(bits > 127, -number, number) * (1 / 448) * scales
    return x


@triton.jit
def store_encoded(
    pointer, companions, offset, size, x, mask, noise,
    CODEC: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a block of float32 numbers in a slot."""
    if CODEC == BFLOAT16:
        _store_codes(pointer, offset, round_stochastically(x, noise).to(tl.bfloat16), mask, MASKED, BLOCK)
    elif CODEC == REMAINDER8:
        x = tl.where(x == x, x, float("nan"))  # NaN of other bits would overflow
        bits = (x.to(tl.int32, bitcast=True) + 128) >> 8
        upper = (bits + 128) >> 8
        _store_codes(pointer, offset, upper.to(tl.int16), mask, MASKED, BLOCK)
        _store_codes(companions, offset, (bits - (upper << 8)).to(tl.int8), mask, MASKED, BLOCK)
    elif CODEC == REMAINDER16:
        x = tl.where(x == x, x, float("nan"))
        bits = x.to(tl.int32, bitcast=True)
        upper = (bits + 32768) >> 16
        _store_codes(pointer, offset, upper.to(tl.int16), mask, MASKED, BLOCK)
        _store_codes(companions, offset, (bits - (upper << 16)).to(tl.int16), mask, MASKED, BLOCK)
    else:
        magnitudes = x
        if CODEC == ROOT8:
            magnitudes = tl.sqrt(x)
        if MASKED:
            magnitudes = tl.where(mask, magnitudes, 0.0)
        scales = tl.max(tl.abs(tl.reshape(magnitudes, (BLOCK // 64, 64))), axis=1)
        known = scales >= 1.1754943508222875e-38  # the smallest number whose reciprocal is finite
        inverse = tl.where(known, 1.0 / tl.where(known, scales, 1.0), 0.0)
        share = magnitudes * _spread(inverse, BLOCK)
        if CODEC == SIGNED8:
            number = 2.0 * share / (1.0 + tl.abs(share))
            codes = tl.floor(number * 127.0 + 0.5)
            codes = tl.minimum(tl.maximum(codes, -127.0), 127.0).to(tl.int8)
        elif CODEC == ROOT8:
            codes = tl.floor(share * 255.0 + noise.to(tl.float32) * (1 / 65536))
            codes = tl.minimum(tl.maximum(codes, tl.where(x > 0.0, 1.0, 0.0)), 255.0).to(tl.uint8)
        else:
            number = tl.minimum(tl.abs(share) * 448.0, 448.0)
            bits = number.to(tl.int32, bitcast=True)
            rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20  # to 3 bits of mantissa, halves to even
            # Adding 1.5 * 2**23 rounds small numbers to integers, halves to even.
            small = ((number * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
            codes = tl.where(number < 0.015625, small, rounded - (120 << 3))
            codes = (codes + tl.where(share < 0.0, 128, 0)).to(tl.uint8)
        _store_codes(pointer, offset, codes, mask, MASKED, BLOCK)
        group = offset // 64 + tl.arange(0, BLOCK // 64)
        if MASKED:
            tl.store(companions + group, scales, mask=group * 64 < size)
        else:
            tl.store(companions + group, scales)
