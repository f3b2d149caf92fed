"""O1 and O4: PyTorch's autocast, switched on for the thread instead of for a block of code.

`initialize` switches it on, so that a loss that is computed outside the model is cast like the model's own operators.
The copies of weights that autocast keeps live only inside a model's forward pass: outside, weights change. During
backward passes and optimizer steps it is off.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Device types for which PyTorch may have autocast; those that this build knows are used.
_CANDIDATES = ("cuda", "cpu", "npu", "xpu", "mps")


@functools.cache
def device_types() -> tuple[str, ...]:
    """The device types whose operators are cast."""
    return tuple(name for name in _CANDIDATES if _has_autocast(name))


def _has_autocast(device_type: str) -> bool:
    try:
        torch.get_autocast_dtype(device_type)
        return bool(torch.amp.is_autocast_available(device_type)) and _exists(device_type)
    except RuntimeError:
        return False


def _exists(device_type: str) -> bool:
    if device_type == "cpu":
        return True
    module = getattr(torch, device_type, None)
    return module is not None and bool(module.is_available())


class _ThreadState:
    """Autocast as it is set on this thread."""

    def __init__(self) -> None:
        self.modes = [
            (name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in device_types()
        ]
        self.cache = torch.is_autocast_cache_enabled()

    def restore(self) -> None:
        for name, enabled, dtype in self.modes:
            torch.set_autocast_enabled(name, enabled)
            torch.set_autocast_dtype(name, dtype)
        torch.set_autocast_cache_enabled(self.cache)


def _set(enabled: bool, dtype: torch.dtype | None, cache: bool) -> None:
    for name in device_types():
        torch.set_autocast_enabled(name, enabled)
        if dtype is not None:
            torch.set_autocast_dtype(name, dtype)
    torch.set_autocast_cache_enabled(cache)


def switch_on(dtype: torch.dtype) -> Callable[[], None]:
    """Casts operators on this thread from now on; the result undoes it."""
    before = _ThreadState()
    _set(True, dtype, cache=False)
    return before.restore


def switch_off() -> None:
    """Casts nothing on this thread from now on."""
    _set(False, None, cache=True)


@contextlib.contextmanager
def casts(enabled: bool, dtype: torch.dtype | None = None, cache: bool = False) -> Iterator[None]:
    """Switches casting on or off inside, on this thread."""
    before = _ThreadState()
    _set(enabled, dtype, cache)
    try:
        yield
    finally:
        before.restore()


def casting_forward(forward: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """A model's forward pass under autocast, in whichever thread it runs, with copies of weights kept until its end."""

    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not _wanted():
            return forward(*args, **kwargs)
        # Copies made without grad mode would carry no gradient; keep none.
        with casts(True, dtype, cache=torch.is_grad_enabled()):
            torch.autocast_increment_nesting()
            try:
                return forward(*args, **kwargs)
            finally:
                if torch.autocast_decrement_nesting() == 0:
                    torch.clear_autocast_cache()

    return wrapper


def _wanted() -> bool:
    """False inside `disable_casts`, whose wish a model called there must follow."""
    return not _suspended.depth


class _Suspended:
    depth = 0


_suspended = _Suspended()


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Casts nothing inside, models included."""
    _suspended.depth += 1
    try:
        with casts(False):
            yield
    finally:
        _suspended.depth -= 1
