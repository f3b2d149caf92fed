"""Divisions that must come out even, and tensors divided evenly among tensor-parallel ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from .._distributed import exchange
from .parallel_state import get_tensor_model_parallel_group


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """An AssertionError unless `denominator` divides `numerator`."""
    assert numerator % denominator == 0, f"{numerator} is not divisible by {denominator}"


def divide(numerator: int, denominator: int) -> int:
    """The quotient; an AssertionError where there is a remainder."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def split_tensor_into_1d_equal_chunks(tensor: Tensor) -> Tensor:
    """This rank's part of all elements, as a vector that shares their memory where they are contiguous."""
    group = get_tensor_model_parallel_group()
    size = divide(tensor.numel(), torch.distributed.get_world_size(group))
    return tensor.reshape(-1).narrow(0, torch.distributed.get_rank(group) * size, size)


def gather_split_1d_tensor(tensor: Tensor) -> Tensor:
    """The opposite: the vectors of all ranks one after the other."""
    return exchange.gather(tensor, get_tensor_model_parallel_group(), "the all-gather of a divided tensor")
