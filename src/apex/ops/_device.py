"""Facts about the device that launch rules need, read once per device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_Answer = TypeVar("_Answer")

# On a CPU PyTorch 2.6 rounds the sums of a softmax's backward pass, attention's too, to half precision.
SOFTMAX_SUMS_IN_HALF = torch.__version__ < "2.7"

# The index of the current GPU, and from such an index the handle of its current stream, 0 being the default one.
# Without the checks of torch.cuda.current_device() and current_stream(): where these are asked, tensors are on it.
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_stream = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)


# Compared by identity: facts are read once per device and are part of the keys under which launch rules keep answers.
@dataclass(frozen=True, eq=False)
class DeviceFacts:
    """What a launch rule may ask about a device.

    `shared_memory` is the most one program can use, in bytes (LDS on AMD).
    """

    name: str
    backend: str  # "cuda", "hip" or "interpreter"
    multiprocessors: int
    warp_size: int
    shared_memory: int
    max_threads: int = 1024

    @property
    def publishes_for_all(self) -> bool:
        """Whether an atomic of one thread publishes what all threads of its program stored before their barrier.

        Not on AMD, where a wave waits for its own stores alone (llvm/llvm-project#161638): in the code for gfx942 the
        other waves pass the barrier with theirs on the way.
        """
        return self.backend != "hip"


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is not below `value`: blocks of Triton have such sizes."""
    return 1 << max(0, value - 1).bit_length()


# What the code that Inductor writes calls, if PyTorch has it.
_empty_on_current: Any = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cuda", None
)


def empty_on(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """A function of sizes, strides (tuples, no torch.Size) and a dtype that makes uninitialised tensors on `device`.

    On the current GPU it takes 1.0 us, where `torch.empty_like` and `torch.empty` take 1.6 and more.
    """
    index = device.index
    if index is not None and index == current_device() and _empty_on_current is not None and _pretended is None:
        return _empty_on_current
    return lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype, device=device)


def contiguous_strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor that is not empty."""
    strides = [1]
    for size in sizes[:0:-1]:
        strides.append(strides[-1] * size)
    return tuple(strides[::-1][: len(sizes)])


_kept_rules: list[Any] = []


def launch_rule(rule: Callable[..., _Answer]) -> functools._lru_cache_wrapper[_Answer]:
    """Keeps the answers of a rule, a function of a few numbers and a device or its facts.

    A rule takes the host 1 to 5 us, as long as a launch.
    """
    kept = functools.lru_cache(maxsize=1024)(rule)
    _kept_rules.append(kept)
    return kept


def forget_launches() -> None:
    """Lets every rule answer anew, where something that rules look at has changed: tuned launches, or the device."""
    for rule in _kept_rules:
        rule.cache_clear()


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
    )


def facts(device: torch.device) -> DeviceFacts:
    """The facts of `device`; of the interpreter for a device that is not a GPU."""
    if _pretended is not None:
        return _pretended
    if device.index is None and device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    return _read_facts(device)


def pretends() -> bool:
    """Whether launches are planned for another device, for which tensors without memory stand in."""
    return _pretended is not None


def real_tensors() -> contextlib.AbstractContextManager:
    """Lets the host make tensors that it reads, where launches are planned and all new ones would be fake."""
    return _disable_current_modes() if pretends() else contextlib.nullcontext()


@contextlib.contextmanager
def pretend(other: DeviceFacts) -> Iterator[None]:
    """`stand_ins` for a device that is not here, to compile kernels for it: launch rules answer anew."""
    forget_launches()
    try:
        with stand_ins(other):
            yield
    finally:
        forget_launches()


@contextlib.contextmanager
def stand_ins(device: DeviceFacts) -> Iterator[None]:
    """Lets tensors without memory stand for those of `device`; launch rules keep what they have answered for it."""
    global _pretended
    previous, _pretended = _pretended, device
    try:
        yield
    finally:
        _pretended = previous
