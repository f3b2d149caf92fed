"""The one launcher of Triton kernels.

`@kernel` above `@triton.jit` makes a `Kernel`, which is called with a grid and the kernel's arguments. From the second
call with the same dtypes, sizes and constants on, the compiled kernel is launched directly, with addresses in place of
tensors: by the C function that launches it if Triton's version is known to have one, else by the kernel's `run`. This
takes less than half the host time of Triton's `function[grid](...)`.
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
from triton.runtime.errors import OutOfResources

from .. import _env
from ._device import current_device, current_stream, launch_rule
from ._launch_arguments import Described, as_argument

KERNELS: dict[str, Kernel] = {}

_recorder: MutableSequence[Launch] | None = None

_TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
# From Triton 3.3 to 3.9 a compiled kernel's `run` takes the arguments given here; other versions are launched plainly.
_RUN_IS_KNOWN = (3, 3) <= _TRITON <= (3, 9)
_ALIGNMENT = 16


@dataclass(frozen=True)
class Launch:
    """One recorded launch with all its arguments, sufficient to compile the kernel."""

    prepared: PreparedLaunch
    device: torch.device
    tensors: tuple[Tensor | None, ...]
    floats: tuple[float, ...]


class Kernel:
    """A Triton kernel whose arguments are tensors first, then integers, then floats, then `tl.constexpr` values.

    In place of a tensor it may take a descriptor (`Described`); it is then launched by Triton itself.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.name: str = function.fn.__name__
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
        """Launch the kernel on the device of the first tensor; None stands for an absent tensor.

        `constants` are the kernel's `tl.constexpr` arguments. Triton specialises the program on their values and on the
        integers in `sizes`, never on the values of floats.
        """
        _prepared(self, grid, sizes, num_warps, num_stages, *constants.items())(tensors, floats)

    def prepare(
        self,
        grid: tuple[int, ...],
        sizes: tuple[int, ...] = (),
        *,
        num_warps: int,
        num_stages: int = 1,
        **constants: Any,
    ) -> PreparedLaunch:
        """Return a launch that lacks only tensors and floats, so that a launch rule can cache it with its constants."""
        for function in (self.function, *constants.values()):
            settle_hash(function)
        names = self.function.arg_names
        values = tuple(constants[name] for name in names[len(names) - len(constants) :])
        return PreparedLaunch(self, grid, sizes, values, num_warps, num_stages)


@launch_rule
def _prepared(
    kernel: Kernel, grid: tuple[int, ...], sizes: tuple[int, ...], num_warps: int, num_stages: int, *constants: Any
) -> PreparedLaunch:
    return kernel.prepare(grid, sizes, num_warps=num_warps, num_stages=num_stages, **dict(constants))


class PreparedLaunch:
    """A launch with everything but its tensors and its floats."""

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, ...],
        sizes: tuple[int, ...],
        constants: tuple[Any, ...],
        num_warps: int,
        num_stages: int,
    ) -> None:
        self.kernel = kernel
        self.grid = grid
        self.sizes = sizes
        self.constants = constants
        self.num_warps = num_warps
        self.num_stages = num_stages
        self._head: tuple[int, ...] = grid + (1,) * (3 - len(grid))
        # Key: the device's index, the dtypes, and which tensors start at a multiple of 16 bytes,
        # because Triton specialises on alignment. Value: the function that launches the compiled kernel, its arguments
        # between stream and tensors, and the number of absent tensors.
        self._compiled: dict[Any, tuple[Callable[..., None], tuple[Any, ...], int]] = {}

    def __call__(self, tensors: tuple[Tensor | None, ...], floats: tuple[float, ...] = ()) -> None:
        """Launch the kernel on the current stream of the first tensor's device; None stands for an absent tensor."""
        if _recorder is not None:
            self._record(_recorder, tensors, floats)
            return
        index = tensors[0].get_device()  # type: ignore[union-attr]
        key: Any = (index, *[None if tensor is None else tensor.dtype for tensor in tensors])
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        if math.gcd(_ALIGNMENT, *addresses) != _ALIGNMENT:  # takes half the time of testing them one by one
            key = (key, *[address % _ALIGNMENT == 0 for address in addresses])
        compiled = self._compiled.get(key)
        if compiled is None:
            # Converted to float: for an integer, such as eps=1, Triton would compile a kernel for that number alone.
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

    def _record(
        self, recorder: MutableSequence[Launch], tensors: tuple[Tensor | None, ...], floats: tuple[float, ...]
    ) -> None:
        """Record the launch. Reads no addresses, because meta tensors have none."""
        device = tensors[0].device  # type: ignore[union-attr]
        recorder.append(Launch(self, device, tensors, tuple(map(float, floats))))

    def _launch_first(self, key: Any, tensors: tuple[Tensor | None, ...], floats: tuple[float, ...]) -> None:
        device = tensors[0].device  # type: ignore[union-attr]
        try:
            compiled = self._launch_plainly(tensors, floats)
        except OutOfResources as error:
            table = _env.tuned_launches()
            cause = "" if table is None else f"; the table that APEX_TUNED names, {table}, may be the cause"
            raise RuntimeError(f"{self.kernel.name} needs more than this GPU has: {error}{cause}") from error
        by_address = not any(isinstance(tensor, Described) for tensor in tensors)
        if _RUN_IS_KNOWN and by_address and device.type == "cuda" and device.index is not None:
            absent = sum(tensor is None or not tensor.data_ptr() for tensor in tensors)
            self._compiled[key] = (*_launcher(compiled), absent)

    def _launch_plainly(self, tensors: tuple[Tensor | None, ...], floats: tuple[float, ...]) -> Any:
        device: Any = tensors[0].device  # type: ignore[union-attr]
        function, tail = self.kernel.function, (*self.sizes, *floats, *self.constants)
        given = tuple(map(as_argument, tensors))
        for tensor in tensors:
            if tensor is not None and not tensor.data_ptr() and tensor.numel():
                raise TypeError(f"{self.kernel.name} cannot take a {type(tensor).__name__}, which has no memory itself")
        if device.type != "cuda":  # Triton's interpreter
            return function[self.grid](*given, *tail)
        with torch.cuda.device(device):
            return function[self.grid](*given, *tail, num_warps=self.num_warps, num_stages=self.num_stages)


def _launcher(compiled: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the function that launches a compiled kernel, and its arguments between stream and tensors.

    The `run` of an NVIDIA kernel is a Python object that allocates scratch memory and calls a C function. Without
    scratch memory the C function can be called directly, which saves 3 of 7 microseconds. This is done only for the
    version of Triton that was tested on a GPU, since the C function's arguments change from version to version.
    """
    run = compiled.run
    no_hooks = (None, None, None)  # launch metadata, hooks before and after the launch
    is_nvidia = type(run).__module__ == "triton.backends.nvidia.driver"
    if _TRITON == (3, 6) and is_nvidia and not (run.global_scratch_size or run.profile_scratch_size):
        attributes = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
        return run.launch, (*attributes, None, None, compiled.packed_metadata, *no_hooks)
    return run, (compiled.function, compiled.packed_metadata, *no_hooks)


def settle_hash(function: Any) -> None:
    """Let Triton hash the functions that a kernel calls before the kernel itself.

    When Triton hashes a function, it includes the constants of a called function only if that one was hashed already
    (`DependenciesFinder._update_hash`). A kernel's cache key would depend on which kernel the process launched before.
    """
    if isinstance(function, triton.JITFunction) and function.hash is None:
        for instruction in dis.get_instructions(function.fn):
            if instruction.opname == "LOAD_GLOBAL":  # other instructions name attributes
                settle_hash(function.fn.__globals__.get(instruction.argval))
        _ = function.cache_key


def kernel(function: Any) -> Kernel:
    """Make a `Kernel` of a `@triton.jit` function and register it."""
    return Kernel(function)


@contextlib.contextmanager
def record_launches(keep: bool = True) -> Iterator[MutableSequence[Launch]]:
    """Collect launches instead of running them, so that they can be compiled for a GPU that this machine lacks.

    If `keep` is false, launches and their tensors are dropped at once.
    """
    global _recorder
    previous, _recorder = _recorder, [] if keep else deque(maxlen=0)
    try:
        yield _recorder
    finally:
        _recorder = previous
