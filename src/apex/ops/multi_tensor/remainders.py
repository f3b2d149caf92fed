"""float32 numbers kept as a bfloat16 and the 16 bits that it lacks.

The bfloat16 is the float32 rounded to the nearest, halves away from zero: its bits are the upper half, plus one when
the lower half, read as a signed number, is negative. So the float32's bits, read as a number, are 65536 times those of
the bfloat16, plus the remainder.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, bfloat16, float32, int16, int32


def join(params: Tensor, remainders: Tensor) -> Tensor:
    """The float32 numbers."""
    return remainders.to(int32).add_(params.detach().view(int16), alpha=1 << 16).view(float32)


def split(values: Tensor, params: Tensor, remainders: Tensor) -> None:
    """Into `params` and `remainders`."""
    bits = values.view(int32)
    remainders.copy_(bits)  # wraps around
    params.view(int16).copy_((bits - remainders).bitwise_right_shift_(16))


def check(
    params: Sequence[Tensor], remainders: Sequence[Tensor], outputs: Sequence[Tensor], names: tuple[str, str, str]
) -> None:
    """Raises unless these are parameters, their remainders, and where the parameters go."""
    lists = (params, remainders, outputs)
    for name, dtype, tensors in zip(names, (bfloat16, int16, bfloat16), lists, strict=True):
        if len(tensors) != len(params):
            raise ValueError(f"{name} has {len(tensors)} tensors, {names[0]} has {len(params)}")
        for index, (tensor, param) in enumerate(zip(tensors, params, strict=True)):
            if tensor.dtype != dtype:
                raise TypeError(f"{name}[{index}] is {tensor.dtype}; {dtype} is expected")
            if tensor.shape != param.shape:
                raise ValueError(f"{name}[{index}] is {tuple(tensor.shape)}, {names[0]}[{index}] {tuple(param.shape)}")
