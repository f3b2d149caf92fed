"""Codecs: how the numbers of a slot are stored in fewer bytes, and the same codecs in PyTorch operators.

A codec belongs to a slot of the lists, for every tensor alike. `kernels_codecs.py` has the codecs for a GPU.

    signed8      int8, 127 y for y = 2 x / (1 + |x|), x = value / scale; a float32 scale, the largest |value|, per GROUP
    root8        uint8, 255 sqrt(value) / scale, rounded stochastically, at least 1 unless it is 0; scales of roots
    float8       float8_e4m3fn, 448 value / scale; scales as of signed8
    bfloat16     bfloat16, rounded stochastically
    remainder8   bfloat16 and the next 8 bits of the float32, as an int8: `join`
    remainder16  bfloat16 and the other 16 bits of the float32, as an int16

All but bfloat16 have a second list, the companions: scales, float32 [groups], or remainders, of the tensor's shape.
A root is at least 1, because a second moment of 0 beside a first moment that is not 0 would give an infinite update.
It is rounded stochastically, because the nearest code never follows a decay of 0.1% per step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 64
LARGEST_FLOAT8 = 448.0
# The smallest scale whose reciprocal is finite; groups of smaller values become zero.
SMALLEST = 2.0**-126

DTYPES = {"signed8": torch.int8, "root8": torch.uint8, "float8": torch.float8_e4m3fn, "bfloat16": torch.bfloat16}
REMAINDERS = {"remainder8": torch.int8, "remainder16": torch.int16}
# The number of each codec in kernels; 0 means no codec.
NUMBERS = {codec: number for number, codec in enumerate((*DTYPES, *REMAINDERS), 1)}
STOCHASTIC = frozenset({"root8", "bfloat16"})
# A slot's number times this is added to the seed's hash, so that slots have different noise; slot 0 adds nothing.
SALT = 0x27D4EB2F


class Encoded(NamedTuple):
    """The codec of a slot, and its list of companions, or None if the codec has none."""

    codec: str
    companions: Sequence[Tensor] | None


Encodings = Mapping[int, Encoded]  # by slot


class NoisePlace(NamedTuple):
    """The position of a shard in its tensor, so that the noise of an element does not depend on the sharding.

    Element i of the shard is element start + (i // run) * stride + i % run of tensor (or row) `number`.
    """

    number: int
    start: int
    run: int
    stride: int


def has_scales(codec: str) -> bool:
    """Return whether groups of 64 numbers have a scale."""
    return codec in ("signed8", "root8", "float8")


def new_codes(codec: str, param: Tensor) -> Tensor:
    """Return codes of zeros, laid out like a parameter."""
    return torch.zeros_like(param, dtype=DTYPES[codec], memory_format=torch.preserve_format, requires_grad=False)


def new_companions(codec: str, param: Tensor) -> Tensor | None:
    """Return new companions: scales of zeros, remainders of numbers that bfloat16 holds exactly, or None."""
    if codec in REMAINDERS:
        return torch.zeros_like(
            param, dtype=REMAINDERS[codec], memory_format=torch.preserve_format, requires_grad=False
        )
    if not has_scales(codec):
        return None
    return torch.zeros(-(-param.numel() // GROUP), dtype=torch.float32, device=param.device)


def noise(seed: int | Tensor, row: Tensor, index: Tensor, slot: int) -> Tensor:
    """Return 16 bits of noise for each element, as int64; the same bits as `kernels_codecs.noise_bits`."""
    word = 0xFFFFFFFF
    bits = (((index & word) >> 6) * 0x9E3779B1 + seed * 0x85EBCA6B + row * 0xC2B2AE35 + slot * SALT) & word
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & word
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & word
    return (((bits ^ (bits >> 16)) + (index & 63) * 0x9E3779B1) & word) >> 16


def to_bfloat16(values: Tensor, bits_of_noise: Tensor) -> Tensor:
    """Round float32 numbers up or down to numbers that bfloat16 can hold, right on average; NaN stays NaN."""
    bits = (values.view(torch.int32).to(torch.int64) + bits_of_noise) & ~0xFFFF
    rounded = ((bits + 2**31) % 2**32 - 2**31).to(torch.int32).view(torch.float32)
    return torch.where(values == values, rounded, values)


def decode(codec: str, stored: Tensor, companions: Tensor | None) -> Tensor:
    """Return the float32 numbers of a vector of codes, whose companions begin with its first group."""
    if codec in REMAINDERS:
        assert companions is not None
        return join(stored, companions)
    if companions is None:
        return stored.to(torch.float32)
    codes = stored.to(torch.float32)
    scales = companions[: -(-stored.numel() // GROUP)].repeat_interleave(GROUP)[: stored.numel()]
    if codec == "signed8":
        return codes / (254.0 - codes.abs()) * scales
    if codec == "root8":
        return (codes * (1 / 255) * scales).square()
    return codes * (1 / LARGEST_FLOAT8) * scales


def encode(codec: str, values: Tensor, bits_of_noise: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return the codes of a vector, and its companions; without noise, stochastic codecs round to nearest."""
    values = values.to(torch.float32)
    if codec in REMAINDERS:
        return split(values, codec)
    if codec == "bfloat16":
        return (values if bits_of_noise is None else to_bfloat16(values, bits_of_noise)).to(torch.bfloat16), None
    magnitudes = values.sqrt() if codec == "root8" else values
    padded = torch.nn.functional.pad(magnitudes.abs(), (0, -values.numel() % GROUP))
    scales = padded.view(padded.numel() // GROUP, GROUP).amax(1)
    inverse = torch.where(scales >= SMALLEST, 1 / scales.clamp(min=SMALLEST), 0.0).repeat_interleave(GROUP)[
        : values.numel()
    ]
    x = magnitudes * inverse
    if codec == "signed8":
        return torch.round(2.0 * x / (1.0 + x.abs()) * 127.0).clamp(-127, 127).to(torch.int8), scales
    if codec == "root8":
        share = 0.5 if bits_of_noise is None else bits_of_noise * (1 / 65536)
        codes = torch.floor(x * 255.0 + share).clamp(0, 255)
        return torch.where(values > 0, codes.clamp(min=1), codes).to(torch.uint8), scales
    return (x * LARGEST_FLOAT8).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(torch.float8_e4m3fn), scales


def join(params: Tensor, remainders: Tensor) -> Tensor:
    """Return the float32 numbers that bfloat16 `params` and their remainders make up.

    The bits of a float32, read as an integer, are 65536 times the bits of the bfloat16, plus the remainder. A remainder
    of 8 bits is multiplied by 256 first.
    """
    factor = 256 if remainders.dtype == torch.int8 else 1
    bits = remainders.to(torch.int32) * factor
    return bits.add_(params.detach().view(torch.int16), alpha=1 << 16).view(torch.float32)


def split(values: Tensor, codec: str) -> tuple[Tensor, Tensor]:
    """Return the bfloat16 numbers nearest to float32 ones, halves away from zero, and the remainders.

    With 8 bits of remainder the float32 is first rounded to 24 bits, which may carry into the bfloat16.
    """
    quiet = torch.where(values == values, values, torch.nan)  # NaN of other bits would overflow below
    bits = quiet.contiguous().view(torch.int32)
    shift = 0
    if codec == "remainder8":
        bits, shift = (bits + 128) >> 8, 8
    upper = (bits + (1 << (15 - shift))) >> (16 - shift)
    remainders = (bits - (upper << (16 - shift))).to(REMAINDERS[codec])
    return upper.to(torch.int16).view(torch.bfloat16), remainders


def remainders_of(masters: Tensor, params: Tensor, codec: str) -> Tensor:
    """Return the remainders of float32 masters for bfloat16 parameters that were rounded up or down."""
    difference = masters.contiguous().view(torch.int32) - (params.detach().contiguous().view(torch.int16).int() << 16)
    if codec == "remainder8":
        return ((difference + 128) >> 8).clamp(-128, 127).to(torch.int8)
    return difference.clamp(-32768, 32767).to(torch.int16)
