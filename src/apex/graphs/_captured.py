"""One graph: a function captured for inputs of one kind, and what a replay has to do around it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree

from ..ops import _recording
from ..ops._recording import Guard, Recording, is_number
from ._references import References
from ._state import Snapshot, State, hyperparameters


class Inputs:
    """The arguments of a call: tensors, and everything else."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.leaves, self._structure = _pytree.tree_flatten((args, kwargs))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among them, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What a graph is captured for: shapes and layouts of tensors, and everything else itself."""
        return (repr(self._structure), *map(_kind, self.leaves))  # PyTorch 2.6 does not hash structures

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other tensors."""
        others = iter(tensors)
        leaves = [next(others) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return _pytree.tree_unflatten(leaves, self._structure)


def _kind(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return type(leaf), leaf
    strides = leaf.stride() if leaf.layout == torch.strided else leaf.layout
    return leaf.shape, strides, leaf.dtype, leaf.device, leaf.requires_grad


@contextlib.contextmanager
def watched(optimizers: dict[int, Any]) -> Iterator[None]:
    """Notes optimizers that are stepped inside, and that their steps read gradients."""

    def note(optimizer: Any, _args: Any, _kwargs: Any) -> None:
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
        before = Snapshot(known)
        # Tensors of the host come as tensors of the device: a copy to it that the function makes is nothing then.
        self._inputs = [_static(tensor, device) for tensor in inputs.tensors]
        args, kwargs = inputs.with_tensors(self._inputs)

        def run() -> Any:
            with _tensor_rates(known, recording), watched(optimizers), _recording.active(recording):
                return function(*args, **kwargs)

        try:
            self._replay, outputs = backend.capture(run, device)
            if len(optimizers) != len(known):
                raise NotImplementedError("an optimizer is stepped that was not in the calls before")
            self.state = State(before, known, recording)
            changed = next((guard.name for guard in expected if not guard.holds()), None)
            if changed is not None:
                raise NotImplementedError(f"every call changes {changed}, a Python number that a graph cannot change")
        except BaseException:
            before.restore()
            raise
        self._guards = expected + recording.guards + _frozen_numbers(known, recording)
        self._leaves, self._structure = _pytree.tree_flatten(outputs)
        self._leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        self._run(first=True)

    def differs(self) -> str | None:
        """What keeps it from being replayed now; None if nothing does."""
        for guard in self._guards:
            if not guard.holds():
                return f"{guard.name} (was {guard.expected!r})"
        return self.state.differs()

    def __call__(self, inputs: Inputs) -> Any:
        """The function's call with other inputs of the same kind; to be called where nothing `differs`."""
        for action in self._recording.before:
            action()
        self.state.bring()
        with torch.no_grad():
            for static, tensor in zip(self._inputs, inputs.tensors, strict=True):
                static.copy_(tensor, non_blocking=True)
        self._run(first=False)
        self._recording.count_steps()
        self.state.leave()
        return self.outputs()

    def outputs(self) -> Any:
        """What the function returned: tensors in memory that the next replay writes to."""
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        return _pytree.tree_unflatten(leaves, self._structure)

    def _run(self, first: bool) -> None:
        self._recording.upload(first)
        self._replay()
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


def _frozen_numbers(optimizers: Sequence[Any], recording: Recording) -> list[Guard]:
    """Hyperparameters that a graph has frozen."""
    followed = {number.name for number in recording.numbers}
    frozen = [guard for guard in hyperparameters(optimizers, recording.reads_numbers) if guard.name not in followed]
    for optimizer in optimizers:
        for name, value in optimizer.defaults.items() if id(optimizer) in recording.reads_numbers else ():
            read = functools.partial(optimizer.defaults.get, name)
            frozen.append(Guard(f"{type(optimizer).__name__}.defaults[{name!r}]", read, value))
    return frozen
