"""Whether all processes have the same parameters, in the same order: asked before anything is sent by that order."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._failures import explained
from ..ops._host import HOST
from ..ops._library import is_stand_in

# Words that are looked at in one go; 16 bytes of memory for each.
_CHUNK = 1 << 22
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_same_everywhere(
    named_params: Sequence[tuple[str, Tensor]], what: str = "models", group: Any = None, options: Any = None
) -> None:
    """Raises, in all processes of a group, unless their parameters are alike in names, shapes, types and order.

    `options` are compared too; `what` is what errors say differs.
    """
    described = [(name, tuple(param.shape), str(param.dtype), param.requires_grad) for name, param in named_params]
    everything = differing((described, options), [param for _, param in named_params], what, group)
    if not everything:
        return
    other = next(index for index, each in enumerate(everything) if each != everything[0])
    ranks, sizes = ranks_of(group), [sum(math.prod(shape) for _, shape, *_ in params) for params, _ in everything]
    raise RuntimeError(
        f"the {what} of rank {ranks[0]} and rank {ranks[other]} differ: {len(everything[0][0])} parameters with "
        f"{sizes[0]} elements, and {len(everything[other][0])} with {sizes[other]}. "
        f"{_difference(ranks[0], everything[0], ranks[other], everything[other])}"
    )


def differing(described: Any, tensors: Sequence[Tensor], what: str, group: Any) -> list[Any]:
    """What the processes of a group describe, by rank in it, if they do not all describe the same; else nothing.

    Numbers of 8 bytes are compared, on the device of `tensors` if the group can.
    """
    checksums = [zlib.crc32(repr(described).encode())]
    device = common_device(tensors, group)
    found = gathered(torch.tensor(checksums, dtype=torch.int64, device=device), what, group)
    if found.count(found[0]) == len(found):
        return []
    everything: list[Any] = [None] * len(found)
    with explained(f"comparing the {what} of all ranks"):
        dist.all_gather_object(everything, described, group=group)
    # 100 and 100.0 are the same, though written differently.
    return [] if everything.count(everything[0]) == len(everything) else everything


def _difference(rank: int, mine: Any, other_rank: int, others: Any) -> str:
    """A sentence about the first thing that two ranks do not have alike."""
    for one, other in itertools.zip_longest(mine[0], others[0]):
        if one != other:
            return f"Rank {rank} has {_described(one)}, rank {other_rank} has {_described(other)}"
    return f"Rank {rank} has the options {mine[1]}, rank {other_rank} {others[1]}"


def _described(parameter: Any) -> str:
    if parameter is None:
        return "no more"
    name, shape, dtype, requires_grad = parameter
    return f"parameter {name} of shape {shape}, {dtype}{'' if requires_grad else ', that requires no gradient'}"


def check_same_order(named_params: Sequence[tuple[str, Tensor]], what: str, group: Any = None) -> None:
    """Raises, in all processes of a group, where one has the values of the first one in another order.

    For parameters of the same shapes, which only names tell apart, or the values that processes start with, if these
    are the same.
    """
    if not named_params or is_stand_in(named_params[0][1]):  # which has no values
        return
    mine = torch.stack([checksum(param) for _, param in named_params])
    first = mine.clone()
    ranks = ranks_of(group)
    with explained(f"comparing the {what} of all ranks"):
        dist.broadcast(first, ranks[0], group=group)
    here, there = mine.tolist(), first.tolist()
    place = -1
    if here != there and sorted(here) == sorted(there):
        place = next(index for index, value in enumerate(here) if value != there[index])
    for rank, (found,) in zip(ranks, gathered(mine.new_tensor([place]), what, group), strict=True):
        if found >= 0:
            raise RuntimeError(
                f"the {what} of rank {ranks[0]} and rank {rank} have the same parameters in another order: what is "
                f"parameter {named_params[found][0]} in rank {rank} is another one in rank {ranks[0]}"
            )


def gathered(mine: Tensor, what: str, group: Any) -> list[list[int]]:
    """The integers of every process of a group, by rank in it; `what` is said to be compared if that fails."""
    everywhere = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with explained(f"comparing the {what} of all ranks"):
        dist.all_gather(everywhere, mine, group=group)
    return [each.tolist() for each in everywhere]


def common_device(tensors: Sequence[Tensor], group: Any) -> torch.device:
    """A device of the kind that all processes of a group choose, also one that has no such tensors."""
    kinds = (dist.distributed_c10d._get_default_group() if group is None else group)._device_types
    chosen = kinds[0] if kinds and HOST not in kinds else HOST
    return next((tensor.device for tensor in tensors if tensor.device.type == chosen.type), chosen)


def ranks_of(group: Any) -> list[int]:
    """The ranks of a group's processes; of all for None."""
    return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """A number that depends on all bits of a tensor and on their order."""
    words = _words(getattr(tensor, "_local_tensor", tensor).detach())
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    if not words.numel():
        return total
    # Integers wrap around; with odd factors no single word can change unseen.
    weights = torch.arange(1, 2 * min(_CHUNK, words.numel()), 2, dtype=torch.int64, device=words.device)
    for chunk in words.split(_CHUNK):
        total = total * 31 + (chunk * weights[: len(chunk)]).sum()
    return total


def _words(tensor: Tensor) -> Tensor:
    """The bits as integers of 8 bytes, or where they do not fill such ones, as wide as an element."""
    flat = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = flat.reshape(-1)
    size = flat.element_size()
    if flat.nbytes % 8:
        return flat.view(_INTEGERS[size])
    # Where a tensor is in its memory must not matter: it may be elsewhere in another process.
    return (flat.clone() if flat.storage_offset() * size % 8 else flat).view(torch.int64)
