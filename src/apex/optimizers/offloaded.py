"""OffloadedOptimizer: a fused optimizer whose state is in host memory."""

from __future__ import annotations

import numbers
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops._host import HOST, on_host
from ..ops._host_memory import HostMemory
from ..ops.multi_tensor.rule import SLOTS
from ..ops.multi_tensor.staged_lists import StagedLists
from ..ops.multi_tensor.triton_lists import TritonLists
from ._base import FusedOptimizer
from ._buckets import UpdateBucket, local
from .fused_adam import FusedAdam

PLACES = ("gpu", HOST.type)


class OffloadedOptimizer(FusedOptimizer):
    """A fused optimizer whose state (moments, master weights) is in host memory instead of the GPU's.

    `OffloadedOptimizer(params, cls, ...)` is an instance of `cls` too. It has the parameter groups, state dicts, loss
    scaling and options of `cls`.

    - `cls`: a fused optimizer of `apex.optimizers`; `**options` are its arguments;
    - `fraction`: the part of the state that is offloaded, from 0 to 1, counted in elements of parameters;
    - `minimal_size`: parameters with fewer elements keep their state on the GPU;
    - `where`: "gpu" updates on the GPU, and gives the bits of `cls`. State of 512 MiB or more is copied to the GPU and
      back in pieces, while another piece is updated; kernels read and write less state over the bus. "cpu" updates on
      the CPU: gradients and parameters are copied there, and updated parameters back. Its last bits may differ from a
      GPU's, and its steps wait for the GPU.

    With parameters on a CPU the options have no effect.
    """

    fraction = 1.0
    minimal_size = 4096
    where = "gpu"
    # Elements of large parameters whose state is offloaded, and of all large parameters.
    _counts = (0, 0)

    def __new__(made, /, params: Any = (), cls: type[FusedOptimizer] = FusedAdam, **options: Any) -> OffloadedOptimizer:
        """Return an instance of a class that inherits from this class and from `cls`."""
        if not isinstance(cls, type) or not issubclass(cls, FusedOptimizer) or cls in (FusedOptimizer, made):
            raise TypeError(f"cls={cls!r} is no fused optimizer of apex.optimizers")
        return object.__new__(_class_of(cls) if made is OffloadedOptimizer else made)

    def __init__(
        self,
        params: Any,
        cls: type[FusedOptimizer] = FusedAdam,
        *,
        fraction: float = 1.0,
        minimal_size: int = 4096,
        where: str = "gpu",
        **options: Any,
    ) -> None:
        if isinstance(params, torch.optim.Optimizer):
            raise TypeError(
                f"params is a {type(params).__name__}; parameters and the class are needed: "
                "OffloadedOptimizer(model.parameters(), FusedAdam, lr=...)"
            )
        if not isinstance(fraction, numbers.Real) or not 0 <= fraction <= 1:
            raise ValueError(f"fraction={fraction!r} is not a number from 0 to 1")
        if not isinstance(minimal_size, int) or minimal_size < 0:
            raise ValueError(f"minimal_size={minimal_size!r} is not a number of elements")
        if where not in PLACES:
            raise ValueError(f"where={where!r} is none of {', '.join(PLACES)}")
        self.fraction, self.minimal_size, self.where = float(fraction), minimal_size, where
        super().__init__(params, **options)
        if where != "gpu" and self.capturable:
            raise ValueError(f"capturable=True needs where='gpu': a graph cannot run the update of where={where!r}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how to pickle the optimizer, whose class was made at run time and cannot be imported by name."""
        return _new, (type(self).__bases__[1],), self.__getstate__()

    def _check_capture(self) -> None:
        super()._check_capture()
        if self.where != "gpu" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"a CUDA graph cannot run the update of where={self.where!r}; where='gpu' can be captured"
            )

    def _memory(self, device: torch.device) -> HostMemory:
        """Return the host memory for tensors of a device."""
        memories = self.__dict__.setdefault("_memories", {})
        if device not in memories:
            memories[device] = HostMemory(device)
        return memories[device]

    def _is_offloaded(self, param: Tensor) -> bool:
        """Return whether a parameter's state is offloaded; decides at the first call, so that `fraction` holds."""
        choices = self.__dict__.setdefault("_choices", {})
        if param not in choices:
            if local(param) is not param:
                raise NotImplementedError("OffloadedOptimizer does not take sharded parameters (DTensor)")
            size, (taken, total) = param.numel(), self._counts
            is_large = size >= max(2, self.minimal_size) and not on_host(param)
            choices[param] = is_large and taken + size <= self.fraction * (total + size)
            if is_large:
                self._counts = taken + size * choices[param], total + size
        return choices[param]

    def _prepare(self, param: Tensor, group: dict[str, Any], names: Sequence[str]) -> tuple[dict[str, Any], Any]:
        self._is_offloaded(param)  # refuses a sharded parameter before state is made for it
        state, kind = super()._prepare(param, group, names)
        self._place_state(state, param)
        return state, kind

    def _place_state(self, state: dict[str, Any], param: Tensor) -> None:  # type: ignore[override]
        """Move state of an offloaded parameter that is still on the device to host memory."""
        if not self._is_offloaded(param):
            return
        memory = self._memory(param.device)
        for name, value in state.items():
            # Codes have the parameter's shape, scales have "::" in their names; other state is small and shared.
            if isinstance(value, Tensor) and (value.shape == param.shape or "::" in name):
                state[name] = memory.moved(value) if self.where == "gpu" else value.to(HOST)

    def _load(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of `cls`, of this class, or of PyTorch's optimizer of the same algorithm."""
        super()._load(state_dict)
        for param, state in self.state.items():  # state of another format was converted on the device
            self._place_state(state, param)

    def _make_lists(self, slots: Any, copy: Any = None, encodings: Any = None) -> Any:  # type: ignore[override]
        """Return lists of `cls`; with `where="gpu"`, lists that copy state to the GPU and back."""
        lists = super()._make_lists(slots, copy, encodings)
        if self.where == "gpu" and type(lists) is TritonLists:
            return StagedLists(slots, copy, encodings, self._memory(lists.device))
        return lists

    def _bucket_type(self, param: Tensor) -> Any:  # type: ignore[override]
        if self.where == "gpu" or not self._is_offloaded(param):
            return UpdateBucket
        # A method with its first argument: equal for equal memories, because parameters are sorted by it.
        return types.MethodType(HostBucket, self._memory(param.device))


class HostBucket(UpdateBucket):
    """A bucket that the CPU updates: parameters and gradients are copied to the host, new parameters back.

    The copies are made anew at every step, since a user may change parameters in between.
    """

    def __init__(self, memory: HostMemory, *arguments: Any) -> None:
        self._memory = memory
        # By the index of a list among slots and copy: its tensors on the device, and their twins on the host.
        self._twins: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        super().__init__(*arguments)

    def _slots(self, gradients: list[Tensor]) -> tuple[Any, ...]:
        slots, copy, *encodings = super()._slots(gradients)
        lists = [*slots, copy]
        for index, tensors in enumerate(lists):
            if not tensors or on_host(tensors[0]):
                continue
            if index not in self._twins:
                self._twins[index] = tensors, list(map(self._memory.pinned_like, tensors))
            twins = self._twins[index][1]
            self._twins[index] = tensors, twins
            for twin, tensor in zip(twins, tensors, strict=True):
                twin.copy_(tensor, non_blocking=True)
            lists[index] = twins
        self._memory.wait()
        return (lists[:SLOTS], lists[SLOTS], *encodings)

    def release(self) -> None:
        """Copy updated parameters to the device, and drop the references to the gradients."""
        for index in (0, SLOTS):
            for tensor, twin in zip(*self._twins.get(index, ((), ())), strict=True):
                tensor.copy_(twin, non_blocking=True)
        if 1 in self._twins:
            self._twins[1] = [], self._twins[1][1]
        super().release()


_classes: dict[Any, type[OffloadedOptimizer]] = {}


def _class_of(cls: type[FusedOptimizer]) -> type[OffloadedOptimizer]:
    """Return the class of offloaded optimizers of class `cls`."""
    if cls not in _classes:
        _classes[cls] = type(f"Offloaded{cls.__name__}", (OffloadedOptimizer, cls), {"__module__": __name__})
    return _classes[cls]


def _new(cls: type[FusedOptimizer]) -> OffloadedOptimizer:
    """Return an optimizer without state, for unpickling."""
    return object.__new__(_class_of(cls))
