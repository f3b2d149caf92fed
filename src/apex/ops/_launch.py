"""The one launcher of Triton kernels.

`@kernel` above `@triton.jit` gives a function a `launch` method with a cached fast path: the compiled kernel is looked up by
what Triton specialises on (types, alignment, divisibility, constants) and its `run` is called directly, with addresses in
place of tensors. On the machine of `docs/performance.md` that takes less than half the host time of `function[grid](...)`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

_MAX_INT32 = 2**31 - 1

KERNELS: dict[str, Kernel] = {}

_recorder: list[Launch] | None = None


def _launcher_takes_constants() -> bool:
    """Since Triton 3.3, a compiled kernel's `run` takes every argument, constants included."""
    major, minor = (int(part) for part in triton.__version__.split(".")[:2])
    return (major, minor) >= (3, 3)


_FAST_PATH = _launcher_takes_constants()


@dataclass(frozen=True)
class Launch:
    """One launch as it was asked for; what the cross-compilation test compiles."""

    kernel: Kernel
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: tuple[Any, ...]
    num_warps: int
    num_stages: int


class Kernel:
    """A Triton kernel whose run-time arguments come first and whose `tl.constexpr` arguments come last."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.name: str = function.fn.__name__
        self._compiled: dict[tuple, Any] = {}
        KERNELS[self.name] = self

    def launch(
        self,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        constants: tuple[Any, ...],
        *,
        device: torch.device,
        num_warps: int,
        num_stages: int = 1,
    ) -> None:
        """Runs the kernel on `device`'s current stream.

        `arguments` are tensors on `device`, numbers or None, in the kernel's order; `constants` are hashable values for its
        `tl.constexpr` arguments, in order.
        """
        if _recorder is not None:
            _recorder.append(Launch(self, grid, tuple(arguments), constants, num_warps, num_stages))
            return
        if device.type != "cuda":
            self.function[grid](*arguments, *constants)
            return
        index = torch.cuda.current_device() if device.index is None else device.index
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                self._launch_here(index, grid, arguments, constants, num_warps, num_stages)
        else:
            self._launch_here(index, grid, arguments, constants, num_warps, num_stages)

    def _launch_here(
        self,
        index: int,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        constants: tuple,
        num_warps: int,
        num_stages: int,
    ) -> None:
        key: list[Any] = [index, constants, num_warps, num_stages]
        values = []
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                address = argument.data_ptr()
                key.append((argument.dtype, address % 16 == 0))
                values.append(address)
            else:
                key.append(_specialisation(argument))
                values.append(argument)
        frozen_key = tuple(key)
        compiled = self._compiled.get(frozen_key)
        if compiled is None:
            compiled = self.function[grid](*arguments, *constants, num_warps=num_warps, num_stages=num_stages)
            if _FAST_PATH:
                self._compiled[frozen_key] = compiled
            return
        padded = grid + (1,) * (3 - len(grid))
        stream = torch._C._cuda_getCurrentRawStream(index)
        compiled.run(
            *padded, stream, compiled.function, compiled.packed_metadata, None, None, None, *values, *constants
        )


def _specialisation(value: Any) -> Any:
    """What Triton specialises on for a number: an int's width, being 1, divisibility by 16; a float's type alone."""
    if isinstance(value, int):
        if value == 1:
            return 1
        return (value % 16 == 0, value > _MAX_INT32)
    return type(value)


def kernel(function: Any) -> Kernel:
    """Makes a `@triton.jit` function a `Kernel` and registers it."""
    return Kernel(function)


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collects launches instead of running them, so that they can be compiled for a GPU that is not there."""
    global _recorder
    previous, _recorder = _recorder, []
    try:
        yield _recorder
    finally:
        _recorder = previous
