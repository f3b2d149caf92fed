"""The loss scale, kept on the device of the loss, so that a training step never waits for it.

A `LossScaler` owns the scale, the number of steps since the scale last changed, and the overflow flag of the current
backward pass. Other modules read and change them through its public methods.

A dynamic scale is halved when gradients overflow and doubled after a window of steps without overflow; its values are
equal to the original's, step for step. Reading `loss_scale()` waits for the device, using `scale_tensor()` does not.
Messages about skipped steps are printed when the overflow flag has arrived on the host.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import _graph_numbers
from ..ops._host import HOST
from ..ops.multi_tensor import axpby, scale
from ._amp_state import _amp_state, maybe_print
from ._checks import check_scaling, checked_loss_scale
from ._overflow_trace import OverflowTrace, Taken

_HINT_AFTER = 4
_NAMED = 5


class LossScaler:
    """A static or dynamic loss scale and the overflow flag of the last backward pass.

    `loss_scale` is a number or "dynamic". `scale_factor` multiplies a dynamic scale after `scale_window` steps without
    overflow; `backoff_factor` multiplies it after an overflow.
    """

    warned_no_fused_kernel = False
    warned_unscaling_non_fp32_grad = False
    has_fused_kernel = True

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
        *,
        backoff_factor: float | None = None,
    ) -> None:
        check_scaling(
            init_scale=init_scale,
            scale_factor=scale_factor,
            scale_window=scale_window,
            min_loss_scale=min_loss_scale,
            max_loss_scale=max_loss_scale,
            backoff_factor=backoff_factor,
        )
        number = checked_loss_scale("loss_scale", loss_scale)
        self.dynamic = number == "dynamic"
        start = min(max_loss_scale, init_scale) if isinstance(number, str) else number
        self._max_loss_scale = max_loss_scale
        self._min_loss_scale = min_loss_scale
        self._scale_seq_len = scale_window
        self._growth_factor = scale_factor
        self._backoff_factor = 1 / scale_factor if backoff_factor is None else backoff_factor
        # The host knows a static scale and need not read it from the device.
        self._static_scale = None if self.dynamic else start
        self._scale = torch.full((1,), start, dtype=torch.float32, device=HOST)
        self._successes = torch.zeros(1, dtype=torch.int32, device=HOST)
        self._overflow_buf = torch.zeros(1, dtype=torch.float32, device=HOST)
        self._has_moved = False
        self._in_bounds = self._bounds_hold(start)

    def _bounds_hold(self, value: float) -> bool:
        return (self._min_loss_scale or 0.0) <= value <= self._max_loss_scale

    def loss_scale(self) -> float:
        """Return the scale as a number; waits for the device if the scale is dynamic."""
        return self._scale.item() if self._static_scale is None else self._static_scale

    @property
    def _loss_scale(self) -> float:
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self._scale.fill_(value)
        self._in_bounds = self._bounds_hold(float(value))
        if not self.dynamic:
            self._static_scale = float(value)

    @property
    def _unskipped(self) -> int:
        return int(self._successes.item())

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self._successes.fill_(value)

    @property
    def _has_overflow(self) -> bool:
        return bool(self._overflow_buf.item())

    @_has_overflow.setter
    def _has_overflow(self, value: bool) -> None:
        self._overflow_buf.fill_(float(value))

    def to(self, device: torch.device) -> None:
        """Move the scale to `device`, where losses are."""
        self._has_moved = True
        if self._scale.device != device:
            self._scale, self._successes, self._overflow_buf = (
                tensor.to(device, non_blocking=device != HOST)  # a copy to the host is read at once, so it must wait
                for tensor in (self._scale, self._successes, self._overflow_buf)
            )

    def known_scale(self) -> float | None:
        """Return a static scale as a number; None while a graph is recorded, because replays may use another scale."""
        return self._static_scale if _graph_numbers.current is None else None

    def scale_tensor(self) -> Tensor:
        """Return the scale, float32 [1]."""
        return self._scale

    @contextlib.contextmanager
    def at_scale(self, scale: Tensor | None) -> Iterator[None]:
        """Scale and unscale with `scale` in the body of the context, unless it is None."""
        own, self._scale = self._scale, self._scale if scale is None else scale
        try:
            yield
        finally:
            self._scale = own

    @torch._disable_dynamo  # a compiled training step would make a graph of one multiplication
    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss in float32, times the scale."""
        return loss.float() if self.known_scale() == 1.0 else loss.float() * self._scale.reshape(())

    @property
    def is_always_one(self) -> bool:
        """Return whether the scale is static and 1, so that gradients need neither unscaling nor a check."""
        return self._static_scale == 1.0

    @property
    def found_inf(self) -> Tensor:
        """Return the overflow flag: float32 [1], not 0 if gradients since `clear_overflow_state` were not finite."""
        return self._overflow_buf

    @property
    def min_loss_scale(self) -> float | None:
        """Return the smallest value that a dynamic scale may take, or None."""
        return self._min_loss_scale

    @property
    def updates_on_device(self) -> bool:
        """Return whether `update_scale_on_device` is all that `update_scale` does: no subclass has replaced it."""
        return type(self).update_scale is _ORIGINAL_UPDATE

    def clear_overflow_state(self) -> None:
        """Reset the overflow flag, in new memory, because a queued step may still have to read the old flag."""
        self._overflow_buf = torch.zeros_like(self._scale)

    def update_scale_on_device(self) -> None:
        """Adapt a dynamic scale to the overflow flag."""
        if not self.dynamic:
            self._successes += 1
            return
        found_inf = self._overflow_buf.to(self._scale)  # clients replace it with flags of other dtypes
        torch._amp_update_scale_(
            self._scale, self._successes, found_inf, self._growth_factor, self._backoff_factor, self._scale_seq_len
        )
        if self._in_bounds:
            self._scale.clamp_(min=self._min_loss_scale or None, max=self._max_loss_scale)
        else:
            self._bound_changed(found_inf)

    def _bound_changed(self, found_inf: Tensor) -> None:
        """Bound a scale that was set by hand beyond its bounds: the floor applies if lowered, the ceiling if raised."""
        lowered = self._scale.clamp(min=self._min_loss_scale or None, max=torch.inf)
        raised = self._scale.clamp(max=self._max_loss_scale)
        grown = (found_inf == 0) & (self._successes == 0)
        self._scale.copy_(torch.where(found_inf != 0, lowered, torch.where(grown, raised, self._scale)))

    def update_scale(self) -> bool:
        """Adapt a dynamic scale to the overflow flag; return whether to skip the step, which waits for the device."""
        self.update_scale_on_device()
        return self.dynamic and self._has_overflow

    def unscale(
        self,
        model_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        unused_scale: float | None = None,
        models_are_masters: bool = False,
        scale_override: Any = None,
        *,
        nonfinite_counts: Tensor | None = None,
    ) -> None:
        """Compute `master_grads[i] = model_grads[i] / scale` and note overflow.

        `nonfinite_counts`, int32 [gradients, 2], counts infinite and NaN elements.
        """
        del unused_scale
        override = scale_override[0] if isinstance(scale_override, tuple) else scale_override
        if override is None and models_are_masters and self.is_always_one:
            return
        flag = self._found_inf_on(model_grads)
        scale(
            model_grads,
            master_grads,
            self._inverse(override),
            overflow=flag,
            nonfinite_counts=None if flag is None else nonfinite_counts,
        )
        self.add_found_inf(flag)

    def unscale_with_stashed(
        self,
        model_grads: Sequence[Tensor],
        stashed_master_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        scale_override: Any = None,
        *,
        nonfinite_counts: Tensor | None = None,
        checks_sum: bool = False,
    ) -> None:
        """Compute `master_grads[i] = model_grads[i] / scale + stashed_master_grads[i]`; note overflow of `model_grads`.

        `scale_override` holds the scales of all three, numbers or tensors. With `checks_sum`, for gradients that stay
        in half precision, a sum too large for their dtype is an overflow too.
        """
        grads_scale, stashed_scale, out_scale = (None, 1.0, 1.0) if scale_override is None else scale_override
        flag = self._found_inf_on(model_grads)
        stashed_factor = out_scale / stashed_scale
        factor = self._inverse(grads_scale) * out_scale
        axpby(
            model_grads,
            stashed_master_grads,
            master_grads,
            factor,
            stashed_factor,
            overflow=flag,
            nonfinite_counts=None if flag is None else nonfinite_counts,
            checks="x",
            checks_sum=checks_sum,
        )
        self.add_found_inf(flag)

    def unscale_python(self, model_grads: Sequence[Tensor], master_grads: Sequence[Tensor], scale: float) -> None:
        """Unscale with the given scale; the original's variant without kernels, here equal to `unscale`."""
        self.unscale(model_grads, master_grads, scale_override=scale)

    def unscale_with_stashed_python(
        self,
        model_grads: Sequence[Tensor],
        stashed_master_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        a: float,
        b: float,
    ) -> None:
        """Set `master_grads[i] = a * model_grads[i] + b * stashed_master_grads[i]`; note overflow of `model_grads`."""
        flag = self._found_inf_on(model_grads)
        axpby(model_grads, stashed_master_grads, master_grads, a, b, overflow=flag, checks="x")
        self.add_found_inf(flag)

    def _inverse(self, override: Any) -> float | Tensor:
        """Return 1 / scale, float32 [1], rounded once, like a division of doubles that is rounded to float32.

        Returns 1.0 if the host knows that the scale is 1.
        """
        if override is None:
            if self.known_scale() == 1.0:
                return 1.0
            override = self._scale
        elif not isinstance(override, Tensor):
            override = torch.full_like(self._scale, float(override))
        return override.to(self._scale).reciprocal().reshape(1)

    def _found_inf_on(self, grads: Sequence[Tensor]) -> Tensor | None:
        """Return the flag, on the gradients' device, that a pass over them sets; None for a static scale."""
        device = grads[0].device if grads else self._scale.device
        if not self._has_moved:
            self.to(device)
        if not self.dynamic:
            return None
        flag = self._overflow_buf
        return flag if flag.device == device else torch.zeros_like(flag, device=device)

    def add_found_inf(self, flag: Tensor | None) -> None:
        """Set the overflow flag if `flag`, which may be on another device, is set."""
        if flag is not None and flag is not self._overflow_buf:
            self._overflow_buf = torch.maximum(self._overflow_buf, flag.to(self._overflow_buf))


# Clients replace the method, to ask other processes for instance.
_ORIGINAL_UPDATE = LossScaler.update_scale


class NonfiniteCounts(NamedTuple):
    """Parameters, and the number of infinite and of NaN elements in their gradients: int32 [parameters, 2]."""

    params: list[Tensor]
    counts: Tensor


class _Report(NamedTuple):
    """Overflow flag, scale, counters and traced numbers after one backward pass, being copied to the host."""

    loss_id: int
    floor: float | None
    params: list[Tensor]
    traced: list[Taken]
    values: Tensor
    arrived: Callable[[], bool]


def _copy_to_host(tensor: Tensor) -> tuple[Tensor, Callable[[], bool]]:
    """Return a copy in host memory, and a function that tells, without waiting, whether the copy is complete."""
    if tensor.is_cpu:
        return tensor, lambda: True
    values = tensor.to(HOST, non_blocking=True)
    event = torch.Event(tensor.device)
    event.record(torch.accelerator.current_stream(tensor.device))
    return values, event.query


class OverflowMessages:
    """Overflow flags of backward passes that are being copied to the host, and the resulting messages.

    - `names`: returns the names of parameters in messages, by their id;
    - `patience`: returns how many skipped steps in a row, with the scale at its floor, are tolerated;
    - `setting`, `bfloat16` and `tracing`: how users change the patience, train in bfloat16, and trace overflows.
    """

    def __init__(
        self,
        names: Callable[[], dict[int, str]],
        patience: Callable[[], int],
        setting: str,
        bfloat16: str,
        tracing: str,
    ) -> None:
        self._names, self._patience, self._setting, self._bfloat16 = names, patience, setting, bfloat16
        self._tracing = tracing
        self._traces: list[OverflowTrace] = []
        self.clear()

    def clear(self) -> None:
        """Forget all flags and counts, and end all traces."""
        for trace in self._traces:
            trace.remove()
        self._traces.clear()
        self._pending: deque[_Report] = deque()
        # By loss: number of steps skipped in a row, and how many of them with the scale at its floor.
        self._skipped: dict[int, tuple[int, int]] = {}

    def trace(self, model: torch.nn.Module, after_skips: int | None) -> OverflowTrace:
        """Return a new trace of a model, whose records become part of the messages."""
        self._traces.append(OverflowTrace(model, after_skips, self.read))
        return self._traces[-1]

    def scale_before(self, scale: Tensor) -> Tensor | None:
        """Return a copy of the scale before it is adapted, for `note`; None if no trace needs it."""
        return scale.detach().clone() if self._traces else None

    def note(
        self,
        found_inf: Tensor,
        scale: Tensor,
        floor: float | None,
        loss_id: int,
        counted: list[NonfiniteCounts],
        scale_before: Tensor | None = None,
    ) -> None:
        """Send a step's overflow flag to the host, with the data for a message in case the flag is set.

        `scale` is the loss scale after the step, float32 [1], and `floor` its smallest possible value. `scale_before`
        is the loss scale that is in the gradients, if there are traces.
        """
        self._traces = [trace for trace in self._traces if trace.is_alive]
        if not self._pending and not self._traces and found_inf.is_cpu and not found_inf.item():
            self._skipped[loss_id] = 0, 0
            return
        counters = [counts.to(found_inf.device, torch.float32).flatten() for _, counts in counted]
        traced = []
        for trace in self._traces:
            if (part := trace.take()) is not None:
                traced.append(part[0])
                counters += [(scale if scale_before is None else scale_before).reshape(1), *part[1]]
        counters = [each.to(found_inf.device, non_blocking=found_inf.device != HOST) for each in counters]
        values = torch.cat((found_inf.float().reshape(1), scale.to(found_inf.device).reshape(1), *counters))
        params = [param for params, _ in counted for param in params]
        send = functools.partial(self._send, values, loss_id, floor, params, traced)
        capture = _graph_numbers.current
        if capture is not None and capture.captures:
            capture.after += [send, self.read]
        else:
            send()

    def _send(
        self, values: Tensor, loss_id: int, floor: float | None, params: list[Tensor], traced: list[Taken]
    ) -> None:
        self._pending.append(_Report(loss_id, floor, params, traced, *_copy_to_host(values)))
        if len(self._pending) == 1:
            self.read()

    def read(self) -> None:
        """Report the flags that have arrived; do nothing during graph capture, which forbids querying events."""
        if _graph_numbers.current is not None and _graph_numbers.current.captures:
            return
        while self._pending and self._pending[0].arrived():
            self._report(self._pending.popleft())

    def _report(self, report: _Report) -> None:
        overflowed, scale, *counters = report.values.tolist()
        first = 2 * len(report.params)
        for taken in report.traced:
            taken.trace.last = taken, counters[first : first + taken.size]
            first += taken.size
        if not overflowed:
            self._skipped[report.loss_id] = 0, 0
            return
        skipped, at_floor = self._skipped.get(report.loss_id, (0, 0))
        floor = 1.0 if report.floor is None else report.floor
        skipped, at_floor = skipped + 1, at_floor + 1 if scale <= floor else 0
        gives_up = at_floor >= self._patience()
        self._skipped[report.loss_id] = skipped, 0 if gives_up else at_floor
        nonfinite = _nonfinite_parameters(report.params, counters, self._names())
        origins = [taken.origin(taken.trace.last[1]) for taken in report.traced if taken.trace.last is not None]
        maybe_print(f"Gradient overflow.  Skipping step, loss scaler {report.loss_id} reducing loss scale to {scale}")
        for line in (nonfinite, *origins):
            maybe_print(f"  {line}")
        for trace in self._traces:
            trace.skipped(skipped)
        if skipped % _HINT_AFTER == 0:
            maybe_print(
                f"  {skipped} steps in a row were skipped. A few are normal while the scale is found; if it goes on, "
                f"look at the parameters named above, let {self._tracing} name the module, lower the learning rate, "
                f"clip gradients, or use {self._bfloat16}"
            )
        if gives_up:
            raise FloatingPointError(
                f"gradients overflowed in {at_floor} steps in a row with loss scale {scale}, which cannot be lowered "
                f"any further: {'; '.join((nonfinite, *origins))}. The loss or the model itself produces values that "
                f"are not finite ({self._setting} sets how many such steps are tolerated)"
            )


def _nonfinite_parameters(params: list[Tensor], counters: list[float], names: dict[int, str]) -> str:
    """Return a sentence that names the parameters whose gradients are not finite, with the counts of inf and nan."""
    if not params:
        return "which gradients are not finite is not known: the optimizer has divided them among processes"
    descriptions = []
    for index, param in enumerate(params):
        infinite, unknown = (int(count) for count in counters[2 * index : 2 * index + 2])
        if infinite or unknown:
            name = names.get(id(param), f"a tensor of shape {tuple(param.shape)}")
            kinds = [f"{count} {kind}" for count, kind in ((infinite, "inf"), (unknown, "nan")) if count]
            descriptions.append(f"{name} ({', '.join(kinds)})")
    if not descriptions:
        return f"all {len(params)} gradients of this process are finite: the overflow was in another process"
    more = f" and {len(descriptions) - _NAMED} more" if len(descriptions) > _NAMED else ""
    return f"{len(descriptions)} of {len(params)} gradients are not finite: {', '.join(descriptions[:_NAMED])}{more}"


def names_of_parameters() -> dict[int, str]:
    """Return the names of the parameters of all models, by their id, for messages."""
    models = list(_amp_state.models)
    names: dict[int, str] = {}
    for index, model in enumerate(models):
        prefix = f"models[{index}]." if len(models) > 1 else ""
        for name, param in model.named_parameters():
            names.setdefault(id(param), prefix + name)
            if param in _amp_state.masters:
                names.setdefault(id(_amp_state.masters[param]), prefix + name)
    return names


# The messages of amp's global session.
_overflow_messages = OverflowMessages(
    names_of_parameters,
    lambda: _amp_state.overflow_patience,
    setting="amp.initialize(overflow_patience=...)",
    bfloat16="bfloat16 (O4, O5)",
    tracing="amp.trace_overflow(model)",
)
