"""How much memory a training step takes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


def how_measured(device: torch.device) -> str:
    """In words, what `peak_memory` counts on `device`."""
    if device.type == "cuda":
        return "the most that PyTorch had allocated on the GPU at once, beyond the data"
    return "all tensors alive at once, counted; without the scratch space of operators"


def peak_memory(work: Callable[[], Any], device: torch.device) -> int:
    """Runs `work` and returns the peak of the memory it takes, in bytes."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    with LiveTensors() as live:
        work()
    return live.peak


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of all tensors that operators return inside, for as long as these are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._note, result)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known.add(key)
        self._bytes += size
        self.peak = max(self.peak, self._bytes)
        weakref.finalize(storage, self._forget, key, size).atexit = False

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._bytes -= size
