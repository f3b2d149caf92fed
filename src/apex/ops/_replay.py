"""Operators in compiled code, whose Python runs once for arguments that look alike.

What a call makes and launches is noted, with tensors of the device "meta" in place of its own; later calls make and
launch just that, which takes the host less than half the time. It matters most between the kernels that Inductor
launches, where the Python of a call is not in the processor's caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import _device, _library, _tuned
from ._launch import PreparedLaunch, recording
from ._partial_sums import TICKETS, partial_sums

_aten = torch.ops.aten
_EMPTY = (_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default)


class Plan(NamedTuple):
    """What a call does. Places are those of arguments, None, and what is made, in this order.

    What is made is given by sizes, strides and dtype; tickets by None.
    """

    made: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None]
    launches: list[tuple[PreparedLaunch, list[int], tuple[float, ...]]]
    results: list[int]
    returns_tuple: bool


def run(implementation: Callable, arguments: tuple, family: str) -> Any:
    """What `implementation(*arguments)` does; settings, and what tensors look like, must decide all of it."""
    device = arguments[0].device
    plan = _plan(implementation, looks_of(arguments), device)
    if plan is None:
        return implementation(*arguments)
    empty, values = _device.empty_on(device), [*arguments, None]
    for made in plan.made:
        values.append(partial_sums(1, device)[1] if made is None else empty(*made))
    try:
        for launch, places, floats in plan.launches:
            launch(tuple([values[place] for place in places]), floats)
    except Exception as error:
        if not _tuned.give_up(family, error):
            raise
        return implementation(*arguments)
    results = tuple([values[place] for place in plan.results])
    return results if plan.returns_tuple else results[0]


def looks_of(arguments: Sequence[Any]) -> tuple:
    """Settings, and of tensors all but where they are."""
    looks = []
    for each in arguments:
        if isinstance(each, Tensor):
            looks.append((each.shape, each.stride(), each.dtype))
        else:
            looks.append(tuple(each) if type(each) is list else each)
    return tuple(looks)


class _Noted(TorchDispatchMode):
    """Notes the tensors that are made, and whether anything else is done than making them."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, Tensor] = {}
        self.tickets: set[int] = set()
        self.computes = False

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        result = function(*arguments, **(keywords or {}))
        is_tickets = function is _aten.zeros.default and result.shape == (TICKETS,)
        if is_tickets:
            self.tickets.add(_memory(result))
        if is_tickets or function in _EMPTY:
            self.made[_memory(result)] = result
        elif function is not _aten.detach.default:  # by which PyTorch ends a call that makes a tensor
            self.computes = True
        return result


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@_device.launch_rule
def _plan(implementation: Callable, looks: tuple, device: torch.device) -> Plan | None:
    """What an implementation does; None where it computes by PyTorch's operators, or launches with parts of tensors."""
    arguments = [
        torch.empty_strided(each[0], each[1], dtype=each[2], device="meta")
        if isinstance(each, tuple) and each and isinstance(each[0], torch.Size)
        else each
        for each in looks
    ]
    # The dispatch forgets its answers about such tensors when this begins and when it ends.
    planned = _device.stand_ins(_device.facts(device)), _library.implementation(_library.requested)
    with planned[0], planned[1], recording(device_type="meta") as launches, _Noted() as noted:
        results = implementation(*arguments)
    found = results if isinstance(results, tuple) else (results,)
    used = [*found, *(tensor for launch in launches for tensor in launch.tensors if tensor is not None)]
    if noted.computes or any(tensor.storage_offset() for tensor in used):  # places are those of whole tensors
        return None
    made = {memory: noted.made[memory] for memory in map(_memory, used) if memory in noted.made}
    places = {
        _memory(each): place
        for place, each in enumerate((*arguments, None, *made.values()))
        if isinstance(each, Tensor)
    }
    steps = []
    for launch in launches:
        tensors = [len(arguments) if each is None else places[_memory(each)] for each in launch.tensors]
        steps.append((launch.prepared, tensors, launch.floats))
    return Plan(
        [
            None if key in noted.tickets else (tuple(each.shape), each.stride(), each.dtype)
            for key, each in made.items()
        ],
        steps,
        [places[_memory(each)] for each in found],
        isinstance(results, tuple),
    )
