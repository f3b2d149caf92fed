"""Lists that were seen before, known again at a glance: loss scalers and norms get the same gradients at every step.

Nothing is held that could be freed, so every tensor is looked at every time: at its address, and, by the check that
compiled graphs make of their inputs, at its type, dtype, device, sizes and strides. Together 45 us for 160 tensors
on a slow machine, half of what it takes to find these one by one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .triton_lists import TritonLists, current_stream

# Nothing is recognised where PyTorch does not have it.
_Guards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)

Slots = Sequence[Sequence[Tensor] | None]

_MOST = 32


class _Known(NamedTuple):
    guards: Any
    lists: TritonLists
    uploads: int


_known: OrderedDict[tuple[Any, ...], _Known] = OrderedDict()


def recognise(slots: Slots) -> TritonLists | None:
    """The lists that were remembered for just these tensors, on this stream."""
    found = _known.get(_addresses(slots) or ())
    if found is None:
        return None
    guards, lists, uploads = found
    if lists.uploads != uploads or lists.stream != current_stream(lists.device) or not guards.check(*_tensors(slots)):
        return None
    return lists


def remember(slots: Slots, lists: TritonLists) -> None:
    """Lets `recognise` find `lists`, which point to these tensors."""
    key = _addresses(slots)
    if _Guards is None or key is None:
        return
    tensors = _tensors(slots)
    guards = _Guards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    )
    _known[key] = _Known(guards, lists, lists.uploads)
    _known.move_to_end(key)
    if len(_known) > _MOST:
        _known.popitem(last=False)


def _addresses(slots: Slots) -> tuple[Any, ...] | None:
    key: list[tuple[int, ...] | None] = []
    for index, tensors in enumerate(slots):
        if tensors is None:
            key.append(None)
        elif index and tensors is slots[index - 1]:  # in place
            key.append(key[-1])
        else:
            try:
                key.append(tuple(map(Tensor.data_ptr, tensors)))
            except (RuntimeError, TypeError):  # sparse tensors, or others without memory
                return None
    return tuple(key)


def _tensors(slots: Slots) -> Sequence[Tensor]:
    different: list[Sequence[Tensor]] = []
    for tensors in slots:
        if tensors is not None and not (different and tensors is different[-1]):
            different.append(tensors)
    return different[0] if len(different) == 1 else [tensor for tensors in different for tensor in tensors]
