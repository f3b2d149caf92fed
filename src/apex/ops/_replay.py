"""Replay of the launches of an operator in compiled code, so that its Python runs once per signature.

The first call with a signature runs on meta tensors and records the allocations and launches. Later calls repeat just
these, which takes the host less than half the time. This matters most between the kernels that Inductor launches, where
the Python code of an operator is not in the processor's caches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import _device, _library
from ._launch import record_launches
from ._partial_sums import TICKETS, partial_sums

_aten = torch.ops.aten
_lock = threading.RLock()
_EMPTY = (_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default)


def run(implementation: Callable, arguments: tuple) -> Any:
    """Return `implementation(*arguments)`; settings and tensor layouts must determine all that it does."""
    plan = _plan(implementation, looks_of(arguments), arguments[0].device)
    return implementation(*arguments) if plan is None else plan(arguments)


def looks_of(arguments: Sequence[Any]) -> tuple:
    """Return the call's signature: settings, and each tensor's shape, strides and dtype."""
    looks = []
    for each in arguments:
        if isinstance(each, Tensor):
            looks.append((each.shape, each.stride(), each.dtype))
        else:
            looks.append(tuple(each) if type(each) is list else each)
    return tuple(looks)


class _Noted(TorchDispatchMode):
    """Records new tensors by the address of their storage, and whether any operator does more than allocate."""

    def __init__(self) -> None:
        super().__init__()
        # The bool says whether the tensor is the tickets of `_partial_sums`.
        self.made: dict[int | None, tuple[Tensor, bool]] = {}
        self.computes = False

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        result = function(*arguments, **(keywords or {}))
        is_tickets = function is _aten.zeros.default and (result.shape, result.dtype) == ((TICKETS,), torch.int32)
        if is_tickets or function in _EMPTY:
            self.made[_memory(result)] = result, is_tickets
        elif function is not _aten.detach.default:  # PyTorch calls it at the end of an allocation
            self.computes = True
        return result


def _memory(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.untyped_storage()._cdata


@_device.launch_rule
def _plan(implementation: Callable, looks: tuple, device: torch.device) -> Callable[[tuple], Any] | None:
    """Return a function that repeats the implementation's allocations and launches.

    Return None if the implementation computes with PyTorch's operators, or launches kernels on parts of tensors.
    """
    arguments = [
        torch.empty_strided(each[0], each[1], dtype=each[2], device="meta")
        if isinstance(each, tuple) and each and isinstance(each[0], torch.Size)
        else each
        for each in looks
    ]
    # The lock keeps threads from recording each other's launches. `implementation` clears the dispatch's cached answers
    # about meta tensors on entry and on exit.
    with (
        _lock,
        _device.stand_ins(_device.facts(device)),
        _library.implementation(_library.requested),
        record_launches(device_type="meta") as launches,
        _Noted() as noted,
    ):
        results = implementation(*arguments)
    found = results if isinstance(results, tuple) else (results,)
    used = [*found, *(tensor for launch in launches for tensor in launch.tensors)]
    if noted.computes or any(tensor is not None and tensor.storage_offset() for tensor in used):
        return None  # the indices below refer to whole tensors
    made = [noted.made[memory] for memory in dict.fromkeys(map(_memory, used)) if memory in noted.made]
    # Indices of arguments, of None, and of new tensors, in this order.
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
