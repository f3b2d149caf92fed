"""Empty tensors for the results of a plan, made the quick way.

A plan knows sizes, strides and dtype of everything it returns. `torch.empty_like` would find them out again and pass
through PyTorch's dispatcher twice: beside an H200, 1.6 us where the function that Inductor's code calls takes 1.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

try:
    from torch._C._dynamo.guards import _empty_strided_cuda as _quick  # type: ignore[attr-defined]
except ImportError:  # it is not among what PyTorch promises
    _quick = None

Maker = Callable[[int | None], Tensor]


class Like(NamedTuple):
    """What a result is like: a contiguous tensor of these sizes and this dtype."""

    sizes: tuple[int, ...]
    dtype: torch.dtype


def like(tensor: Tensor | None) -> Like | None:
    """What the gradient of a contiguous parameter is like; None of an absent one."""
    return None if tensor is None else Like(tuple(tensor.shape), tensor.dtype)


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def maker(
    sizes: Sequence[int], dtype: torch.dtype, device: torch.device, strides: Sequence[int] | None = None
) -> Maker:
    """What makes uninitialised tensors, contiguous ones without `strides`, given what `stream_here` says."""
    shape = tuple(sizes)
    steps = contiguous_strides(shape) if strides is None else tuple(strides)

    def make(stream: int | None) -> Tensor:
        if stream is None or _quick is None:
            return torch.empty_strided(shape, steps, dtype=dtype, device=device)
        return _quick(shape, steps, dtype)  # on the current device

    return make
