"""Comparisons of parameters and settings between processes, made before anything is sent that depends on them."""

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
# What errors say of a setting that a rank has not, and how many settings they name.
_ABSENT = "absent"
_MOST_OPTIONS = 5
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_same_everywhere(
    named_params: Sequence[tuple[str, Tensor]], what: str = "models", group: Any = None, options: Any = None
) -> None:
    """Raise, in all processes of a group, unless their parameters are alike in names, shapes, types and order.

    `options` are compared too, a dict or anything else that can be printed. Errors say that the `what` of two ranks
    differ.
    """
    described = [(name, tuple(param.shape), str(param.dtype), param.requires_grad) for name, param in named_params]
    everything = differing((described, options), [param for _, param in named_params], what, group)
    if everything:
        raise _error(everything, what, group)


def check_settings(settings: dict[str, Any], what: str, group: Any = None, tensors: Sequence[Tensor] = ()) -> None:
    """Raise, in all processes of a group, unless their settings are equal; the error names those that differ.

    Eight bytes are exchanged if all are equal, on the device of `tensors` if the group needs one. Only plain values
    are compared: see `plain`.
    """
    everything = differing(([], {name: plain(value) for name, value in settings.items()}), tensors, what, group)
    if everything:
        raise _error(everything, what, group)


def optimizer_settings(optimizer: Any) -> dict[str, Any]:
    """Return all options of an optimizer's parameter groups, learning rates among them, with names for errors."""
    return {
        f"{name} of parameter group {number}": value
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name not in ("params", "param_names")
    }


def plain(value: Any) -> Any:
    """Return a value in a form that two processes can compare; an object that they cannot becomes its type's name.

    Numbers are rounded to six digits: processors of different kinds compute schedules of learning rates differently in
    the last bits. A tensor of one element becomes a number, which waits for the device.
    """
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else tuple(value.shape)
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if value is None or isinstance(value, bool | int | str | torch.dtype):
        return value
    if type(value) in (list, tuple):
        return tuple(map(plain, value))
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    return type(value).__name__


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


def _error(everything: list[Any], what: str, group: Any) -> RuntimeError:
    """Return an error that names the first difference between the first rank of a group and another one.

    `everything` has the described parameters and the options of each rank.
    """
    other = next(index for index, each in enumerate(everything) if each != everything[0])
    ranks, (mine, others) = ranks_of(group), (everything[0], everything[other])
    counts = ""
    if mine[0] or others[0]:
        sizes = [sum(math.prod(shape) for _, shape, *_ in params) for params, _ in (mine, others)]
        counts = f"{len(mine[0])} parameters with {sizes[0]} elements, and {len(others[0])} with {sizes[1]}. "
    return RuntimeError(
        f"the {what} of rank {ranks[0]} and rank {ranks[other]} differ: {counts}"
        f"{_difference(ranks[0], mine, ranks[other], others)}"
    )


def _difference(rank: int, mine: Any, other_rank: int, others: Any) -> str:
    """Return a sentence about the first parameter, or the options, that two ranks do not have alike."""
    for one, other in itertools.zip_longest(mine[0], others[0]):
        if one != other:
            return f"Rank {rank} has {_described(one)}, rank {other_rank} has {_described(other)}"
    if not isinstance(mine[1], dict) or not isinstance(others[1], dict):
        return f"Rank {rank} has the options {mine[1]}, rank {other_rank} {others[1]}"
    options = [name for name in {**mine[1], **others[1]} if mine[1].get(name, _ABSENT) != others[1].get(name, _ABSENT)]
    found = [
        f"{name} is {mine[1].get(name, _ABSENT)} in rank {rank} and {others[1].get(name, _ABSENT)} in rank {other_rank}"
        for name in options[:_MOST_OPTIONS]
    ]
    more = f"; and {len(options) - _MOST_OPTIONS} more" if len(options) > _MOST_OPTIONS else ""
    return "; ".join(found) + more


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
