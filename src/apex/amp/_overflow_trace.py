"""`trace_overflow`: which module's numbers were the first that are not finite in a skipped step.

Hooks on a model's leaf modules write the largest magnitude of each input, each output and each output's gradient to
a buffer on the device. A NaN or an infinity makes the magnitude NaN or infinite, so one number is both a flag and a
value for the message. The buffer goes to the host with the overflow flag of the step; nothing waits for the device.
"""

from __future__ import annotations

import math
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..ops._host import HOST
from ..ops._library import autocast_off

# Numbers that one allocation holds. A step of a GPT with 12 layers needs about 250.
_CHUNK = 512
# Most records of a step. Forward passes that no backward pass follows, which end no step, stop being recorded there.
_MOST_RECORDS = 1 << 15

_Slot = tuple[int, int]  # number of the device, and index in its buffer


class Record(NamedTuple):
    """An output of a module, or the gradient of an output: its largest magnitude, and those of the module's inputs.

    `kind` is "forward" or "backward". `call` counts the calls of a module in a step, from 1.
    """

    module: str
    layer: str
    kind: str
    call: int
    dtype: torch.dtype
    largest: float
    inputs: tuple[float, ...]

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.largest)

    def __str__(self) -> str:
        call = f", call {self.call}" if self.call > 1 else ""
        return f"{self.module or '(model)'} ({self.layer}{call})"


class _Measured(NamedTuple):
    """A record whose numbers are still on the device."""

    module: str
    layer: str
    kind: str
    call: int
    dtype: torch.dtype
    largest: _Slot
    inputs: tuple[_Slot, ...]


class Taken(NamedTuple):
    """The records of one step, and how many numbers each device has for them."""

    trace: OverflowTrace
    measured: list[_Measured]
    counts: list[int]

    @property
    def size(self) -> int:
        """Return the number of values that `read` expects."""
        return 1 + sum(self.counts)

    def records(self, values: list[float]) -> list[Record]:
        """Return the records with their values: `values` are the numbers of each device, after the loss scale."""
        starts = [1 + sum(self.counts[:index]) for index in range(len(self.counts))]

        def at(slot: _Slot) -> float:
            return values[starts[slot[0]] + slot[1]]

        return [
            Record(*each[:5], largest=at(each.largest), inputs=tuple(map(at, each.inputs))) for each in self.measured
        ]

    def origin(self, values: list[float]) -> str:
        """Return the sentence about the first record that is not finite; `values` are those of `records`."""
        return origin_of(self.records(values), values[0])


class _Buffer:
    """float32 numbers on a device, used from the start in every step; `number` is its index among the buffers."""

    def __init__(self, number: int, device: torch.device) -> None:
        self.number, self.device, self.used = number, device, 0
        self._chunks: list[Tensor] = []
        self._places: list[Tensor] = []

    def next(self) -> Tensor:
        """Return the memory of the next number, a float32 scalar."""
        if self.used == len(self._places):
            self._chunks.append(torch.zeros(_CHUNK, dtype=torch.float32, device=self.device))
            self._places += self._chunks[-1].unbind()
        self.used += 1
        return self._places[self.used - 1]

    def values(self) -> list[Tensor]:
        """Return the numbers of this step as a list of vectors."""
        filled = enumerate(self._chunks[: -(-self.used // _CHUNK)])
        return [chunk[: self.used - index * _CHUNK] for index, chunk in filled]


class _ForwardHook:
    """The forward hook of one module. A copy of the module, by copy or pickle, gets a hook that does nothing."""

    __slots__ = ("layer", "name", "trace")

    def __init__(self, trace: OverflowTrace, name: str, layer: str) -> None:
        self.trace, self.name, self.layer = trace, name, layer

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return
        if module.training or torch.is_grad_enabled():
            self.trace._after_forward(self, (*args, *kwargs.values()), output)

    def __reduce__(self) -> Any:
        return _inactive_hook, ()


def _ignore(*_: Any) -> None:
    """Do nothing, in place of a hook."""


def _inactive_hook() -> Callable[..., None]:
    return _ignore


class OverflowTrace:
    """A trace of a model's largest magnitudes, made by `amp.trace_overflow`; also a context manager that removes it.

    It records every step or, with `after_skips`, one step each time so many steps in a row were skipped.
    """

    def __init__(self, model: nn.Module, after_skips: int | None, update: Callable[[], None]) -> None:
        self._model = weakref.ref(model)
        self._after_skips, self._update = after_skips, update
        # The last step that has arrived on the host, and its values.
        self.last: tuple[Taken, list[float]] | None = None
        self._handles: list[Any] = []
        self._buffers: dict[torch.device, _Buffer] = {}
        self._is_removed = False
        self._measured: list[_Measured] = []
        self._begin()
        if after_skips is None:
            self._switch_on()

    @property
    def is_on(self) -> bool:
        """Return whether steps are recorded now."""
        return bool(self._handles)

    @property
    def is_alive(self) -> bool:
        """Return whether the model exists and the trace has not been removed."""
        return not self._is_removed and self._model() is not None

    @property
    def records(self) -> list[Record]:
        """Return the records of the last step whose numbers have arrived on the host, in the order of execution."""
        return [] if self.last is None else self.last[0].records(self.last[1])

    @property
    def loss_scale(self) -> float:
        """Return the loss scale in the gradients of `records`."""
        return 1.0 if self.last is None else self.last[1][0]

    def remove(self) -> None:
        """End the trace and remove its hooks from the model."""
        self._switch_off()
        self._is_removed = True

    def __enter__(self) -> OverflowTrace:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()

    def skipped(self, count: int) -> None:
        """Switch the trace on for a step if the number of steps skipped in a row asks for it."""
        if self._after_skips is not None and self.is_alive and not self.is_on and count % self._after_skips == 0:
            self._switch_on()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the last step's records to an HDF5 file, which `apex compare` reads; waits for the device.

        Gradients are stored with the loss scale in them, as in a dump of apex.dump, and `apex compare` divides by it.
        """
        from ..dump import HDF5FileOperation

        for device in self._buffers:
            if device != HOST:
                torch.accelerator.synchronize(device)
        self._update()
        records = self.records
        if not records:
            raise RuntimeError("no step has been recorded: run one, with a scaled loss, before save()")
        file = HDF5FileOperation(os.fspath(path))
        for number, record in enumerate(records):
            scale = self.loss_scale if record.kind == "backward" else 1.0
            attributes = {"module": record.module, "kind": record.kind, "loss_scale": scale}
            group = f"{number:04d}_{record.layer}"
            name = "largest_output" if record.kind == "forward" else "largest_grad"
            value = torch.tensor(record.largest, dtype=record.dtype, device=HOST)  # one of its elements, so exact
            file.write_data(group, name, value, attributes)

    def take(self) -> tuple[Taken, list[Tensor]] | None:
        """Return the records since the step began, and their numbers on the device; the next forward pass begins one.

        Gradients are returned once, because every loss of a step has gradients of its own; outputs belong to all.
        Return None while the trace is off, and if it was switched on after the forward pass.
        """
        if not self.is_on or (self._after_skips is not None and not self._measured):
            return None
        buffers = list(self._buffers.values())
        taken = Taken(self, self._measured, [buffer.used for buffer in buffers])
        self._measured = [each for each in self._measured if each.kind == "forward"]
        self._ends_step = True
        if self._after_skips is not None:
            self._switch_off()
        return taken, [values for buffer in buffers for values in buffer.values()]

    def _switch_on(self) -> None:
        model = self._model()
        for name, module in () if model is None else model.named_modules():
            if next(module.children(), None) is None:
                hook = _ForwardHook(self, name, module._get_name())
                self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def _switch_off(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begin(self) -> None:
        """Forget the records of the last step."""
        self._measured = []
        self._ends_step = False
        self._calls: Counter[str] = Counter()
        # By id of a tensor: a weak reference, its version, and the place of its largest magnitude.
        self._known: dict[int, tuple[Any, int, _Slot]] = {}
        for buffer in self._buffers.values():
            buffer.used = 0

    def _after_forward(self, hook: _ForwardHook, inputs: tuple[Any, ...], output: Any) -> None:
        """Record the inputs and outputs of a module, and have the gradients of its outputs recorded."""
        if self._ends_step:
            self._begin()
        if len(self._measured) >= _MOST_RECORDS:
            return
        self._calls[hook.name] += 1
        call = self._calls[hook.name]
        outputs = _floats((output,))
        places = tuple(self._place(tensor, any(tensor is each for each in outputs)) for tensor in _floats(inputs))
        for tensor in outputs:
            known = self._known.get(id(tensor))
            if known is not None and known[0]() is tensor and known[1] == _version(tensor):
                continue  # an earlier module's output, unchanged
            record = _Measured(hook.name, hook.layer, "forward", call, tensor.dtype, self._measure(tensor), places)
            self._measured.append(record)
            self._known[id(tensor)] = weakref.ref(tensor), _version(tensor), record.largest
            if tensor.requires_grad:
                # On the tensor, because backward hooks of modules fail if a module works in place.
                tensor.register_hook(_GradientHook(self, record))

    def _place(self, tensor: Tensor, is_overwritten: bool) -> _Slot:
        """Return the place of an input's largest magnitude, which is measured unless a module's output is it.

        If the module has overwritten its input, the value from before is the input's.
        """
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and (is_overwritten or known[1] == _version(tensor)):
            return known[2]
        place = self._measure(tensor)
        self._known[id(tensor)] = weakref.ref(tensor), _version(tensor), place
        return place

    def _measure(self, tensor: Tensor) -> _Slot:
        """Write the largest magnitude of a tensor to its device's buffer and return its place."""
        if type(tensor) is not Tensor:
            tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor's maximum would communicate
        local = tensor.detach()
        buffer = self._buffers.get(local.device)
        if buffer is None:
            buffer = self._buffers[local.device] = _Buffer(len(self._buffers), local.device)
        place = buffer.next()
        with autocast_off(local):
            if local.dtype == torch.float64:
                largest = torch.linalg.vector_norm(local, math.inf)
                most = torch.finfo(torch.float32).max
                place.copy_(torch.where(largest.isinf(), largest, largest.clamp(max=most)))
            else:
                torch.linalg.vector_norm(local, math.inf, dtype=torch.float32, out=place)
        return buffer.number, buffer.used - 1


class _GradientHook:
    """The hook of an output tensor, which records its gradient."""

    __slots__ = ("record", "trace")

    def __init__(self, trace: OverflowTrace, record: _Measured) -> None:
        self.trace, self.record = trace, record

    def __call__(self, gradient: Tensor) -> None:
        trace = self.trace
        if len(trace._measured) < _MOST_RECORDS and _floats((gradient,)):
            place = trace._measure(gradient)
            trace._measured.append(self.record._replace(kind="backward", dtype=gradient.dtype, largest=place))


def _version(tensor: Tensor) -> int:
    """Return a number that grows when a tensor is written to; 0 for inference tensors, which do not count."""
    return 0 if tensor.is_inference() else tensor._version


def _floats(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors, at any depth of `values`, whose largest magnitude can be measured."""
    found = []
    for value in values:
        for leaf in (value,) if isinstance(value, Tensor) else tree_leaves(value):
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.layout != torch.strided:
                continue
            if leaf.dtype.itemsize > 1 and not leaf.is_nested and leaf.numel():
                found.append(leaf)
    return found


def origin_of(records: list[Record], scale: float) -> str:
    """Return a sentence that names the first record that is not finite: in the forward pass, or else the backward one.

    `scale` is the loss scale that is in the gradients.
    """
    if not records:
        return "no module of the traced model was called in this step (compiled models do not call their modules)"
    passes = {kind: [record for record in records if record.kind == kind] for kind in ("forward", "backward")}
    for kind, run in passes.items():
        index = next((index for index, record in enumerate(run) if not record.is_finite), None)
        if index is None:
            continue
        first, before = run[index], run[index - 1] if index else None
        inputs = f"largest magnitude of its inputs: {', '.join(f'{value:.4g}' for value in first.inputs) or 'none'}"
        if kind == "forward":
            late = not all(map(math.isfinite, first.inputs))
            earlier = f", after {before}" if before else ""
            hint = f"; they were computed outside of leaf modules{earlier}" if late else ""
            return f"first in the forward pass: the output of {first} is {first.largest}; {inputs}{hint}"
        earlier = f"; the gradient before it, of {before}, had at most {before.largest:.4g}" if before else ""
        return (
            f"all outputs are finite; first in the backward pass: the gradient of the output of {first} is "
            f"{first.largest}, with loss scale {scale:g}{earlier}; {inputs}"
        )
    most = max(passes["backward"], key=lambda record: record.largest, default=None)
    largest = "" if most is None else f" (at most {most.largest:.4g}, of {most}, with loss scale {scale:g})"
    return (
        f"all outputs of modules and their gradients{largest} are finite: the gradient of a parameter overflowed, or "
        "something outside of the model"
    )
