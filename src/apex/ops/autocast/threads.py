"""Autocast state of the current thread, for all device types at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

# Device types for which PyTorch may have autocast; only types that this machine has are used.
_CANDIDATES = ("cuda", "cpu", "npu", "xpu", "mps")


_found: tuple[str, ...] | None = None


def device_types() -> tuple[str, ...]:
    """Return the device types of this machine whose operators can be cast."""
    # Not functools.cache: torch.compile would trace the function behind it, and fail at a device type it lacks.
    global _found
    if _found is None:
        _found = tuple(name for name in _CANDIDATES if _has_autocast(name))
    return _found


def _has_autocast(device_type: str) -> bool:
    try:
        torch.get_autocast_dtype(device_type)
        module = getattr(torch, device_type, None)
        is_there = device_type == "cpu" or (module is not None and module.is_available())
        return bool(torch.amp.is_autocast_available(device_type) and is_there)
    except RuntimeError:
        return False


Modes = tuple[tuple[tuple[str, bool, torch.dtype], ...], bool]


def modes_here() -> Modes:
    """Return autocast's state: (device type, enabled, dtype) for each type, and whether casts of weights are cached."""
    modes = tuple((name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in device_types())
    return modes, torch.is_autocast_cache_enabled()


def restored_by() -> Callable[[], None]:
    """Return a function that sets autocast, on the thread that calls it, to the present state of this thread."""
    modes, cache = modes_here()

    def restore() -> None:
        for name, enabled, dtype in modes:
            torch.set_autocast_enabled(name, enabled)
            torch.set_autocast_dtype(name, dtype)
        torch.set_autocast_cache_enabled(cache)

    return restore


def set_casts(enabled: bool, dtype: torch.dtype | None, cache: bool) -> None:
    """Set autocast on this thread; `cache` says whether casts of weights are cached."""
    for name in device_types():
        torch.set_autocast_enabled(name, enabled)
        if dtype is not None:
            torch.set_autocast_dtype(name, dtype)
    torch.set_autocast_cache_enabled(cache)


@contextlib.contextmanager
def casts_off(cache: bool = True) -> Iterator[None]:
    """Switch autocast off inside the block, on this thread; `cache` says whether casts of weights are cached."""
    restore = restored_by()
    set_casts(False, None, cache)
    try:
        yield
    finally:
        restore()
