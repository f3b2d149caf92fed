"""The one launcher of Triton kernels.

`@kernel` above `@triton.jit` makes a `Kernel`, which is called with a grid and the kernel's arguments. The second call
with tensors of the same dtypes, the same sizes and constants goes straight to the compiled kernel with addresses in
place of tensors: to the C function that launches it where Triton's version is known to have one, else to its `run`,
which takes less than half the host time of Triton's `function[grid](...)`.
"""

from __future__ import annotations

import contextlib
import dis
import math
from collections import deque
from collections.abc import Callable, Iterator, MutableSequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from ._device import current_device, current_stream

KERNELS: dict[str, Kernel] = {}

_recorder: MutableSequence[Launch] | None = None
_recorded_type: str | None = None


_TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
# From Triton 3.3 to 3.9 a compiled kernel's `run` takes the arguments given here; others are launched plainly.
_RUN_IS_KNOWN = (3, 3) <= _TRITON <= (3, 9)
_ALIGNMENT = 16


@dataclass(frozen=True)
class Launch:
    """One launch as it was asked for; what the cross-compilation test compiles."""

    prepared: PreparedLaunch
    device: torch.device
    tensors: tuple[Tensor | None, ...]
    floats: tuple[float, ...]


# Launches that a kernel keeps. Beyond it a program's inputs hardly ever have the same shape twice.
MOST_LAUNCHES = 4096


class Kernel:
    """A Triton kernel whose arguments are tensors first, then integers, then floats, then `tl.constexpr` values."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.name: str = function.fn.__name__
        self._prepared: dict[tuple, PreparedLaunch] = {}
        KERNELS[self.name] = self

    def __call__(
        self,
        grid: tuple[int, ...],
        tensors: tuple[Tensor | None, ...],
        sizes: tuple[int, ...] = (),
        floats: tuple[float, ...] = (),
        *,
        num_warps: int,
        num_stages: int = 1,
        **constants: Any,
    ) -> None:
        """Launches the kernel on the device of the first tensor; None stands for an absent one.

        `constants` are the kernel's `tl.constexpr` arguments. Triton compiles for their values and for those of the
        integers in `sizes`, never for those of floats.
        """
        key = (grid, sizes, num_warps, num_stages, *constants, *constants.values())
        launch = self._prepared.get(key)
        if launch is None:
            launch = self.prepare(grid, sizes, num_warps=num_warps, num_stages=num_stages, **constants)
            if len(self._prepared) >= MOST_LAUNCHES:
                self._prepared.clear()
            self._prepared[key] = launch
        launch(tensors, floats)

    def prepare(
        self,
        grid: tuple[int, ...],
        sizes: tuple[int, ...] = (),
        *,
        num_warps: int,
        num_stages: int = 1,
        same_dtypes: bool = False,
        **constants: Any,
    ) -> PreparedLaunch:
        """The same without tensors and floats: what a launch rule can answer, so that no constants are looked up.

        With `same_dtypes` its tensors have the same dtypes, and the same ones are absent, at every launch: a rule that
        is asked with all dtypes can say so, and a launch then need not look at them.
        """
        for function in (self.function, *constants.values()):
            settle_hash(function)
        names = self.function.arg_names
        values = tuple(constants[name] for name in names[len(names) - len(constants) :])
        return PreparedLaunch(self, grid, sizes, values, num_warps, num_stages, same_dtypes)


class PreparedLaunch:
    """A launch that lacks its tensors and its floats."""

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, ...],
        sizes: tuple[int, ...],
        constants: tuple[Any, ...],
        num_warps: int,
        num_stages: int,
        same_dtypes: bool = False,
    ) -> None:
        self.kernel = kernel
        self.grid = grid
        self.sizes = sizes
        self.constants = constants
        self.num_warps = num_warps
        self.num_stages = num_stages
        self._same_dtypes = same_dtypes
        self._dtypes: list[torch.dtype | None] | None = None  # those of the first launch
        self._head: tuple[int, ...] = grid + (1,) * (3 - len(grid))
        # By the device's index, the dtypes if they may change, and the tensors that start at no multiple of 16 bytes,
        # which Triton specialises on: what launches the compiled kernel, its arguments between stream and tensors, and
        # how many tensors were absent.
        self._compiled: dict[Any, tuple[Callable[..., None], tuple[Any, ...], int]] = {}

    def __call__(self, tensors: tuple[Tensor | None, ...], floats: tuple[float, ...] = ()) -> None:
        """Launches the kernel on the current stream of the first tensor's device; None stands for an absent tensor."""
        if _recorder is not None and self._is_recorded(tensors, floats):
            return
        key: Any = (index := tensors[0].get_device())  # type: ignore[union-attr]
        if not self._same_dtypes:
            key = (index, *[None if tensor is None else tensor.dtype for tensor in tensors])
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        if math.gcd(_ALIGNMENT, *addresses) != _ALIGNMENT:  # half the time of looking at them one by one
            key = (key, *[address % _ALIGNMENT == 0 for address in addresses])
        compiled = self._compiled.get(key)
        if compiled is None:
            # Of an integer, 1 for an eps, say, Triton would compile a kernel that takes no other number.
            self._launch_first(key, tensors, tuple(map(float, floats)))
            return
        run, middle, absent = compiled
        if addresses.count(0) != absent:
            self._launch_plainly(tensors, tuple(map(float, floats)))
            return
        if current_device() != index:
            with torch.cuda.device(index):
                self(tensors, floats)
            return
        run(*self._head, current_stream(index), *middle, *addresses, *self.sizes, *floats, *self.constants)

    def _is_recorded(self, tensors: tuple[Tensor | None, ...], floats: tuple[float, ...]) -> bool:
        """Records the launch if such ones are; addresses are not asked for, which stand-ins for tensors do not have."""
        device = tensors[0].device  # type: ignore[union-attr]
        if _recorder is None or _recorded_type not in (None, device.type):
            return False
        self._check_dtypes(tensors)
        _recorder.append(Launch(self, device, tensors, tuple(map(float, floats))))
        return True

    def _check_dtypes(self, tensors: tuple[Tensor | None, ...]) -> None:
        if self._same_dtypes:
            dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
            self._dtypes = self._dtypes or dtypes
            if dtypes != self._dtypes:
                raise TypeError(
                    f"{self.kernel.name} was prepared for {self._dtypes}, got {dtypes}: ask its launch rule"
                )

    def _launch_first(self, key: Any, tensors: tuple[Tensor | None, ...], floats: tuple[float, ...]) -> None:
        device = tensors[0].device  # type: ignore[union-attr]
        self._check_dtypes(tensors)
        compiled = self._launch_plainly(tensors, floats)
        if _RUN_IS_KNOWN and device.type == "cuda" and device.index is not None:
            absent = sum(tensor is None or not tensor.data_ptr() for tensor in tensors)
            self._compiled[key] = (*_launcher(compiled), absent)

    def _launch_plainly(self, tensors: tuple[Tensor | None, ...], floats: tuple[float, ...]) -> Any:
        device: Any = tensors[0].device  # type: ignore[union-attr]
        function, tail = self.kernel.function, (*self.sizes, *floats, *self.constants)
        for tensor in tensors:
            if tensor is not None and not tensor.data_ptr() and tensor.numel():
                raise TypeError(f"{self.kernel.name} cannot take a {type(tensor).__name__}, which has no memory itself")
        if device.type != "cuda":  # Triton's interpreter
            return function[self.grid](*tensors, *tail)
        with torch.cuda.device(device):
            return function[self.grid](*tensors, *tail, num_warps=self.num_warps, num_stages=self.num_stages)


def _launcher(compiled: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """What launches a compiled kernel, and its arguments between stream and tensors.

    The `run` of an NVIDIA kernel is a Python object that allocates scratch memory and calls a C function. Without
    scratch memory the C function can be called in its place, which saves 3 of 7 microseconds; done for the version of
    Triton that this was run with on a GPU, since the C function's arguments change from version to version.
    """
    run = compiled.run
    no_hooks = (None, None, None)  # launch metadata, hooks before and after the launch
    is_nvidia = type(run).__module__ == "triton.backends.nvidia.driver"
    if _TRITON == (3, 6) and is_nvidia and not (run.global_scratch_size or run.profile_scratch_size):
        attributes = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
        return run.launch, (*attributes, None, None, compiled.packed_metadata, *no_hooks)
    return run, (compiled.function, compiled.packed_metadata, *no_hooks)


def settle_hash(function: Any) -> None:
    """Has Triton hash a kernel after the functions that it calls.

    Triton looks at the constants of a function that it has hashed already only (`DependenciesFinder._update_hash`): the
    key of a kernel in its cache would depend on which kernel a process has launched before.
    """
    if isinstance(function, triton.JITFunction) and function.hash is None:
        for instruction in dis.get_instructions(function.fn):
            if instruction.opname == "LOAD_GLOBAL":  # other names are those of attributes
                settle_hash(function.fn.__globals__.get(instruction.argval))
        _ = function.cache_key


def kernel(function: Any) -> Kernel:
    """Makes a `@triton.jit` function a `Kernel` and registers it."""
    return Kernel(function)


@contextlib.contextmanager
def recording(keep: bool = True, device_type: str | None = None) -> Iterator[MutableSequence[Launch]]:
    """Collects launches instead of running them, so that they can be compiled for a GPU that is not there.

    Without `keep` they are forgotten at once, and so are their tensors. With a `device_type` those on others are run:
    they are other threads'.
    """
    global _recorder, _recorded_type
    previous = _recorder, _recorded_type
    _recorder, _recorded_type = [] if keep else deque(maxlen=0), device_type
    try:
        yield _recorder
    finally:
        _recorder, _recorded_type = previous
