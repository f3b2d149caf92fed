"""Facts about the device that launch rules need, read once per device, and a context for work on a stream."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_Answer = TypeVar("_Answer")

# On a CPU, PyTorch 2.6 rounds the sums in the backward pass of softmax and of attention to half precision.
SOFTMAX_SUMS_IN_HALF = torch.__version__ < "2.7"

# Types of GPUs that Triton kernels run on, by the names that other packages have for them; PyTorch calls both "cuda".
TRITON_DEVICES = ("cuda", "rocm")

# `current_device()` returns the index of the current GPU, and `current_stream(index)` the handle of its current stream,
# 0 for the default stream. They skip the checks of torch.cuda's functions: callers already hold tensors on that GPU.
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_stream = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)


# Compared by identity: facts are read once per device and are part of the cache keys of launch rules.
@dataclass(frozen=True, eq=False)
class DeviceFacts:
    """Properties of a device that launch rules read.

    `shared_memory` is the largest amount that one program can use, in bytes (LDS on AMD). `capability` is the compute
    capability of an NVIDIA GPU.
    """

    name: str
    backend: str  # "cuda", "hip" or "interpreter"
    multiprocessors: int
    warp_size: int
    shared_memory: int
    max_threads: int = 1024
    capability: tuple[int, int] = (0, 0)

    @property
    def publishes_for_all(self) -> bool:
        """Whether an atomic operation of one thread publishes the earlier stores of all threads of its program.

        False on AMD, where a wave waits only for its own stores (llvm/llvm-project#161638): in the code for gfx942 the
        other waves pass the barrier while their stores are still on the way.
        """
        return self.backend != "hip"


def next_power_of_2(value: int) -> int:
    """Return the smallest power of two that is at least `value`: Triton's blocks need such sizes."""
    return 1 << max(0, value - 1).bit_length()


# The allocation function that Inductor's generated code calls, if this PyTorch has it.
_empty_on_current: Any = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cuda", None
)


def empty_on(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """Return a function that allocates uninitialised tensors on `device` from sizes, strides and a dtype.

    Sizes and strides must be tuples, not torch.Size. On the current GPU an allocation takes 1.0 us, where
    `torch.empty_like` and `torch.empty` take 1.6 us and more.
    """
    index = device.index
    if index is not None and index == current_device() and _empty_on_current is not None and _pretended is None:
        return _empty_on_current
    return functools.partial(_empty, device)


def _empty(device: torch.device, sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate like the function for the current GPU, which refuses torch.Size: tests without a GPU must see that."""
    if type(sizes) is not tuple or type(strides) is not tuple:
        raise TypeError(f"sizes and strides must be tuples, got {type(sizes).__name__} and {type(strides).__name__}")
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device)


def contiguous_strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous, non-empty tensor of these sizes."""
    strides = [1]
    for size in sizes[:0:-1]:
        strides.append(strides[-1] * size)
    return tuple(strides[::-1][: len(sizes)])


# The one cache of launches: the answers of launch rules, prepared kernels among them, by rule and arguments.
_answers = functools.lru_cache(maxsize=1 << 15)(types.FunctionType.__call__)


def launch_rule(rule: Callable[..., _Answer]) -> Callable[..., _Answer]:
    """Cache the answers of a launch rule: a function of a few numbers and a device or its facts.

    Without the cache a rule takes the host 1 to 5 us, as long as a launch.
    """
    return functools.partial(_answers, rule)


def forget_launches() -> None:
    """Clear the cache of launches, after a change of the tuned launches or of the device they depend on."""
    _answers.cache_clear()


# Triton's interpreter runs one program after the other; few programs keep it quick, and more than one keeps the
# persistent kernels honest about the rows they skip.
INTERPRETER = DeviceFacts("Triton interpreter", "interpreter", multiprocessors=3, warp_size=32, shared_memory=96 * 1024)

_pretended: DeviceFacts | None = None


@functools.cache
def _read_facts(device: torch.device) -> DeviceFacts:
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    hip = torch.version.hip is not None
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or getattr(
        properties, "shared_memory_per_block", 0
    )
    return DeviceFacts(
        name=properties.name,
        backend="hip" if hip else "cuda",
        multiprocessors=properties.multi_processor_count,
        warp_size=getattr(properties, "warp_size", 64 if hip else 32),
        shared_memory=shared or 48 * 1024,
        capability=(0, 0) if hip else (properties.major, properties.minor),
    )


def facts(device: torch.device) -> DeviceFacts:
    """Return the facts of `device`, or the interpreter's facts if the device is not a GPU."""
    if _pretended is not None:
        return _pretended
    if device.index is None and device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return _read_facts(device)


def pretends() -> bool:
    """Return whether launches are planned for another device, with tensors without memory in place of real ones."""
    return _pretended is not None


def real_tensors() -> contextlib.AbstractContextManager:
    """Return a context that lets the host make and read real tensors even while launches are planned."""
    return _disable_current_modes() if pretends() else contextlib.nullcontext()


@contextlib.contextmanager
def pretend(other: DeviceFacts) -> Iterator[None]:
    """Plan launches for a device that may be absent: tensors without memory represent tensors on it."""
    global _pretended
    forget_launches()
    previous, _pretended = _pretended, other
    try:
        yield
    finally:
        _pretended = previous
        forget_launches()


@contextlib.contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """Queue the work inside this context on `stream`, after work queued on the current stream.

    If it is None, the work stays on the current stream.
    """
    if stream is None:
        yield
        return
    current = torch.accelerator.current_stream(stream.device)
    stream.wait_stream(current)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(current)
