"""Comparisons of parameters and settings between processes, made before anything that depends on them is sent."""

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
from .collectives import gather_objects

# Number of 8-byte words that are summed at once; each needs 16 bytes of memory.
_CHUNK = 1 << 22
# The value that errors show for a setting that a rank lacks, and the number of settings that they name.
_ABSENT = "absent"
_MAX_OPTIONS = 5
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_same_everywhere(
    named_params: Sequence[tuple[str, Tensor]], what: str = "models", group: Any = None, options: Any = None
) -> None:
    """Raise in all processes of a group unless names, shapes, dtypes and order of their parameters are equal.

    `options`, a dict or any object with a repr, are compared too. Errors say that the `what` of two ranks differ.
    """
    described = [(name, tuple(param.shape), str(param.dtype), param.requires_grad) for name, param in named_params]
    by_rank = differing((described, options), [param for _, param in named_params], what, group)
    if by_rank:
        raise _error(by_rank, what, group)


def check_settings(settings: dict[str, Any], what: str, group: Any = None, tensors: Sequence[Tensor] = ()) -> None:
    """Raise in all processes of a group unless their settings are equal; the error names the differing settings.

    Equal settings cost an exchange of eight bytes, on the device of `tensors` if the group needs one. Only plain values
    are compared: see `plain`.
    """
    by_rank = differing(([], {name: plain(value) for name, value in settings.items()}), tensors, what, group)
    if by_rank:
        raise _error(by_rank, what, group)


def optimizer_settings(optimizer: Any) -> dict[str, Any]:
    """Return all options of an optimizer's parameter groups, including learning rates, named for errors."""
    return {
        f"{name} of parameter group {number}": value
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name not in ("params", "param_names")
    }


def plain(value: Any) -> Any:
    """Return a value in a form that two processes can compare; other objects become the name of their type.

    Numbers are rounded to six digits, because different processors compute learning-rate schedules differently in the
    last bits. A tensor of one element becomes a number, which waits for the device.
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
        return {str(name): plain(item) for name, item in value.items()}
    return type(value).__name__


def differing(described: Any, tensors: Sequence[Tensor], what: str, group: Any) -> list[Any]:
    """Return the descriptions of all processes of a group, by rank, if they differ, otherwise an empty list.

    Checksums of 8 bytes are compared, on the device of `tensors` if the group supports it.
    """
    checksums = [zlib.crc32(repr(described).encode())]
    device = common_device(tensors, group)
    checksums_by_rank = gather_integers(torch.tensor(checksums, dtype=torch.int64, device=device), what, group)
    if checksums_by_rank.count(checksums_by_rank[0]) == len(checksums_by_rank):
        return []
    by_rank = gather_objects(described, f"comparing the {what} of all ranks", group)
    # 100 and 100.0 are equal, though their representations differ.
    return [] if by_rank.count(by_rank[0]) == len(by_rank) else by_rank


def _error(by_rank: list[Any], what: str, group: Any) -> RuntimeError:
    """Return an error that names the first difference between the first rank of a group and another rank.

    `by_rank` holds the described parameters and the options of each rank.
    """
    other = next(index for index, description in enumerate(by_rank) if description != by_rank[0])
    ranks, (first, second) = ranks_of(group), (by_rank[0], by_rank[other])
    counts = ""
    if first[0] or second[0]:
        sizes = [sum(math.prod(shape) for _, shape, *_ in params) for params, _ in (first, second)]
        counts = f"{len(first[0])} parameters with {sizes[0]} elements, and {len(second[0])} with {sizes[1]}. "
    return RuntimeError(
        f"the {what} of rank {ranks[0]} and rank {ranks[other]} differ: {counts}"
        f"{_difference(ranks[0], first, ranks[other], second)}"
    )


def _difference(rank: int, first: Any, other_rank: int, second: Any) -> str:
    """Return a sentence about the first parameter, or the options, that differ between two ranks."""
    for parameter, other in itertools.zip_longest(first[0], second[0]):
        if parameter != other:
            return f"Rank {rank} has {_described(parameter)}, rank {other_rank} has {_described(other)}"
    if not isinstance(first[1], dict) or not isinstance(second[1], dict):
        return f"Rank {rank} has the options {first[1]}, rank {other_rank} {second[1]}"
    pairs = {
        name: [options.get(name, _ABSENT) for options in (first[1], second[1])] for name in {**first[1], **second[1]}
    }
    differences = [
        f"{name} is {value} in rank {rank} and {other} in rank {other_rank}"
        for name, (value, other) in pairs.items()
        if value != other
    ]
    more = f"; and {len(differences) - _MAX_OPTIONS} more" if len(differences) > _MAX_OPTIONS else ""
    return "; ".join(differences[:_MAX_OPTIONS]) + more


def _described(parameter: Any) -> str:
    if parameter is None:
        return "no more"
    name, shape, dtype, requires_grad = parameter
    return f"parameter {name} of shape {shape}, {dtype}{'' if requires_grad else ', that requires no gradient'}"


def check_same_order(named_params: Sequence[tuple[str, Tensor]], what: str, group: Any = None) -> None:
    """Raise in all processes of a group if one has the values of the first process in another order.

    This finds swapped parameters of equal shapes, which only names or initial values distinguish. It requires that all
    processes start with the same values.
    """
    if not named_params or is_stand_in(named_params[0][1]):  # meta tensors have no values
        return
    own = torch.stack([checksum(param) for _, param in named_params])
    first = own.clone()
    ranks = ranks_of(group)
    with explained(f"comparing the {what} of all ranks"):
        dist.broadcast(first, ranks[0], group=group)
    own_values, first_values = own.tolist(), first.tolist()
    index_of_difference = -1
    if own_values != first_values and sorted(own_values) == sorted(first_values):
        index_of_difference = next(index for index, value in enumerate(own_values) if value != first_values[index])
    for rank, (index,) in zip(ranks, gather_integers(own.new_tensor([index_of_difference]), what, group), strict=True):
        if index >= 0:
            raise RuntimeError(
                f"the {what} of rank {ranks[0]} and rank {rank} have the same parameters in another order: what is "
                f"parameter {named_params[index][0]} in rank {rank} is another one in rank {ranks[0]}"
            )


def gather_integers(values: Tensor, what: str, group: Any) -> list[list[int]]:
    """Return the integers of every process of a group, by rank; `what` describes the comparison in errors."""
    everywhere = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    with explained(f"comparing the {what} of all ranks"):
        dist.all_gather(everywhere, values, group=group)
    return [integers.tolist() for integers in everywhere]


def common_device(tensors: Sequence[Tensor], group: Any) -> torch.device:
    """Return a device of the type that all processes of a group use, even in a process without such tensors."""
    kinds = (dist.distributed_c10d._get_default_group() if group is None else group)._device_types
    device = kinds[0] if kinds and HOST not in kinds else HOST
    return next((tensor.device for tensor in tensors if tensor.device.type == device.type), device)


def ranks_of(group: Any) -> list[int]:
    """Return the global ranks of a group's processes; None means all processes."""
    return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return a number that depends on all bits of a tensor and on their order."""
    words = _words(getattr(tensor, "_local_tensor", tensor).detach())
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    if not words.numel():
        return total
    # Integers wrap around. Odd factors make every change of a single word visible.
    weights = torch.arange(1, 2 * min(_CHUNK, words.numel()), 2, dtype=torch.int64, device=words.device)
    for chunk in words.split(_CHUNK):
        total = total * 31 + (chunk * weights[: len(chunk)]).sum()
    return total


def _words(tensor: Tensor) -> Tensor:
    """Return the bits as 8-byte integers, or as integers of the element's size if the bytes do not fill them."""
    flat = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = flat.reshape(-1)
    size = flat.element_size()
    if flat.nbytes % 8:
        return flat.view(_INTEGERS[size])
    # The alignment of a tensor's memory must not matter, because it may differ in another process.
    return (flat.clone() if flat.storage_offset() * size % 8 else flat).view(torch.int64)
