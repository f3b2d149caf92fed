"""Messages about skipped steps: printed when the overflow flag has arrived on the host, without waiting for it."""

from __future__ import annotations

import functools
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops import _recording
from ..ops._host import HostCopy
from ._amp_state import _amp_state, maybe_print
from .scaler import LossScaler

_HINT_AFTER = 4
_NAMED = 5


class NonfiniteCounts(NamedTuple):
    """Parameters, and how many elements of their gradients are infinite and NaN: int32 [parameters, 2]."""

    params: list[Tensor]
    counts: Tensor


class _Note(NamedTuple):
    """Overflow flag, scale and counters after one backward pass, on their way to the host."""

    loss_id: int
    floor: float | None
    sent: HostCopy
    params: list[Tensor]


class OverflowMessages:
    """Overflow flags of backward passes on their way to the host, and the messages that follow from them."""

    def __init__(self) -> None:
        self._pending: deque[_Note] = deque()
        self._skipped: dict[int, int] = {}
        self._skipped_at_floor: dict[int, int] = {}

    def note(self, scaler: LossScaler, loss_id: int, counted: list[NonfiniteCounts]) -> None:
        """Sends to the host what it will want to say if the gradients overflowed."""
        if not self._pending and scaler.overflow.is_cpu and not scaler._has_overflow:
            self._skipped[loss_id] = self._skipped_at_floor[loss_id] = 0
            return
        device = scaler.overflow.device
        counters = [each.counts.to(device, torch.float32).flatten() for each in counted]
        values = torch.cat((scaler.overflow.float(), scaler.scale_tensor(), *counters))
        params = [param for each in counted for param in each.params]
        send = functools.partial(self._send, values, loss_id, scaler._min_loss_scale, params)
        recording = _recording.current
        if recording is not None and recording.captures:
            recording.before.append(self.read)
            recording.after.append(send)
        else:
            send()

    def _send(self, values: Tensor, loss_id: int, floor: float | None, params: list[Tensor]) -> None:
        self._pending.append(_Note(loss_id, floor, HostCopy(values), params))
        if len(self._pending) == 1:
            self.read()

    def read(self) -> None:
        """Reports what has arrived; events of earlier steps are asked, which must not be while a graph is captured."""
        if _recording.captures():
            return
        while self._pending and self._pending[0].sent.arrived:
            self._report(self._pending.popleft())

    def clear(self) -> None:
        """Forgets everything."""
        self.__init__()  # type: ignore[misc]

    def _report(self, note: _Note) -> None:
        overflowed, scale, *counters = note.sent.values.tolist()
        if not overflowed:
            self._skipped[note.loss_id] = self._skipped_at_floor[note.loss_id] = 0
            return
        skipped = self._skipped[note.loss_id] = self._skipped.get(note.loss_id, 0) + 1
        nonfinite = _nonfinite_parameters(note.params, counters)
        maybe_print(f"Gradient overflow.  Skipping step, loss scaler {note.loss_id} reducing loss scale to {scale}")
        maybe_print(f"  {nonfinite}")
        if skipped % _HINT_AFTER == 0:
            maybe_print(
                f"  {skipped} steps in a row were skipped. A few are normal while the scale is found; if it goes on, "
                "look at the parameters named above, lower the learning rate, clip gradients, or use bfloat16 (O4, O5)"
            )
        self._give_up_at_floor(note, scale, nonfinite)

    def _give_up_at_floor(self, note: _Note, scale: float, nonfinite: str) -> None:
        if scale > (1.0 if note.floor is None else note.floor):
            self._skipped_at_floor[note.loss_id] = 0
            return
        count = self._skipped_at_floor[note.loss_id] = self._skipped_at_floor.get(note.loss_id, 0) + 1
        if count >= _amp_state.overflow_patience:
            self._skipped_at_floor[note.loss_id] = 0
            raise FloatingPointError(
                f"gradients overflowed in {count} steps in a row with loss scale {scale}, which cannot be lowered any "
                f"further: {nonfinite}. The loss or the model itself produces values that are not finite "
                "(amp.initialize(overflow_patience=...) sets how many such steps are tolerated)"
            )


def _nonfinite_parameters(params: list[Tensor], counters: list[float]) -> str:
    """Which parameters have gradients that are not finite, and how."""
    if not params:
        return "which gradients are not finite is not known: the optimizer has divided them among processes"
    found = []
    names = names_of_parameters()
    for index, param in enumerate(params):
        infinite, unknown = (int(count) for count in counters[2 * index : 2 * index + 2])
        if infinite or unknown:
            name = names.get(id(param), f"a tensor of shape {tuple(param.shape)}")
            kinds = [f"{count} {kind}" for count, kind in ((infinite, "inf"), (unknown, "nan")) if count]
            found.append(f"{name} ({', '.join(kinds)})")
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"{len(found)} of {len(params)} gradients are not finite: {', '.join(found[:_NAMED])}{more}"


def names_of_parameters() -> dict[int, str]:
    """What messages call the parameters of all models, by their id."""
    models = list(_amp_state.models)
    names: dict[int, str] = {}
    for index, model in enumerate(models):
        prefix = f"models[{index}]." if len(models) > 1 else ""
        for name, param in model.named_parameters():
            names.setdefault(id(param), prefix + name)
            if param in _amp_state.masters:
                names.setdefault(id(_amp_state.masters[param]), prefix + name)
    return names
