"""MultiTensorApply, which calls the functions of `amp_C`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class MultiTensorApply:
    """A callable that calls `op(chunk_size, noop_flag, tensor_lists, *args)`.

    `chunk_size` only belongs to the interface: the ops divide work themselves. `available` is always true, because
    nothing has to be compiled.
    """

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Do nothing: the functions are always available."""

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *args: Any
    ) -> Any:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
