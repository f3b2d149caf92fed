"""Autocast as it is set on the thread, for every device type at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

# Device types for which PyTorch may have autocast; those that are there are used.
_CANDIDATES = ("cuda", "cpu", "npu", "xpu", "mps")


_found: tuple[str, ...] | None = None


def device_types() -> tuple[str, ...]:
    """The device types of this machine whose operators can be cast."""
    global _found  # not functools.cache: torch.compile would trace the function behind it, and fail at a type it lacks
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
    """Autocast on this thread: (device type, on or off, dtype) of each, and whether copies of weights are kept."""
    modes = tuple((name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in device_types())
    return modes, torch.is_autocast_cache_enabled()


def restored_by() -> Callable[[], None]:
    """A function that sets autocast on the thread that calls it as it is here and now."""
    modes, cache = modes_here()

    def restore() -> None:
        for name, enabled, dtype in modes:
            torch.set_autocast_enabled(name, enabled)
            torch.set_autocast_dtype(name, dtype)
        torch.set_autocast_cache_enabled(cache)

    return restore


def set_casts(enabled: bool, dtype: torch.dtype | None, cache: bool) -> None:
    """Sets autocast on this thread; `cache` says whether copies of weights are kept."""
    for name in device_types():
        torch.set_autocast_enabled(name, enabled)
        if dtype is not None:
            torch.set_autocast_dtype(name, dtype)
    torch.set_autocast_cache_enabled(cache)


@contextlib.contextmanager
def casts_off(cache: bool = True) -> Iterator[None]:
    """Switches autocast off inside, on this thread; `cache` says whether copies of weights are kept."""
    restore = restored_by()
    set_casts(False, None, cache)
    try:
        yield
    finally:
        restore()
