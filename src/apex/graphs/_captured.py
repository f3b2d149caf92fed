"""One graph: a function captured for inputs of one kind, and what a replay has to do around it."""

from __future__ import annotations

import contextlib
import copy
import functools
import reprlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree

from ..ops import _recording
from ..ops._recording import Guard, Recording, is_number
from ._references import MODES, References
from ._state import Snapshot, State, hyperparameters, parameters, version_of

# What objects may have beside tensors to be taken for batches, which are copied with other tensors.
_PLAIN = bool | int | float | str | None | torch.dtype | torch.device


class Inputs:
    """The arguments of a call, or a part of them: tensors, and everything else."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._leaves, self._structure = _pytree.tree_flatten(value)
        self._leaves = [Record(leaf) if _is_record(leaf) else leaf for leaf in self._leaves]

    @property
    def leaves(self) -> list[Any]:
        """Everything that has no parts, in order."""
        return [each for leaf in self._leaves for each in (leaf.leaves if isinstance(leaf, Inputs) else (leaf,))]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among them."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What a graph is captured for: shapes and layouts of tensors, and everything else itself."""
        return (repr(self._structure), *map(_kind, self._leaves))  # PyTorch 2.6 does not hash structures

    def with_tensors(self, tensors: Iterator[Tensor]) -> Any:
        """The arguments with other tensors."""
        leaves = []
        for leaf in self._leaves:
            if isinstance(leaf, Inputs):
                leaf = leaf.with_tensors(tensors)
            leaves.append(next(tensors) if isinstance(leaf, Tensor) else leaf)
        return _pytree.tree_unflatten(leaves, self._structure)


class Record(Inputs):
    """An object with tensors in its attributes, such as a batch that is a dataclass."""

    def __init__(self, record: Any) -> None:
        super().__init__(vars(record))
        self.record = record

    def with_tensors(self, tensors: Iterator[Tensor]) -> Any:
        """A copy of the object."""
        copied = copy.copy(self.record)
        vars(copied).update(super().with_tensors(tensors))
        return copied


def _is_record(leaf: Any) -> bool:
    if isinstance(leaf, Tensor | nn.Module | torch.optim.Optimizer) or not hasattr(leaf, "__dict__"):
        return False
    parts = _pytree.tree_leaves(vars(leaf))
    has_tensors = any(isinstance(part, Tensor) for part in parts)
    return has_tensors and all(isinstance(part, Tensor | _PLAIN) for part in parts)


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Record):
        return type(leaf.record), leaf.kind
    if not isinstance(leaf, Tensor):
        return type(leaf), leaf
    strides = leaf.stride() if leaf.layout == torch.strided else leaf.layout
    return leaf.shape, strides, leaf.dtype, leaf.device, leaf.requires_grad


@contextlib.contextmanager
def watched(optimizers: dict[int, Any]) -> Iterator[None]:
    """Notes optimizers that are stepped inside, and that their steps read gradients."""

    def note(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if _recording.captures() and id(optimizer) not in optimizers:
            raise NotImplementedError("an optimizer is stepped that was not in the calls before")
        optimizers.setdefault(id(optimizer), optimizer)
        _recording.reads(param.grad for group in optimizer.param_groups for param in group["params"])

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()


class Graph:
    """A captured function. Making one captures it and replays it once: together that is one call."""

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Inputs,
        optimizers: dict[int, Any],
        references: References,
        backend: Any,
        device: torch.device,
    ) -> None:
        self._recording = recording = Recording(True, device)
        known = list(optimizers.values())
        expected = references.guards()
        before = Snapshot(known, references.places(), references.scalers)
        # Tensors of the host come as tensors of the device: a copy to it that the function makes is nothing then.
        self._inputs = [_static(tensor, device) for tensor in inputs.tensors]
        versions = list(map(version_of, self._inputs))
        args, kwargs = inputs.with_tensors(iter(self._inputs))

        def run() -> Any:
            with _tensor_rates(known, recording), watched(optimizers), _recording.active(recording):
                return function(*args, **kwargs)

        try:
            torch.clear_autocast_cache()  # weights that were cast before, in memory that is not the graph's
            self._replay, outputs = backend.capture(run, device)
            params = {id(param): param for param in (*parameters(known), *references.parameters())}
            self.state = State(before, list(params.values()), recording)
            changed = next((guard.name for guard in expected if guard.name != MODES and not guard.holds()), None)
            if changed is not None:
                raise NotImplementedError(f"every call changes {changed}, which a graph cannot do")
            if before.draws_on_host():
                raise NotImplementedError(
                    "random numbers are drawn on the host, which a graph would freeze; draw them on the device"
                )
        except BaseException:
            before.restore()
            raise
        finally:
            torch.clear_autocast_cache()
        self._guards = (
            expected + recording.guards + _frozen_numbers(known, recording) + _trained(known, self.state.params)
        )
        # Inputs that the function writes to, by their places.
        self._written = [place for place, each in enumerate(self._inputs) if version_of(each) != versions[place]]
        self._leaves, self._structure = _pytree.tree_flatten(outputs)
        self._leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        self._run(inputs, first=True)

    def differs(self) -> str | None:
        """What keeps it from being replayed now; None if nothing does."""
        for guard in self._guards:
            if not guard.holds():
                return f"{guard.name} (was {reprlib.repr(guard.expected)})"
        return self.state.differs()

    def __call__(self, inputs: Inputs) -> Any:
        """The function's call with other inputs of the same kind; to be called where nothing `differs`."""
        for action in self._recording.before:
            action()
        self.state.bring()
        with torch.no_grad():
            for static, tensor in zip(self._inputs, inputs.tensors, strict=True):
                static.copy_(tensor, non_blocking=True)
        self._run(inputs, first=False)
        self._recording.count_steps()
        self.state.leave()
        return self.outputs()

    def outputs(self) -> Any:
        """What the function returned: tensors in memory that the next replay writes to."""
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        return _pytree.tree_unflatten(leaves, self._structure)

    def _run(self, inputs: Inputs, first: bool) -> None:
        self._recording.upload(first)
        self._replay()
        for place in self._written:
            static, tensor = self._inputs[place], inputs.tensors[place]
            if tensor.device == static.device:
                tensor.copy_(static)
        for action in self._recording.after:
            action()


def _static(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, laid out like the tensor where that has no gaps and no element twice."""
    if tensor.layout != torch.strided:
        raise NotImplementedError(f"an input is sparse ({tensor.layout})")
    if tensor.requires_grad:
        raise NotImplementedError("an input requires gradients, which would stop at the graph's copy of it")
    return tensor.detach().to(device, copy=True, memory_format=torch.preserve_format)


@contextlib.contextmanager
def _tensor_rates(optimizers: Sequence[Any], recording: Recording) -> Iterator[None]:
    """Gives PyTorch's optimizers learning rates on the device while they are captured, where they take such."""
    replaced = []
    try:
        for optimizer in (each for each in optimizers if type(each).__module__.startswith("torch.optim")):
            for index, group in enumerate(optimizer.param_groups):
                takes_tensor = group.get("capturable") or group.get("fused")
                if takes_tensor and group["params"] and is_number(group.get("lr")):
                    rate = recording.entry(optimizer, index, "lr", group["lr"])
                    replaced.append((group, group["lr"]))
                    group["lr"] = rate.on(group["params"][0].device).float()
        yield
    finally:
        for group, rate in replaced:
            group["lr"] = rate


def _trained(optimizers: Sequence[Any], params: list[Tensor]) -> list[Guard]:
    """Which parameters are trained."""
    groups = lambda: [len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups]  # noqa: E731
    flags = lambda: [param.requires_grad for param in params]  # noqa: E731
    return [
        Guard("the number of parameters in groups", groups, groups()),
        Guard("which parameters require gradients", flags, flags()),
    ]


def _frozen_numbers(optimizers: Sequence[Any], recording: Recording) -> list[Guard]:
    """Hyperparameters that a graph has frozen."""
    followed = {number.name for number in recording.numbers}
    frozen = [guard for guard in hyperparameters(optimizers, recording.reads_numbers) if guard.name not in followed]
    for optimizer in optimizers:
        for name, value in optimizer.defaults.items() if id(optimizer) in recording.reads_numbers else ():
            read = functools.partial(optimizer.defaults.get, name)
            frozen.append(Guard(f"{type(optimizer).__name__}.defaults[{name!r}]", read, value))
    return frozen
