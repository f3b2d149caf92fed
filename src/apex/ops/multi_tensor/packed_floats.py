"""Floats packed in integers: bytes that are the upper halves of float16, and int16 remainders of float32 numbers.

A bfloat16 and its remainder make up a float32. The bfloat16 is the float32 rounded to nearest, halves away from zero:
its bits are the upper half, plus one if the lower half, read as a signed number, is negative. So the float32's bits,
read as a number, are 65536 times the bits of the bfloat16, plus the remainder.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .op import scale

# Mask of the sign and exponent of a float32, as a signed number.
_POWER = -(1 << 23)


def to_bytes(values: Tensor) -> Tensor:
    """Round to 2 bits of mantissa, halves away from zero, and return the upper byte of the float16."""
    single = values.to(torch.float32)
    power = (single.view(torch.int32) & _POWER).view(torch.float32)
    return ((single + power / 8).to(torch.float16).view(torch.int16) >> 8).to(torch.uint8)


def from_bytes(values: Tensor) -> Tensor:
    """Return the float16 numbers with these upper bytes."""
    return (values.to(torch.int16) << 8).view(torch.float16)


@torch.no_grad()
def maybe_cast(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], skip: Tensor | None, names: tuple[str, str]
) -> None:
    """Copy every input to its output, whatever their dtypes; do nothing if `skip` is not 0."""
    plain: list[tuple[Tensor, Tensor]] = []
    special: list[tuple[Tensor, Tensor]] = []
    for pair in zip(outputs, inputs, strict=True):
        (special if torch.uint8 in (pair[0].dtype, pair[1].dtype) else plain).append(pair)
    for output, source in special:
        if output.numel() != source.numel():
            raise ValueError(f"a tensor of {names[0]} has {output.numel()} elements, of {names[1]} {source.numel()}")
        for name, tensor in zip(names, (output, source), strict=True):
            if tensor.dtype not in (torch.uint8, torch.float16, torch.bfloat16, torch.float32):
                raise TypeError(f"a tensor of {name} is {tensor.dtype}, which is not cast to or from bytes")
    scale([source for _, source in plain], [output for output, _ in plain], 1.0, noop=skip, names=names)
    for output, source in special:
        values = from_bytes(source) if source.dtype == torch.uint8 else source
        cast = (to_bytes(values) if output.dtype == torch.uint8 else values.to(output.dtype)).view(output.shape)
        output.copy_(cast if skip is None else torch.where(skip.reshape(()) != 0, output, cast))


def join_remainders(params: Tensor, remainders: Tensor) -> Tensor:
    """Return the float32 numbers that bfloat16 `params` and int16 `remainders` make up."""
    return remainders.to(torch.int32).add_(params.detach().view(torch.int16), alpha=1 << 16).view(torch.float32)


def split_remainders(values: Tensor, params: Tensor, remainders: Tensor) -> None:
    """Split float32 numbers into `params` and `remainders`."""
    bits = values.view(torch.int32)
    remainders.copy_(bits)  # keeps the lower 16 bits, by wrapping around
    params.view(torch.int16).copy_((bits - remainders).bitwise_right_shift_(16))


def check_remainders(
    params: Sequence[Tensor], remainders: Sequence[Tensor], outputs: Sequence[Tensor], names: tuple[str, str, str]
) -> None:
    """Raise unless these are bfloat16 parameters, int16 remainders and bfloat16 outputs of matching shapes."""
    lists = (params, remainders, outputs)
    for name, dtype, tensors in zip(names, (torch.bfloat16, torch.int16, torch.bfloat16), lists, strict=True):
        if len(tensors) != len(params):
            raise ValueError(f"{name} has {len(tensors)} tensors, {names[0]} has {len(params)}")
        for index, (tensor, param) in enumerate(zip(tensors, params, strict=True)):
            if tensor.dtype != dtype:
                raise TypeError(f"{name}[{index}] is {tensor.dtype}; {dtype} is expected")
            if tensor.shape != param.shape:
                raise ValueError(f"{name}[{index}] is {tuple(tensor.shape)}, {names[0]}[{index}] {tuple(param.shape)}")
