"""Graphs on the CPU: a stand-in for CUDA's, which notes PyTorch's operators and runs them again.

As in a CUDA graph, capturing changes nothing, memory is reused at every replay, and Python does not run again.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

SYNCHRONIZES = {torch.ops.aten._local_scalar_dense.default}


class Tape(TorchDispatchMode):
    """A recorder of operators with their tensors, which can undo writes to tensors that existed before."""

    def __init__(self, forbids_reading: bool) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._forbids_reading = forbids_reading
        self._made: set[int] = set()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._alive: list[Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._forbids_reading and function in SYNCHRONIZES:
            raise RuntimeError("operation not permitted when stream is capturing")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        arguments = function._schema.arguments
        named = [(argument, kwargs[argument.name]) for argument in arguments if argument.name in kwargs]  # `out=`
        for argument, value in (*zip(arguments, args, strict=False), *named):
            # Batch norm's schema does not say that it writes running statistics.
            if (argument.alias_info is not None and argument.alias_info.is_write) or "running" in argument.name:
                for tensor in tree_leaves(value):
                    self._save(tensor)
        result = function(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        older = set(map(_storage, given))
        self._made.update(address for address in map(_storage, results) if address not in older)
        self._alive.extend(results)
        self.calls.append((function, args, kwargs, results))
        return result

    def _save(self, tensor: Tensor) -> None:
        address = _storage(tensor)
        if address not in self._made and address not in self._before:
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self._before[address] = whole, whole.clone()

    def undo(self) -> None:
        for whole, before in self._before.values():
            whole.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        for function, args, kwargs, results in self.calls:
            again = [leaf for leaf in tree_leaves(function(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for old, new in zip(results, again, strict=True):
                if old.data_ptr() != new.data_ptr() and old.numel():
                    old.copy_(new)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class CpuGraphs:
    """A backend for the CPU with the interface of `apex.ops._graph.CudaGraphs`."""

    def __init__(self, forbids_reading: bool = False) -> None:
        self.forbids_reading = forbids_reading

    @staticmethod
    def device_of(tensors: Iterable[Tensor]) -> torch.device | None:
        is_capturing = any(isinstance(mode, Tape) for mode in _get_current_dispatch_mode_stack())
        return None if is_capturing else torch.device("cpu")

    @contextlib.contextmanager
    def aside(self, device: torch.device) -> Iterator[None]:
        yield

    def capture(self, function: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
        random = torch.get_rng_state()
        tape = Tape(self.forbids_reading)
        try:
            with tape:
                result = function()
        finally:
            tape.undo()
            torch.set_rng_state(random)
        return tape.replay, result
