"""Sums, gathers and splits of tensors over a group, for layers that ranks share. Results are new tensors.

Under torch.compile these are PyTorch's functional collectives, which it can trace and overlap with other work. In eager
mode a Gloo group compares shapes before each exchange, because Gloo ends a process that receives more than it expects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops._host import HOST
from . import collectives
from .collectives import Work
from .comparison import ranks_of

# Fixed length in bytes of a description of dtype and shape.
_DESCRIPTION_BYTES = 256


def check_alike(tensor: Tensor, group: Any, description: str) -> None:
    """Raise in all processes of a Gloo group unless all of them pass the same dtype and shape.

    Other backends compare nothing, because every layer would have to wait for the device.
    """
    if dist.get_backend(group) == dist.Backend.GLOO:
        comparison = f"comparing shapes for {_named(description, tensor)}"
        _compare(_described(tensor), group, comparison, f"{description}: all ranks must pass the same dtype and shape")


def _compare(own: str, group: Any, comparison: str, rule: str) -> None:
    """Raise a ValueError that begins with `rule` in all processes of a group unless all pass the same text."""
    text = own.encode().ljust(_DESCRIPTION_BYTES)[:_DESCRIPTION_BYTES]
    own_bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    everywhere = torch.empty(dist.get_world_size(group), _DESCRIPTION_BYTES, dtype=torch.uint8, device=HOST)
    collectives.all_gather(everywhere.view(-1), own_bytes, group, comparison).wait()
    if bool((everywhere == own_bytes).all()):
        return
    texts = [bytes(row.tolist()).decode().strip() for row in everywhere]
    by_rank = ", ".join(f"rank {rank} {text}" for rank, text in zip(ranks_of(group), texts, strict=True))
    raise ValueError(f"{rule}, got {by_rank}")


def taking_part(
    tensors: Sequence[Tensor], group: Any, description: str, parameters: Iterable[Tensor] = ()
) -> Sequence[Tensor]:
    """Return tensors for differentiable exchanges: all require gradients if one of them or of `parameters` does.

    A rank must take part in the backward pass of each exchange, because the gradients of other ranks need it. If no
    gradient is needed at all, none is here; in a Gloo group it is an error unless that holds in all processes.
    """
    if torch.compiler.is_compiling():
        return tensors
    needed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*tensors, *parameters))
    if dist.get_backend(group) == dist.Backend.GLOO:
        rule = f"{description}: all ranks must need gradients, or none"
        _compare("needs some" if needed else "needs none", group, f"comparing needs of {description}", rule)
    return [t if t.requires_grad or not needed else t.detach().requires_grad_() for t in tensors]


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _named(description: str, tensor: Tensor) -> str:
    return f"{description} ({_described(tensor)} here)"


def start_sum_in_place(total: Tensor, group: Any, description: str) -> tuple[Tensor, Work]:
    """Start the sum over the group in the memory of `total`, which must be contiguous; return `total` and the work."""
    check_alike(total, group, description)
    return total, collectives.all_reduce(total, group, _named(description, total))


def start_gather(tensor: Tensor, group: Any, description: str) -> tuple[Tensor, Work]:
    """Start concatenating the tensors of all ranks along the first dimension; return the result and the work."""
    check_alike(tensor, group, description)
    shape = (dist.get_world_size(group) * tensor.shape[0], *tensor.shape[1:])
    whole = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    values = tensor.contiguous().view(-1)
    return whole, collectives.all_gather(whole.view(-1), values, group, _named(description, tensor))


def start_sum_of_part(tensor: Tensor, group: Any, description: str) -> tuple[Tensor, Work]:
    """Start the reduce-scatter along the first dimension; return this rank's part of the sum and the work."""
    check_alike(tensor, group, description)
    rows = _part_size(tensor.shape[0], group, description)
    part = torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
    values = tensor.contiguous().view(-1)
    return part, collectives.reduce_scatter(part.view(-1), values, group, False, _named(description, tensor))


def sum_over(tensor: Tensor, group: Any, description: str) -> Tensor:
    """Return the sum over the group."""
    if torch.compiler.is_compiling():
        from torch.distributed import _functional_collectives as functional

        return functional.wait_tensor(functional.all_reduce(tensor.contiguous(), "sum", group))
    total = tensor.clone(memory_format=torch.contiguous_format)
    return _finished(*start_sum_in_place(total, group, description))


def gather(tensor: Tensor, group: Any, description: str, dim: int = 0) -> Tensor:
    """Return the tensors of all ranks, concatenated along `dim`."""
    if torch.compiler.is_compiling():
        from torch.distributed import _functional_collectives as functional

        whole = functional.wait_tensor(functional.all_gather_tensor(tensor.contiguous(), 0, group))
    else:
        whole = _finished(*start_gather(tensor, group, description))
    return whole if dim == 0 else torch.cat(whole.chunk(dist.get_world_size(group)), dim)


def sum_of_part(tensor: Tensor, group: Any, description: str) -> Tensor:
    """Return this rank's part, along the first dimension, of the sum over the group."""
    if torch.compiler.is_compiling():
        from torch.distributed import _functional_collectives as functional

        return functional.wait_tensor(functional.reduce_scatter_tensor(tensor.contiguous(), "sum", 0, group))
    return _finished(*start_sum_of_part(tensor, group, description))


def part(tensor: Tensor, group: Any, description: str, dim: int = 0) -> Tensor:
    """Return this rank's part, along `dim`, of a tensor that all ranks have."""
    size = _part_size(tensor.shape[dim], group, description)
    return tensor.narrow(dim, dist.get_rank(group) * size, size).contiguous()


def _part_size(size: int, group: Any, description: str) -> int:
    ranks = dist.get_world_size(group)
    if size % ranks:
        raise ValueError(f"{description}: a dimension of size {size} cannot be divided among {ranks} ranks")
    return size // ranks


def _finished(result: Tensor, work: Work) -> Tensor:
    work.wait()
    return result
