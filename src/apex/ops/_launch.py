"""The one launcher of Triton kernels.

`@kernel` above `@triton.jit` makes a `Kernel`, which is called with a grid and the kernel's arguments. From the second
call with the same dtypes, sizes and constants on, the compiled kernel is launched directly, with addresses in place of
tensors: by one C function for all kernels under Triton 3.6 (`_shared_launcher`), else by the kernel's `run`. This takes
less than half the host time of Triton's `function[grid](...)`.
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
from ._library import LazyModule

shared_launcher = LazyModule(f"{__package__}._shared_launcher")

KERNELS: dict[str, Kernel] = {}

_recorder: MutableSequence[Launch] | None = None

_TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
# Up to Triton 3.9 a compiled kernel's `run` takes the arguments given here; newer versions are launched plainly.
_RUN_IS_KNOWN = _TRITON <= (3, 9)
SHARES_LAUNCHER = _TRITON == (3, 6) and torch.version.hip is None
_ALIGNMENT = 16

# Launches a compiled kernel on a stream, with the addresses of all its tensors and with its floats.
DirectLaunch = Callable[[int, "list[int]", tuple[float, ...]], None]


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
        # because Triton specialises on alignment. Value: the direct launch, and the number of absent tensors.
        self._compiled: dict[Any, tuple[DirectLaunch, int]] = {}

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
        launch, absent = compiled
        if addresses.count(0) != absent:
            self._launch_plainly(tensors, tuple(map(float, floats)))
            return
        if current_device() != index:
            with torch.cuda.device(index):
                self(tensors, floats)
            return
        launch(current_stream(index), addresses, floats)

    def direct(self, tensors: tuple[Tensor, ...]) -> DirectLaunch | None:
        """Return the direct launch for tensors of these dtypes on this device; None if there is none yet.

        It takes the host less time than a call, because it tests nothing: all addresses must be multiples of 16, and
        the stream must be one of the current device.
        """
        compiled = self._compiled.get((tensors[0].get_device(), *[tensor.dtype for tensor in tensors]))
        return None if compiled is None else compiled[0]

    def _record(
        self, recorder: MutableSequence[Launch], tensors: tuple[Tensor | None, ...], floats: tuple[float, ...]
    ) -> None:
        """Record the launch. Reads no addresses, because meta tensors have none."""
        device = tensors[0].device  # type: ignore[union-attr]
        recorder.append(Launch(self, device, tensors, tuple(map(float, floats))))

    def _launch_first(self, key: Any, tensors: tuple[Tensor | None, ...], floats: tuple[float, ...]) -> None:
        device = tensors[0].device  # type: ignore[union-attr]
        by_address = not any(isinstance(tensor, Described) for tensor in tensors)
        try:
            compiled = self._launch_plainly(tensors, floats, share=SHARES_LAUNCHER and by_address)
        except OutOfResources as error:
            table = _env.tuned_launches()
            cause = "" if table is None else f"; the table that APEX_TUNED names, {table}, may be the cause"
            raise RuntimeError(f"{self.kernel.name} needs more than this GPU has: {error}{cause}") from error
        if _RUN_IS_KNOWN and by_address and device.type == "cuda" and device.index is not None:
            absent = sum(tensor is None or not tensor.data_ptr() for tensor in tensors)
            self._compiled[key] = self._direct_launch(compiled, len(tensors)), absent

    def _direct_launch(self, compiled: Any, tensors: int) -> DirectLaunch:
        """Return the direct launch of a compiled kernel with this number of tensors, absent ones included."""
        run = compiled.run
        if hasattr(run, "bind"):  # a `SharedLauncher`
            return run.bind(compiled, self._head, tensors, self.sizes)
        head, middle = self._head, (compiled.function, compiled.packed_metadata, None, None, None)
        sizes, constants = self.sizes, self.constants

        def launch(stream: int, addresses: list[int], floats: tuple[float, ...]) -> None:
            run(*head, stream, *middle, *addresses, *sizes, *floats, *constants)

        return launch

    def _launch_plainly(
        self, tensors: tuple[Tensor | None, ...], floats: tuple[float, ...], share: bool = False
    ) -> Any:
        device: Any = tensors[0].device  # type: ignore[union-attr]
        function, tail = self.kernel.function, (*self.sizes, *floats, *self.constants)
        arguments = (*map(as_argument, tensors), *tail)
        for tensor in tensors:
            if tensor is not None and not tensor.data_ptr() and tensor.numel():
                raise TypeError(f"{self.kernel.name} cannot take a {type(tensor).__name__}, which has no memory itself")
        if device.type != "cuda":  # Triton's interpreter
            return function[self.grid](*arguments)
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        with torch.cuda.device(device):
            if share:
                compiled = function.run(*arguments, grid=self.grid, warmup=True, **options)
                if compiled is not None:  # Triton's hook for a user's own cache may answer instead
                    shared_launcher.load(compiled)
            return function[self.grid](*arguments, **options)


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
