"""Sums, gatherings and parts of tensors over a group, as new tensors: what layers compute with that ranks share.

Under torch.compile they are PyTorch's functional collectives, which it can trace and overlap with other work. Without
it a group of Gloo compares shapes before each exchange: Gloo itself ends a process that receives more than it expects.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops._host import HOST
from . import collectives
from .collectives import Work
from .comparison import ranks_of

# Bytes of a description of dtype and shape, of which every rank sends as many.
_DESCRIPTION = 256


def check_alike(tensor: Tensor, group: Any, what: str) -> None:
    """Raises, in all processes of a Gloo group, unless all of them pass the same dtype and shape.

    Groups of other backends compare nothing: the numbers would have to come back from the device, in every layer.
    """
    if dist.get_backend(group) != dist.Backend.GLOO:
        return
    text = _described(tensor).encode().ljust(_DESCRIPTION)[:_DESCRIPTION]
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    everywhere = torch.empty(dist.get_world_size(group), _DESCRIPTION, dtype=torch.uint8, device=HOST)
    collectives.all_gather(everywhere.view(-1), mine, group, f"comparing shapes for {_named(what, tensor)}").wait()
    if bool((everywhere == mine).all()):
        return
    texts = [bytes(each.tolist()).decode().strip() for each in everywhere]
    found = ", ".join(f"rank {rank} {each}" for rank, each in zip(ranks_of(group), texts, strict=True))
    raise ValueError(f"{what}: all ranks must pass the same dtype and shape, got {found}")


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _named(what: str, tensor: Tensor) -> str:
    return f"{what} ({_described(tensor)} here)"


def start_sum(tensor: Tensor, group: Any, what: str) -> tuple[Tensor, Work]:
    """The sum over the group, once the work is done."""
    return start_sum_in_place(tensor.clone(memory_format=torch.contiguous_format), group, what)


def start_sum_in_place(total: Tensor, group: Any, what: str) -> tuple[Tensor, Work]:
    """The sum over the group in the memory of `total`, contiguous and not needed otherwise; see `start_sum`."""
    check_alike(total, group, what)
    return total, collectives.all_reduce(total, group, _named(what, total))


def start_gather(tensor: Tensor, group: Any, what: str) -> tuple[Tensor, Work]:
    """The tensors of all ranks one after the other along the first dimension, once the work is done."""
    check_alike(tensor, group, what)
    shape = (dist.get_world_size(group) * tensor.shape[0], *tensor.shape[1:])
    whole = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    values = tensor.contiguous().view(-1)
    return whole, collectives.all_gather(whole.view(-1), values, group, _named(what, tensor))


def start_sum_of_part(tensor: Tensor, group: Any, what: str) -> tuple[Tensor, Work]:
    """This rank's part, along the first dimension, of the sum over the group, once the work is done."""
    check_alike(tensor, group, what)
    rows = _part_size(tensor.shape[0], group, what)
    part = torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
    values = tensor.contiguous().view(-1)
    return part, collectives.reduce_scatter(part.view(-1), values, group, False, _named(what, tensor))


def sum_over(tensor: Tensor, group: Any, what: str) -> Tensor:
    """The sum over the group."""
    if torch.compiler.is_compiling():
        from torch.distributed import _functional_collectives as functional

        return functional.wait_tensor(functional.all_reduce(tensor.contiguous(), "sum", group))
    return _finished(*start_sum(tensor, group, what))


def gather(tensor: Tensor, group: Any, what: str, dim: int = 0) -> Tensor:
    """The tensors of all ranks one after the other along `dim`."""
    if torch.compiler.is_compiling():
        from torch.distributed import _functional_collectives as functional

        whole = functional.wait_tensor(functional.all_gather_tensor(tensor.contiguous(), 0, group))
    else:
        whole = _finished(*start_gather(tensor, group, what))
    return whole if dim == 0 else torch.cat(whole.chunk(dist.get_world_size(group)), dim)


def sum_of_part(tensor: Tensor, group: Any, what: str) -> Tensor:
    """This rank's part, along the first dimension, of the sum over the group."""
    if torch.compiler.is_compiling():
        from torch.distributed import _functional_collectives as functional

        return functional.wait_tensor(functional.reduce_scatter_tensor(tensor.contiguous(), "sum", 0, group))
    return _finished(*start_sum_of_part(tensor, group, what))


def part(tensor: Tensor, group: Any, what: str, dim: int = 0) -> Tensor:
    """This rank's part of a tensor that all ranks have, along `dim`."""
    size = _part_size(tensor.shape[dim], group, what)
    return tensor.narrow(dim, dist.get_rank(group) * size, size).contiguous()


def _part_size(size: int, group: Any, what: str) -> int:
    ranks = dist.get_world_size(group)
    if size % ranks:
        raise ValueError(f"{what}: a dimension of size {size} cannot be divided among {ranks} ranks")
    return size // ranks


def _finished(result: Tensor, work: Work) -> Tensor:
    work.wait()
    return result
