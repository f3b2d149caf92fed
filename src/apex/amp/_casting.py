"""O1 and O4: PyTorch's autocast, switched on for the thread instead of for a block of code.

`initialize` switches it on, so that a loss that is computed outside the model is cast like the model's own operators.
During backward passes and optimizer steps it is off.

A model's forward pass runs in autocast blocks of its own (`run_cast`): so it is cast in other threads too, those of
nn.DataParallel, and PyTorch may keep the copies of weights that it casts until the pass is over, which it does from
2.11 on. Outside of models weights change between two uses, so autocast's cache is off there, and nowhere else. That
tells a model that finds autocast off why: with the cache off the user switched it off on the thread where amp is on,
and it stays off; with the cache on this is another thread, where nobody has switched it on yet.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..ops.autocast import RuleKernels, casts_off, device_types, modes_here, restored_by, set_casts

__all__ = ["active", "cast_as_here", "casts_off", "leave_thread", "run_cast", "suspended", "switch_off", "switch_on"]


# Up to PyTorch 2.10 autocast also keeps copies made under no_grad, and weights used again would get no gradient.
_KEEPS_COPIES = torch.__version__ >= "2.11"


class _Casting:
    """Whether functions are cast in this process."""

    def __init__(self) -> None:
        self.on = False
        # Kept here for torch.compile, which would look into the function that finds them.
        self.device_types: tuple[str, ...] = ()
        self.suspended = 0
        self.kernels: RuleKernels | None = None
        # The thread that `switch_on` was called in, until it is left.
        self.thread: threading.Thread | None = None


class _OfThread(threading.local):
    """This thread's autocast as `switch_on` left it, and what restores it; None where `switch_on` was not called."""

    modes: Any = None
    restore: Callable[[], None] | None = None


_state = _Casting()
_thread = _OfThread()


def active() -> bool:
    """Whether functions are cast here and now."""
    return _state.on and not _state.suspended and any(map(torch.is_autocast_enabled, _state.device_types))


def switch_on(dtype: torch.dtype, *, allow_banned: bool = False) -> None:
    """Casts operators on this thread, and inside models on every thread, from now on."""
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
    """Casts operators inside of models only.

    Where the thread's autocast is not what `switch_on` made of it, somebody else has set it since, and it is left as it
    is: the end of an autocast block in which `switch_on` was called, or the beginning of one that came later.
    """
    if _thread.restore is not None and modes_here() == _thread.modes:
        _thread.restore()
        _thread.modes = _thread.restore = None
        _state.thread = None


def switch_off() -> None:
    """Ends all casts. Only a thread itself can switch its autocast off: a warning says where it stays on."""
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
    """Nothing inside is cast, not even in models."""
    _state.suspended += 1
    try:
        with casts_off(cache=torch.is_autocast_cache_enabled()):
            yield
    finally:
        _state.suspended -= 1


def cast_as_here(function: Callable[[], Any]) -> Callable[[], Any]:
    """`function`, run under autocast as it is set here and now, wherever it is called."""
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
    """A model's forward pass under autocast, in whichever thread it runs, with copies of weights kept until its end."""
    if not _state.on or _state.suspended:
        return forward(*args, **kwargs)
    is_other_thread = torch.is_autocast_cache_enabled()
    names = [name for name in _state.device_types if is_other_thread or torch.is_autocast_enabled(name)]
    # Copies made without grad mode would carry no gradient; keep none.
    return _under(names, forward, dtype, _KEEPS_COPIES and torch.is_grad_enabled(), args, kwargs)


def _under(names: list[str], forward: Callable[..., Any], dtype: Any, cache: bool, args: Any, kwargs: Any) -> Any:
    """A forward pass in PyTorch's own autocast blocks, which torch.compile knows, one for each device type."""
    if not names:
        return forward(*args, **kwargs)
    with torch.autocast(names[0], dtype=dtype, cache_enabled=cache):
        return _under(names[1:], forward, dtype, cache, args, kwargs)
