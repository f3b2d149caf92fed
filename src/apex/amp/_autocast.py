"""O1 and O4: PyTorch's autocast, switched on for a thread instead of for a block of code.

`initialize` switches it on, so that a loss computed outside the model is cast like the model's own operators. It is off
during backward passes and optimizer steps.

A model's forward pass runs in its own autocast blocks (`run_cast`). So it is also cast in other threads, such as those
that nn.DataParallel starts, and PyTorch can cache cast weights until the pass is over, which it does from 2.11 on.
Outside of models weights change between two uses, so autocast's cache is off there, and only there. A model that finds
autocast off can therefore tell why. If the cache is off, the user switched autocast off in the thread where amp is on,
and it stays off. If the cache is on, this is another thread, where autocast has not been switched on yet.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..ops.autocast import RuleKernels, casts_off, device_types, modes_here, restored_by, set_casts

# Up to PyTorch 2.10 autocast also caches copies made under no_grad, and weights used again would get no gradient.
_KEEPS_COPIES = torch.__version__ >= "2.11"


class _Casting:
    """The process-wide state of casting: whether functions are cast, and with which settings."""

    def __init__(self) -> None:
        self.on = False
        # Stored, because torch.compile would trace into the function that finds them.
        self.device_types: tuple[str, ...] = ()
        self.suspended = 0
        self.kernels: RuleKernels | None = None
        # The thread that called `switch_on`, until `leave_thread`.
        self.thread: threading.Thread | None = None


class _ThreadModes(threading.local):
    """The autocast modes that `switch_on` set on this thread, and a function that restores the former ones, or None."""

    modes: Any = None
    restore: Callable[[], None] | None = None


_state = _Casting()
_thread = _ThreadModes()


def active() -> bool:
    """Return whether functions are cast in this thread now."""
    return _state.on and not _state.suspended and any(map(torch.is_autocast_enabled, _state.device_types))


def switch_on(dtype: torch.dtype, *, allow_banned: bool = False) -> None:
    """Cast operators in this thread, and inside models in every thread, from now on."""
    if modes_here() != _thread.modes:
        _thread.restore = restored_by()
    if _state.kernels is None:
        _state.kernels = RuleKernels(allow_banned)
    _state.kernels.allow_banned = allow_banned
    _state.on = True
    _state.device_types = device_types()
    set_casts(True, dtype, cache=False)
    _thread.modes = modes_here()
    _state.thread = threading.current_thread()


def leave_thread() -> None:
    """Restore the thread's former autocast, so that operators are cast inside of models only.

    If the thread's autocast is not as `switch_on` set it, somebody else has set it since: an autocast block around
    `switch_on` ended, or a later one began. Then it is not changed.
    """
    if _thread.restore is not None and modes_here() == _thread.modes:
        _thread.restore()
        _thread.modes = _thread.restore = None
        _state.thread = None


def switch_off() -> None:
    """End all casts; warn if autocast stays on in another thread, because only that thread can switch it off."""
    leave_thread()
    if _state.thread not in (None, threading.current_thread()) and _state.thread.is_alive():
        warnings.warn(
            f"amp is shut down in thread {threading.current_thread().name!r}; autocast stays on in thread "
            f"{_state.thread.name!r}, which called amp.initialize: call amp.shutdown() there as well",
            stacklevel=3,
        )
    _state.on = False
    if _state.kernels is not None:
        _state.kernels.release()
        _state.kernels = None


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Switch all casts off inside the context, also in models."""
    _state.suspended += 1
    try:
        with casts_off(cache=torch.is_autocast_cache_enabled()):
            yield
    finally:
        _state.suspended -= 1


def cast_as_here(function: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that runs `function` under the autocast that is set now, wherever it is called."""
    set_as_here = restored_by()

    def run() -> Any:
        restore = restored_by()
        set_as_here()
        try:
            return function()
        finally:
            restore()

    return run


def run_cast(forward: Callable[..., Any], dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    """Run a model's forward pass under autocast, in any thread; cast weights are cached until it ends."""
    if not _state.on or _state.suspended:
        return forward(*args, **kwargs)
    is_other_thread = torch.is_autocast_cache_enabled()
    names = [name for name in _state.device_types if is_other_thread or torch.is_autocast_enabled(name)]
    # Copies made without grad mode would carry no gradient, so they are not cached.
    return _under(names, forward, dtype, _KEEPS_COPIES and torch.is_grad_enabled(), args, kwargs)


def _under(names: list[str], forward: Callable[..., Any], dtype: Any, cache: bool, args: Any, kwargs: Any) -> Any:
    """Run a forward pass inside one torch.autocast block per device type, which torch.compile can trace."""
    if not names:
        return forward(*args, **kwargs)
    with torch.autocast(names[0], dtype=dtype, cache_enabled=cache):
        return _under(names[1:], forward, dtype, cache, args, kwargs)
