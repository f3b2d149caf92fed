"""`trace_overflow`: which module's numbers were the first that are not finite in a skipped step.

Hooks on a model's leaf modules, and on `nn.MultiheadAttention`, write the largest magnitude of each input, each output
and each output's gradient to a buffer on the device. The buffer goes to the host with the overflow flag of the step;
nothing waits for the device.
"""

from __future__ import annotations

import dataclasses
import math
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling
from torch.utils._pytree import tree_leaves

from ..ops._host import HOST
from ..ops._library import sees_operators_only
from ._overflow_buffer import MagnitudeBuffer
from ._overflow_buffer import Slot as _Slot

# Most records of a step: forward passes without a backward pass end no step, and would be recorded without end.
_MOST_RECORDS = 1 << 15


class Record(NamedTuple):
    """The largest magnitudes of an output of a module, or of an output's gradient, and of the module's inputs.

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


# A record whose numbers are still on the device: its call, kind and dtype, and the slots of its largest magnitude and
# of the inputs'. A plain tuple, because a named one takes ten times as long to make.
_Measured = tuple["_Call", str, torch.dtype, _Slot, Sequence[_Slot]]


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
            Record(call.module, call.layer, kind, call.number, dtype, at(largest), tuple(map(at, inputs)))
            for call, kind, dtype, largest, inputs in self.measured
        ]

    def origin(self, values: list[float]) -> str:
        """Return the sentence about the first record that is not finite; `values` are the arguments of `records`."""
        return origin_of(self.records(values), values[0])


class _Hook:
    """A hook of a traced module. Copies of the module, by copy or pickle, get a hook that does nothing."""

    __slots__ = ("trace",)

    def __init__(self, trace: OverflowTrace) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return _inactive_hook, ()


class _Call:
    """A call of a module in a step, by its number from 1: names for its records, and the hook of output gradients.

    Nodes of an autograd graph take hooks from a tensor. `holder` is an empty one that stands in for the outputs: they
    stay as they are, and neither a hook nor a handle is made for each of them.
    """

    __slots__ = ("holder", "inputs", "layer", "module", "number", "trace")

    def __init__(self, trace: OverflowTrace, module: str, layer: str, number: int) -> None:
        self.trace, self.module, self.layer, self.number = trace, module, layer, number
        self.inputs: Sequence[_Slot] = ()
        self.holder: Any = torch.empty(0, dtype=torch.float32, device=HOST, requires_grad=True)
        self.holder._backward_hooks = OrderedDict(((0, self),))

    def __call__(self, gradient: Tensor) -> None:
        """Record the gradient of an output."""
        trace = self.trace
        if not trace._is_running:
            trace._is_running = True
            torch.autograd.Variable._execution_engine.queue_callback(trace._end_pass)  # type: ignore[attr-defined]
        if len(trace._measured) < _MOST_RECORDS:
            slot = (trace._buffers.get(gradient.get_device()) or trace._new_buffer(gradient)).measure(gradient)
            if slot is not None:
                trace._measured.append((self, "backward", gradient.dtype, slot, self.inputs))


class _ForwardHook(_Hook):
    """The hook after the forward pass of one module; `count` is the number of its calls in the step."""

    __slots__ = ("calls", "count", "layer", "name")

    def __init__(self, trace: OverflowTrace, name: str, layer: str) -> None:
        self.trace, self.name, self.layer, self.count = trace, name, layer, 0
        self.calls: list[_Call] = []

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record the inputs and outputs of a module, and have the gradients of its outputs recorded."""
        trace = self.trace
        if not trace._records(module):
            return
        if self.count == len(self.calls):
            self.calls.append(_Call(trace, self.name, self.layer, self.count + 1))
        call = self.calls[self.count]
        self.count += 1
        inputs: list[_Slot] = []
        call.inputs = inputs
        known, outputs = trace._known, (output,) if isinstance(output, Tensor) else _tensors((output,))
        plain = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        for tensor in args if plain else _tensors((*args, *kwargs.values())):
            slot = trace._known_slot(tensor, outputs) or trace._new_slot(tensor)
            if slot is not None:
                inputs.append(slot)
        for tensor in outputs:
            if (entry := known.get(id(tensor))) and entry[0]() is tensor and entry[1] == _version(tensor):
                continue  # an earlier module's output, unchanged
            slot = trace._new_slot(tensor)
            if slot is None:
                continue
            trace._measured.append((call, "forward", tensor.dtype, slot, inputs))
            # The hook is the tensor's, because backward hooks of modules fail if a module works in place.
            node = tensor.grad_fn
            if node is not None and not tensor.output_nr:
                node._register_hook_dict(call.holder)
            elif tensor.requires_grad:
                handle = tensor.register_hook(call)
                if node is None:  # a parameter or an input, which outlives the step
                    trace._leaf_handles.append(handle)


class _HookBeforeOverwriting(_Hook):
    """The hook before the forward pass of a module that may overwrite its inputs."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Measure the inputs before they are overwritten."""
        if self.trace._records(module):
            for tensor in _tensors((*args, *kwargs.values())):
                if self.trace._known_slot(tensor) is None:
                    self.trace._new_slot(tensor)


class _HookBeforeModel(_Hook):
    """The hook before the forward pass of the traced model; a pass that has not ended by then raised an error."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Begin a step if the last one raised an error, in the forward or in the backward pass."""
        trace = self.trace
        if (
            trace._can_record(module) and torch._C._current_graph_task_id() == -1
        ):  # no pass that a backward pass repeats
            trace._ends_step = trace._ends_step or trace._is_running
            trace._is_running = True


class _HookAfterModel(_Hook):
    """The hook after the forward pass of the traced model."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note that the forward pass has ended."""
        self.trace._end_pass()


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
        self._hooks: list[_ForwardHook] = []
        # Hooks of parameters and inputs that modules returned: they would outlive the step.
        self._leaf_handles: list[Any] = []
        self._buffers: dict[int, MagnitudeBuffer] = {}  # by `get_device` of their tensors
        self._is_removed = False
        self._measured: list[_Measured] = []
        # Whether a forward pass of the model, or a backward pass, has begun and not ended.
        self._is_running = False
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

        for buffer in self._buffers.values():
            if buffer.device != HOST:
                torch.accelerator.synchronize(buffer.device)
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
        self._measured = [record for record in self._measured if record[1] == "forward"]
        self._ends_step = True
        if self._after_skips is not None:
            self._switch_off()
        return taken, [values for buffer in buffers for values in buffer.values()]

    def _end_pass(self) -> None:
        self._is_running = False

    def _switch_on(self) -> None:
        model = self._model()
        if model is not None and not isinstance(model, torch.jit.ScriptModule):
            self._handles.append(model.register_forward_pre_hook(_HookBeforeModel(self)))
            self._handles.append(model.register_forward_hook(_HookAfterModel(self)))
        for name, module in () if model is None else model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # takes no hooks
            # `nn.MultiheadAttention` has a child whose weight it passes to a function: it is called, its child is not.
            if next(module.children(), None) is None or isinstance(module, nn.MultiheadAttention):
                hook = _ForwardHook(self, name, module._get_name())
                self._hooks.append(hook)
                self._handles.append(module.register_forward_hook(hook, with_kwargs=True))
                if getattr(module, "inplace", False):
                    before = _HookBeforeOverwriting(self)
                    self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))

    def _switch_off(self) -> None:
        for handle in (*self._handles, *self._leaf_handles):
            handle.remove()
        self._handles.clear()
        self._hooks.clear()
        self._is_running = False
        self._leaf_handles.clear()

    def _begin(self) -> None:
        """Forget the records of the last step."""
        while self._leaf_handles:
            self._leaf_handles.pop().remove()
        self._measured = []
        self._ends_step = False
        for hook in self._hooks:
            hook.count = 0
        # By id of a tensor: a weak reference, its version, and the slot of its largest magnitude.
        self._known: dict[int, tuple[Any, int, _Slot]] = {}
        for buffer in self._buffers.values():
            buffer.used = 0

    def _can_record(self, module: nn.Module) -> bool:
        """Return whether a call of a module is a plain one that belongs to training."""
        return not (is_compiling() or sees_operators_only()) and (module.training or is_grad_enabled())

    def _records(self, module: nn.Module) -> bool:
        """Return whether a call of a module is recorded: one that can be, if there is room.

        Begin the next step if one has ended.
        """
        if not self._can_record(module):
            return False
        if self._ends_step:
            self._begin()
        return len(self._measured) < _MOST_RECORDS

    def _known_slot(self, tensor: Tensor, outputs: Sequence[Tensor] = ()) -> _Slot | None:
        """Return the slot of a measured tensor; None if it was not measured, or was written to since.

        A tensor among `outputs`, the outputs of the module that read it, keeps the slot from before the write.
        """
        known = self._known.get(id(tensor))
        if known is None or known[0]() is not tensor:
            return None
        if known[1] == _version(tensor) or any(tensor is output for output in outputs):
            return known[2]
        return None

    def _new_slot(self, tensor: Tensor) -> _Slot | None:
        """Measure a tensor that has no known slot, and return its slot; None if it cannot be measured.

        A view of all elements of a known tensor gets the slot of that tensor.
        """
        base, slot = tensor._base, None
        if base is not None and base.numel() == tensor.numel() and base.dtype == tensor.dtype:
            slot = self._known_slot(base)
        if slot is None:
            slot = (self._buffers.get(tensor.get_device()) or self._new_buffer(tensor)).measure(tensor)
        if slot is not None:
            self._known[id(tensor)] = weakref.ref(tensor), _version(tensor), slot
        return slot

    def _new_buffer(self, tensor: Tensor) -> MagnitudeBuffer:
        buffer = MagnitudeBuffer(len(self._buffers), tensor.device)
        self._buffers[tensor.get_device()] = buffer
        return buffer


def _version(tensor: Tensor) -> int:
    """Return a number that grows when a tensor is written to; 0 for inference tensors, which do not count."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def _tensors(values: Iterable[Any], seen: frozenset[int] = frozenset()) -> list[Tensor]:
    """Return the tensors at any depth of `values`: in containers, mappings, dataclasses, and what PyTorch calls trees.

    Objects whose ids are `seen` contain `values`, and are left out.
    """
    tensors = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif value is None or id(value) in seen:
            continue
        elif isinstance(value, Mapping):
            tensors += _tensors(value.values(), seen | {id(value)})
        elif dataclasses.is_dataclass(value):
            fields = (getattr(value, field.name, None) for field in dataclasses.fields(value))
            tensors += _tensors(fields, seen | {id(value)})
        else:
            leaves = tree_leaves(value)
            if len(leaves) != 1 or leaves[0] is not value:
                tensors += _tensors(leaves, seen | {id(value)})
    return tensors


def origin_of(records: list[Record], scale: float) -> str:
    """Return a sentence that names the first record that is not finite: in the forward pass, or else the backward one.

    `scale` is the loss scale that is in the gradients.
    """
    if not records:
        return "no leaf module of the traced model was called in this step (compiled models do not call their modules)"
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
