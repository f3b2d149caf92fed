"""Parameters that travel as integers: of each the most significant bytes, as many as the integer has.

What is lost are the last bits of its mantissa, cut off, not rounded. Numbers are little-endian.
"""

from __future__ import annotations

import torch
from torch import Tensor


def taken(values: Tensor, count: int) -> Tensor:
    """The `count` most significant bytes of each of some values, as a vector of bytes."""
    return _bytes_of(values)[:, -count:].reshape(-1)


def restored(received: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Values of which these are the upper bytes; the others are zero."""
    values = torch.zeros(len(received) // count, dtype=dtype, device=received.device)
    _bytes_of(values)[:, -count:] = received.view(-1, count)
    return values


def _bytes_of(values: Tensor) -> Tensor:
    """[elements, bytes of each], in the memory of the values."""
    return values.view(torch.uint8).view(len(values), values.element_size())
