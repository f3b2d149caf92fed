"""One captured graph of a function for inputs of one kind, and the work around each replay."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree

from ..ops import _graph_numbers
from ..ops._graph_numbers import CaptureContext, is_number
from ._references import PLAIN, References
from ._state import Snapshot, State, version_of


def flattened(value: Any) -> tuple[list[Tensor], tuple[Any, ...]]:
    """Return the tensors in the arguments of a call, and the key of the graph: tensor layouts and all other values."""
    tensors: list[Tensor] = []
    leaves, structure = _pytree.tree_flatten(value)
    kinds: list[Any] = [repr(structure)]  # PyTorch 2.6 does not hash structures
    for leaf in leaves:
        if isinstance(leaf, Tensor) and not leaf.is_nested:
            tensors.append(leaf)
            strides = leaf.stride() if leaf.layout == torch.strided else leaf.layout
            kinds.append((leaf.shape, strides, leaf.dtype, leaf.device, leaf.requires_grad))
        elif _is_record(leaf):
            inner_tensors, kind = flattened(vars(leaf))
            tensors += inner_tensors
            kinds.append((type(leaf), kind))
        else:
            kinds.append((type(leaf), leaf))
    return tensors, tuple(kinds)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return `value` with `function` applied to each of its tensors; objects that hold tensors are copied."""

    def of(leaf: Any) -> Any:
        if not _is_record(leaf):
            return function(leaf) if isinstance(leaf, Tensor) else leaf
        copied = copy.copy(leaf)
        vars(copied).update(map_tensors(function, vars(leaf)))
        return copied

    return _pytree.tree_map(of, value)


def _is_record(leaf: Any) -> bool:
    """Return whether an object's attributes are only tensors and plain values, as for a batch that is a dataclass."""
    if isinstance(leaf, Tensor | nn.Module | torch.optim.Optimizer) or not hasattr(leaf, "__dict__"):
        return False
    parts = _pytree.tree_leaves(vars(leaf))
    has_tensors = any(isinstance(part, Tensor) for part in parts)
    return has_tensors and all(isinstance(part, Tensor | PLAIN) for part in parts)


@contextlib.contextmanager
def watched(optimizers: dict[int, Any]) -> Iterator[None]:
    """Collect the optimizers that are stepped inside the block, and record that their steps read gradients."""

    def note(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if (capture := _graph_numbers.capturing()) is not None:
            if id(optimizer) not in optimizers:
                raise NotImplementedError("an optimizer is stepped that was not in the calls before")
            params = (param for group in optimizer.param_groups for param in group["params"])
            capture.reads.update(id(param.grad) for param in params)
        optimizers[id(optimizer)] = optimizer

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()


class Graph:
    """A captured function. A capture changes no state: the first call is a replay, too."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, Any],
        optimizers: dict[int, Any],
        backend: Any,
        device: torch.device,
    ) -> None:
        self._context = capture = CaptureContext(True, device)
        references = References(function, map_tensors(lambda _: None, arguments))
        if references.iterators:
            raise NotImplementedError(
                f"it uses the iterator {references.iterators[0]}, which a replay would not advance; pass its items as "
                "arguments"
            )
        known = list(optimizers.values())
        # The function gets host tensors as device tensors, so that its own copies to the device do nothing.
        self._inputs = [_static(tensor, device) for tensor in flattened(arguments)[0]]
        static = iter(self._inputs)
        args, kwargs = map_tensors(lambda _: next(static), arguments)
        versions = list(map(version_of, self._inputs))

        def run() -> Any:
            _follow_rates(known, capture)
            with watched(optimizers), _graph_numbers.active(capture):
                return function(*args, **kwargs)

        before = Snapshot(known, references, device)
        torch.clear_autocast_cache()  # it holds casts of weights in memory that does not belong to the graph
        try:
            self._replay, outputs = backend.capture(run, device)
            self.state = State(before, capture)
        finally:
            before.restore()
            torch.clear_autocast_cache()
        # Indices of inputs that the function writes to.
        self._written = [index for index, tensor in enumerate(self._inputs) if version_of(tensor) != versions[index]]
        self._outputs = map_tensors(Tensor.detach, outputs)

    def __call__(self, tensors: list[Tensor]) -> Any:
        """Replay the graph with tensors of the same kind, after `state.copy_in()`.

        The next call overwrites the outputs.
        """
        with torch.no_grad():
            for static, tensor in zip(self._inputs, tensors, strict=True):
                static.copy_(tensor, non_blocking=True)
        self._context.upload()
        self._replay()
        for index in self._written:
            if tensors[index].device == self._inputs[index].device:
                tensors[index].copy_(self._inputs[index])
        self.state.store_results()  # first, because an action that reports overflows may raise an error
        for action in self._context.after:
            action()
        return map_tensors(Tensor.detach, self._outputs)


def _static(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device, with the tensor's strides if it has no gaps and no overlapping elements."""
    if tensor.layout != torch.strided:
        raise NotImplementedError(f"an input is sparse ({tensor.layout})")
    if tensor.requires_grad:
        raise NotImplementedError("an input requires gradients, which would stop at the graph's copy of it")
    return tensor.detach().to(device, copy=True, memory_format=torch.preserve_format)


def _follow_rates(optimizers: Sequence[Any], capture: CaptureContext) -> None:
    """Give PyTorch's capturable or fused optimizers learning rates on the device, until `Snapshot.restore`."""
    for optimizer in optimizers:
        groups = optimizer.param_groups if type(optimizer).__module__.startswith("torch.optim") else ()
        for index, group in enumerate(groups):
            takes_tensor = group.get("capturable") or group.get("fused")
            if takes_tensor and group["params"] and is_number(group.get("lr")):
                rate = capture.entry(optimizer, index, "lr")
                group["lr"] = rate.on(group["params"][0].device).float()
