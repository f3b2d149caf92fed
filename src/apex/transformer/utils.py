"""Exact division, and tensors divided equally among tensor-parallel ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from .._arguments import Count, checked
from .._distributed import exchange
from .parallel_state import get_tensor_model_parallel_group


@checked
def ensure_divisibility(numerator: int, denominator: Count, description: str = "") -> None:
    """Raise an AssertionError unless `denominator` divides `numerator`; `description` describes the numbers."""
    if numerator % denominator:
        raise AssertionError(f"{description}{': ' if description else ''}{numerator} is not divisible by {denominator}")


@checked
def divide(numerator: int, denominator: Count, description: str = "") -> int:
    """Return the quotient, or raise an AssertionError if there is a remainder; `description` describes the numbers."""
    ensure_divisibility(numerator, denominator, description)
    return numerator // denominator


@checked
def split_tensor_into_1d_equal_chunks(tensor: Tensor) -> Tensor:
    """Return this rank's part of all elements as a vector; it is a view if the tensor is contiguous."""
    group = get_tensor_model_parallel_group()
    size = divide(tensor.numel(), torch.distributed.get_world_size(group))
    return tensor.reshape(-1).narrow(0, torch.distributed.get_rank(group) * size, size)


@checked
def gather_split_1d_tensor(tensor: Tensor) -> Tensor:
    """Concatenate the vectors of all tensor-parallel ranks, which `split_tensor_into_1d_equal_chunks` made."""
    return exchange.gather(tensor, get_tensor_model_parallel_group(), "the all-gather of a divided tensor")
