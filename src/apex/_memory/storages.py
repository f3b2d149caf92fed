"""The memory of tensors while code runs: live storages, and their peak size."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# PyTorch's GPU allocator returns multiples of this many bytes.
BLOCK = 512
_READ = torch.ops.aten._local_scalar_dense.default


def rounded(size: int) -> int:
    """Return the bytes that PyTorch's GPU allocator takes for a request of `size` bytes."""
    return -(-size // BLOCK) * BLOCK


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor stands for a GPU tensor whose memory is counted."""
    return isinstance(tensor, FakeTensor)


def _of_empty_tensors(collective: Any, args: Any, kwargs: Any) -> Any:
    """Run a collective of the fake process group, which moves nothing, with empty tensors in place of fake ones.

    PyTorch 2.9 and earlier releases have no rule for collectives of fake tensors.
    """
    with _disable_current_modes():
        replaced = _pytree.tree_map_only(
            FakeTensor, lambda tensor: torch.empty(0, dtype=tensor.dtype, device="cpu"), (args, kwargs)
        )
        return collective(*replaced[0], **replaced[1])


class LiveStorages(TorchDispatchMode):
    """A dispatch mode that counts the bytes of storages that operators return, from first sight until they are freed.

    `live` is the current sum and `peak` the largest, in bytes, each storage rounded up to a block of PyTorch's
    allocator. Only tensors for which `counts` is true are counted. A storage is counted once, however many tensors view
    it. Reading a number of a fake tensor, such as an overflow flag or a loss to print, gives 0.
    """

    def __init__(self, counts: Callable[[Tensor], bool] = is_fake) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._counts = counts
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _READ and is_fake(args[0]):
            return 0
        if func.namespace == "c10d":
            return _of_empty_tensors(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        for value in _pytree.tree_leaves(result):
            if isinstance(value, Tensor):
                self.note(value)
        return result

    def note(self, tensor: Tensor) -> None:
        """Count a tensor's storage, unless it is counted already."""
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
    """Bytes of storages by purpose; a storage counts for the first purpose that names it."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        # Bytes of all storages, each rounded up to a block of PyTorch's allocator.
        self.rounded = 0

    def add(self, tensors: Iterable[Tensor | None]) -> int:
        """Return the bytes of the tensors' storages that were not added before."""
        total = 0
        for tensor in tensors:
            if tensor is None:
                continue
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            if storage._cdata not in self._seen:
                self._seen.add(storage._cdata)
                total += storage.nbytes()
                self.rounded += rounded(storage.nbytes())
        return total
