"""Operators in compiled code, whose Python runs once for arguments that look alike.

What a call makes and launches is noted, with tensors of the device "meta" in place of its own; later calls make and
launch just that, which takes the host less than half the time. It matters most between the kernels that Inductor
launches, where the Python of a call is not in the processor's caches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import _device, _library, _tuned
from ._launch import PreparedLaunch, recording
from ._partial_sums import TICKETS, partial_sums

_aten = torch.ops.aten
_lock = threading.RLock()
_EMPTY = (_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default)


class Plan(NamedTuple):
    """What a call does. Places are those of its arguments, of None, and of what is made, in this order.

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
    """Notes the tensors that are made by their memory, and whether anything else is done than making them."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int | None, Tensor] = {}
        self.tickets: set[int | None] = set()
        self.computes = False

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        result = function(*arguments, **(keywords or {}))
        if function in _EMPTY:
            self.made[_memory(result)] = result
        elif function is _aten.zeros.default and (result.shape, result.dtype) == ((TICKETS,), torch.int32):
            self.made[_memory(result)] = result
            self.tickets.add(_memory(result))
        elif function is not _aten.detach.default:  # by which PyTorch ends a call that makes a tensor
            self.computes = True
        return result


def _memory(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.untyped_storage()._cdata


@_device.launch_rule
def _plan(implementation: Callable, looks: tuple, device: torch.device) -> Plan | None:
    """What an implementation does; None where it computes by PyTorch's operators, or launches with parts of tensors."""
    arguments = [
        torch.empty_strided(each[0], each[1], dtype=each[2], device="meta")
        if isinstance(each, tuple) and each and isinstance(each[0], torch.Size)
        else each
        for each in looks
    ]
    # Threads must not note each other's launches. The dispatch forgets its answers about such tensors when this begins
    # and when it ends.
    with (
        _lock,
        _device.stand_ins(_device.facts(device)),
        _library.implementation(_library.requested),
        recording(device_type="meta") as launches,
        _Noted() as noted,
    ):
        results = implementation(*arguments)
    found = results if isinstance(results, tuple) else (results,)
    used = [*found, *(tensor for launch in launches for tensor in launch.tensors)]
    if noted.computes or any(tensor is not None and tensor.storage_offset() for tensor in used):
        return None  # places are those of whole tensors
    made = {memory: noted.made[memory] for memory in map(_memory, used) if memory in noted.made}
    values = enumerate((*arguments, None, *made.values()))
    places = {_memory(each): place for place, each in values if each is None or isinstance(each, Tensor)}
    kinds = {memory: (tuple(each.shape), each.stride(), each.dtype) for memory, each in made.items()}
    return Plan(
        [None if memory in noted.tickets else kind for memory, kind in kinds.items()],
        [(each.prepared, [places[_memory(tensor)] for tensor in each.tensors], each.floats) for each in launches],
        [places[_memory(each)] for each in found],
        isinstance(results, tuple),
    )
