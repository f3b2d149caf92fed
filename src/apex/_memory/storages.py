"""The memory of tensors while code runs: which storages are alive, and the most that were at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

# PyTorch's allocator for GPUs gives out multiples of it.
BLOCK = 512
_READ = torch.ops.aten._local_scalar_dense.default


def rounded(size: int) -> int:
    """What PyTorch's allocator for GPUs takes for so many bytes."""
    return -(-size // BLOCK) * BLOCK


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor stands for one of the GPU that memory is counted for."""
    return isinstance(tensor, FakeTensor)


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of storages that operators return, from when they are first seen until they are freed.

    `live` is the sum now and `peak` the largest there was, in bytes, each storage rounded up to a block of PyTorch's
    allocator. Only tensors for which `counts` is true are looked at. A storage is counted once, however many tensors
    are views of it. A number that code reads of a fake tensor is 0: an overflow flag, a loss to print.
    """

    def __init__(self, counts: Callable[[Tensor], bool] = is_fake) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._counts = counts
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _READ and is_fake(args[0]):
            return 0
        result = func(*args, **(kwargs or {}))
        for value in _pytree.tree_leaves(result):
            if isinstance(value, Tensor):
                self.note(value)
        return result

    def note(self, tensor: Tensor) -> None:
        """Counts a tensor's storage, if it is not counted yet."""
        if not self._counts(tensor):
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, rounded(storage.nbytes())
        if key in self._known:
            return
        known = self._known

        def freed(_: Any) -> None:
            if known.pop(key, None) is not None:
                self.live -= size

        known[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)


class Owners:
    """Bytes of storages by what they are for; a storage counts for the first that names it."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        # The same as the sum of all, each storage rounded up to a block of PyTorch's allocator.
        self.rounded = 0

    def add(self, tensors: Iterable[Tensor | None]) -> int:
        """The bytes of storages that were not named before."""
        found = 0
        for tensor in tensors:
            if tensor is None:
                continue
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            if storage._cdata not in self._seen:
                self._seen.add(storage._cdata)
                found += storage.nbytes()
                self.rounded += rounded(storage.nbytes())
        return found
