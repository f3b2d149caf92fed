"""Casts of user functions, and `init`, the older way to switch casting on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import _autocast, lists
from ._amp_state import _amp_state
from ._checks import check_flags, check_type
from ._containers import applier, to_type
from .opt import AmpHandle, NoOpHandle

F = TypeVar("F", bound=Callable[..., Any])

# (module, name, cast) of functions to replace while casts are on.
_registered: list[tuple[Any, str, str]] = []


# The dtype that arguments are cast to; None for the widest dtype among them.
_DTYPES = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32, "promote": None}


def _widest(values: Any) -> torch.dtype | None:
    """Return the dtype that floating-point tensors in nested containers promote to; None if there are none."""
    dtypes = []

    def note(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            dtypes.append(value.dtype)
        return value

    applier(values, note)
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None


def _wrapped(function: Callable[..., Any], cast: str) -> Callable[..., Any]:
    """Return `function` with its floating-point arguments cast (a key of `_DTYPES`) while casts are on.

    A function of PyTorch then runs without autocast, in the chosen dtype. Operators that a user's own function calls
    are cast by autocast as usual.
    """
    without_casts = _is_of_torch(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not _autocast.active():
            return function(*args, **kwargs)
        dtype = _DTYPES[cast] or _widest((args, kwargs))
        if dtype is not None:
            cast_tensor = lambda value: to_type(dtype, value) if isinstance(value, Tensor) else value  # noqa: E731
            args, kwargs = applier(args, cast_tensor), applier(kwargs, cast_tensor)
        if not without_casts:
            return function(*args, **kwargs)
        with _autocast.casts_off(cache=torch.is_autocast_cache_enabled()):
            return function(*args, **kwargs)

    return wrapper


def _is_of_torch(function: Any) -> bool:
    """Return whether a function is a PyTorch operator or made of them: `torch.einsum`, `F.softmax`, `Tensor.add`."""
    owner = getattr(function, "__objclass__", None) or getattr(function, "__self__", None)
    homes = getattr(function, "__module__", None), getattr(owner, "__module__", None), getattr(owner, "__name__", None)
    home = next(filter(None, homes), None)
    known = ("torch", "torch.functional", "torch.nn.functional", "torch._tensor")
    return home in known or str(home).startswith("torch._C")


def half_function(fn: F) -> F:
    """Decorate a function so that its floating-point arguments become float16 while casts are on."""
    return _wrapped(fn, "half")  # type: ignore[return-value]


def bfloat16_function(fn: F) -> F:
    """Decorate a function so that its floating-point arguments become bfloat16 while casts are on."""
    return _wrapped(fn, "bfloat16")  # type: ignore[return-value]


def float_function(fn: F) -> F:
    """Decorate a function so that its floating-point arguments become float32 while casts are on."""
    return _wrapped(fn, "float")  # type: ignore[return-value]


def promote_function(fn: F) -> F:
    """Decorate a function so that its floating-point arguments get the widest dtype among them while casts are on."""
    return _wrapped(fn, "promote")  # type: ignore[return-value]


def _check_name(module: Any, name: str) -> None:
    if not hasattr(module, name):
        raise ValueError(f"no function named {name} in module {module}")


def _register(module: Any, name: str, cast: str) -> None:
    _check_name(module, name)
    _registered.append((module, name, cast))


def register_half_function(module: Any, name: str) -> None:
    """Make `module.name` take float16 arguments; call it before `initialize`."""
    _register(module, name, "half")


def register_bfloat16_function(module: Any, name: str) -> None:
    """Make `module.name` take bfloat16 arguments; call it before `initialize`."""
    _register(module, name, "bfloat16")


def register_float_function(module: Any, name: str) -> None:
    """Make `module.name` take float32 arguments; call it before `initialize`."""
    _register(module, name, "float")


def register_promote_function(module: Any, name: str) -> None:
    """Make `module.name` take arguments of the widest dtype among them; call it before `initialize`."""
    _register(module, name, "promote")


def apply_registrations(dtype: torch.dtype) -> None:
    """Replace all functions that were registered or moved to another list, or none; shutdown restores them."""
    undo: list[Callable[[], None]] = []
    try:
        for module, name, cast in [*_registered, *lists.changes(dtype)]:
            _check_name(module, name)
            original = getattr(module, name)
            setattr(module, name, _wrapped(original, cast))
            undo.append(functools.partial(setattr, module, name, original))
    except BaseException:
        while undo:
            undo.pop()()
        raise
    _amp_state.undo.extend(undo)
    _registered.clear()


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    patch_type: torch.dtype = torch.float16,
) -> AmpHandle | NoOpHandle:
    """Switch casting on for this thread and return a handle: the interface that preceded `initialize`.

    With `allow_banned`, functions that otherwise raise in half precision (`binary_cross_entropy`) run in float32.
    """
    check_flags(enabled=enabled, enable_caching=enable_caching, verbose=verbose, allow_banned=allow_banned)
    check_type("patch_type", patch_type, (torch.float16, torch.bfloat16))
    if not enabled:
        return NoOpHandle()
    handle = AmpHandle(loss_scale, enable_caching, verbose)
    apply_registrations(patch_type)
    _autocast.switch_on(patch_type, allow_banned=allow_banned)
    _amp_state.handle = handle
    return handle
