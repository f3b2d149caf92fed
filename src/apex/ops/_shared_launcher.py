"""One C function that launches every kernel on NVIDIA GPUs under Triton 3.6.

Triton 3.6 writes and compiles C code for each list of argument types, which takes 0.36 s; from 3.7 on it has one
function for all. The function here takes 64-bit integers. The driver reads as many bytes of an argument as the kernel's
parameter has, and no argument after the last parameter. So addresses, integers and the bits of floats can be passed
as integers, and the rest of the arguments are zeros.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver

if TYPE_CHECKING:
    from ._launch import DirectLaunch

# Most kernels have at most 15 parameters besides constants. Each number of arguments is a function of its own.
CAPACITIES = (20, 64)
_NO_SCRATCH = {"global_scratch_size": 0, "profile_scratch_size": 0}
_NO_SCRATCH |= {"global_scratch_align": 1, "profile_scratch_align": 1}
_HOOKS = (None, None, None)  # launch metadata, hooks before and after the launch
_loading = threading.Lock()


@functools.cache
def _c_function(capacity: int) -> Callable[..., None]:
    """Return Triton's C function for a kernel of `capacity` 64-bit integers."""
    source = SimpleNamespace(constants={}, signature=dict.fromkeys(range(capacity), "i64"))
    metadata = SimpleNamespace(launch_cooperative_grid=False, launch_pdl=False, **_NO_SCRATCH)
    return nvidia.CudaLauncher(source, metadata).launch


@functools.cache
def _formats(count: int) -> tuple[struct.Struct, struct.Struct]:
    """Return the formats of `count` float32 numbers and of as many int32 numbers."""
    return struct.Struct(f"{count}f"), struct.Struct(f"{count}i")


def _float_bits(numbers: tuple[float, ...]) -> tuple[int, ...]:
    """Return the bits of numbers as float32; too large ones become infinite."""
    floats, integers = _formats(len(numbers))
    try:
        return integers.unpack(floats.pack(*numbers))
    except OverflowError:
        return integers.unpack((ctypes.c_float * len(numbers))(*numbers))


class SharedLauncher:
    """A launcher of a compiled kernel, called with the arguments of Triton's `CudaLauncher`."""

    def __init__(self, types: tuple[str, ...], metadata: Any) -> None:
        self._types = types
        self._kept = [index for index, type in enumerate(types) if type != "constexpr"]
        capacity = next(capacity for capacity in CAPACITIES if capacity >= len(self._kept))
        self._launch = _c_function(capacity)
        self._zeros = (0,) * (capacity - len(self._kept))
        # The last two are pointers to scratch memory, which these kernels do not use.
        self._attributes = (metadata.launch_cooperative_grid, metadata.launch_pdl, None, None)

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *arguments: Any) -> None:
        packed_metadata, hooks, arguments = arguments[0], arguments[1:4], arguments[4:]
        values = [_as_integer(arguments[index]) for index in self._kept]
        self._launch(x, y, z, stream, function, *self._attributes, packed_metadata, *hooks, *values, *self._zeros)

    def bind(self, compiled: Any, grid: tuple[int, ...], tensors: int, sizes: tuple[int, ...]) -> DirectLaunch:
        """Return a function that launches `compiled` on a stream, with addresses of all tensors and with floats."""
        kept = [index for index in self._kept if index < tensors]
        # A slice of one element keeps `itemgetter` from returning the element itself.
        select = operator.itemgetter(*kept) if len(kept) > 1 else operator.itemgetter(slice(kept[0], kept[0] + 1))
        every, floats_first = len(kept) == tensors, tensors + len(sizes)
        types, launch, zeros = self._types[tensors:floats_first], self._launch, self._zeros
        sizes = tuple(_signed(size) for size, type in zip(sizes, types, strict=True) if type != "constexpr")
        middle = (compiled.function, *self._attributes, compiled.packed_metadata, *_HOOKS)

        def launch_bound(stream: int, addresses: list[int], floats: tuple[float, ...]) -> None:
            present = addresses if every else select(addresses)
            bits = _float_bits(floats) if floats else ()
            launch(*grid, stream, *middle, *present, *sizes, *bits, *zeros)

        return launch_bound


def _signed(value: int) -> int:
    """Return the signed integer with the 64 bits of `value`."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _as_integer(value: Any) -> int:
    """Return an address, a float's bits or an integer. Raises ValueError for memory that a GPU cannot read."""
    if isinstance(value, float):
        return _float_bits((value,))[0]
    if not hasattr(value, "data_ptr"):
        return _signed(int(value))
    address = value.data_ptr()
    if address and value.device.type == "cpu" and not value.is_pinned():
        raise ValueError("a kernel on a GPU cannot read a CPU tensor that is not in pinned memory")
    return address


def make(source: Any, metadata: Any) -> Any:
    """Return a launcher of a compiled kernel: Triton's own if it has scratch memory, tuples or descriptors."""
    types = tuple(source.signature.values())
    plain = all(isinstance(type, str) and not type.startswith(("tensordesc", "nvTmaDesc")) for type in types)
    scratch = any(getattr(metadata, name) for name in ("global_scratch_size", "profile_scratch_size"))
    if not plain or scratch or len(types) - types.count("constexpr") > CAPACITIES[-1]:
        return nvidia.CudaLauncher(source, metadata)
    return SharedLauncher(types, metadata)


def load(compiled: Any) -> Any:
    """Load a compiled kernel onto the current GPU, with a launcher from `make`, and return it.

    Triton asks its driver for a launcher when it loads a kernel. The lock keeps two threads from restoring the driver's
    own function in the wrong order; a kernel of another library that is loaded meanwhile gets a launcher that works.
    """
    with _loading:
        active = driver.active
        before, active.launcher_cls = active.launcher_cls, make
        try:
            compiled._init_handles()
        finally:
            active.launcher_cls = before
    return compiled
