"""Divisions that must come out even, and tensors divided evenly among tensor-parallel ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from .._arguments import Count, checked
from .._distributed import exchange
from .parallel_state import get_tensor_model_parallel_group


@checked
def ensure_divisibility(numerator: int, denominator: Count, what: str = "") -> None:
    """Raise an AssertionError unless `denominator` divides `numerator`; `what` says which numbers these are."""
    if numerator % denominator:
        raise AssertionError(f"{what}{': ' if what else ''}{numerator} is not divisible by {denominator}")


@checked
def divide(numerator: int, denominator: Count, what: str = "") -> int:
    """Return the quotient, or raise an AssertionError if there is a remainder; `what` says which numbers these are."""
    ensure_divisibility(numerator, denominator, what)
    return numerator // denominator


@checked
def split_tensor_into_1d_equal_chunks(tensor: Tensor) -> Tensor:
    """This rank's part of all elements, as a vector that shares their memory where they are contiguous."""
    group = get_tensor_model_parallel_group()
    size = divide(tensor.numel(), torch.distributed.get_world_size(group))
    return tensor.reshape(-1).narrow(0, torch.distributed.get_rank(group) * size, size)


@checked
def gather_split_1d_tensor(tensor: Tensor) -> Tensor:
    """The opposite: the vectors of all ranks one after the other."""
    return exchange.gather(tensor, get_tensor_model_parallel_group(), "the all-gather of a divided tensor")
