"""Operators in compiled code, whose Python runs once for arguments that look alike.

What a call makes and launches is noted, with tensors of the device "meta" in place of its own; later calls make and
launch just that, which takes the host less than half the time. It matters most between the kernels that Inductor
launches, where the Python of a call is not in the processor's caches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import _device, _library, _tuned
from ._launch import recording
from ._partial_sums import TICKETS, partial_sums

_aten = torch.ops.aten
_lock = threading.RLock()
_EMPTY = (_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default)


def run(implementation: Callable, arguments: tuple, family: str) -> Any:
    """What `implementation(*arguments)` does; settings, and what tensors look like, must decide all of it."""
    plan = _plan(implementation, looks_of(arguments), arguments[0].device)
    if plan is None:
        return implementation(*arguments)
    try:
        return plan(arguments)
    except Exception as error:
        if not _tuned.give_up(family, error):
            raise
        return implementation(*arguments)


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
        # With whether it is tickets.
        self.made: dict[int | None, tuple[Tensor, bool]] = {}
        self.computes = False

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        result = function(*arguments, **(keywords or {}))
        is_tickets = function is _aten.zeros.default and (result.shape, result.dtype) == ((TICKETS,), torch.int32)
        if is_tickets or function in _EMPTY:
            self.made[_memory(result)] = result, is_tickets
        elif function is not _aten.detach.default:  # by which PyTorch ends a call that makes a tensor
            self.computes = True
        return result


def _memory(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.untyped_storage()._cdata


@_device.launch_rule
def _plan(implementation: Callable, looks: tuple, device: torch.device) -> Callable[[tuple], Any] | None:
    """What does as an implementation; None where that computes by PyTorch's operators, or launches parts of tensors."""
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
    made = [noted.made[memory] for memory in dict.fromkeys(map(_memory, used)) if memory in noted.made]
    # Places of arguments, of None, and of what is made, in this order.
    values = enumerate((*arguments, None, *(each for each, _ in made)))
    places = {_memory(each): place for place, each in values if each is None or isinstance(each, Tensor)}
    kinds = [None if is_tickets else (tuple(each.shape), each.stride(), each.dtype) for each, is_tickets in made]
    work = [(each.prepared, [places[_memory(tensor)] for tensor in each.tensors], each.floats) for each in launches]
    returned, returns_tuple = [places[_memory(each)] for each in found], isinstance(results, tuple)

    def plan(given: tuple) -> Any:
        empty, values = _device.empty_on(device), [*given, None]
        for kind in kinds:
            values.append(partial_sums(1, device)[1] if kind is None else empty(*kind))
        for launch, taken, floats in work:
            launch(tuple([values[place] for place in taken]), floats)
        outputs = tuple([values[place] for place in returned])
        return outputs if returns_tuple else outputs[0]

    return plan
