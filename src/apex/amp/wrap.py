"""Functions of a module replaced by ones that cast their arguments, until `amp.shutdown`.

amp itself replaces no function, but for those that a user registered; these are for scripts that call them by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from . import utils
from ._amp_state import HALF
from .amp import _tensors_of, _widest, with_changed_arguments

_Arguments = tuple[Any, dict[str, Any]]


def _wrapper(
    function: Callable[..., Any], handle: Any, change: Callable[[Any, dict[str, Any]], _Arguments]
) -> Callable[..., Any]:
    """`function` with other arguments while `handle` is active."""
    return with_changed_arguments(function, lambda: handle is None or handle.is_active(), change)


def _to_widest(args: Any, kwargs: dict[str, Any]) -> _Arguments:
    dtype = _widest(args, kwargs)
    if dtype is None:
        return args, kwargs
    cast = functools.partial(utils._maybe, dtype, name="", verbose=False)
    return [cast(argument) for argument in args], {key: cast(value) for key, value in kwargs.items()}


def make_cast_wrapper(
    orig_fn: Callable[..., Any], cast_fn: Callable[[Any], Any], handle: Any, try_caching: bool = False
) -> Callable[..., Any]:
    """`orig_fn` with `cast_fn` on its arguments. Copies of weights are not kept, whatever `try_caching` says."""
    return _wrapper(orig_fn, handle, lambda args, kwargs: (utils.casted_args(cast_fn, args, kwargs), kwargs))


def make_promote_wrapper(
    orig_fn: Callable[..., Any], cast_fn: Callable[..., Any], handle: Any = None
) -> Callable[..., Any]:
    """`orig_fn` with its arguments in the widest type among them; `cast_fn` is not needed for it."""
    return _wrapper(orig_fn, handle, _to_widest)


def cached_cast(
    mod: Any, fn: str, cast_fn: Callable[..., Any], handle: Any, try_caching: bool = False, verbose: bool = False
) -> None:
    """Puts `cast_fn` on the arguments of `mod.fn`."""
    if hasattr(mod, fn):
        cast = utils.verbosify(cast_fn, fn, verbose)
        utils.set_func_save(handle, mod, fn, make_cast_wrapper(getattr(mod, fn), cast, handle, try_caching))


def promote(mod: Any, fn: str, handle: Any, verbose: bool = False) -> None:
    """Runs `mod.fn` in the widest type among its arguments."""
    if hasattr(mod, fn):
        utils.set_func_save(handle, mod, fn, make_promote_wrapper(getattr(mod, fn), utils.maybe_float, handle))


def sequence_promote(mod: Any, fn: str, handle: Any, verbose: bool = False) -> None:
    """Runs `mod.fn` in the widest type of the sequence that is its first argument."""
    promote(mod, fn, handle, verbose)


def promote_match_arg0(mod: Any, fn: str, handle: Any, verbose: bool = False) -> None:
    """Runs `mod.fn` in the type of its first argument."""
    if not hasattr(mod, fn):
        return

    def match(args: Any, kwargs: dict[str, Any]) -> _Arguments:
        cast = functools.partial(utils._maybe, args[0].dtype, name=fn, verbose=verbose)
        return [args[0], *map(cast, args[1:])], {key: cast(value) for key, value in kwargs.items()}

    utils.set_func_save(handle, mod, fn, _wrapper(getattr(mod, fn), handle, match))


def _refuse(mod: Any, fn: str, handle: Any, message: str, first_only: bool) -> None:
    if not hasattr(mod, fn):
        return

    def check(args: Any, kwargs: dict[str, Any]) -> _Arguments:
        if any(tensor.dtype in HALF for tensor in _tensors_of(args[:1] if first_only else (args, kwargs))):
            raise NotImplementedError(message)
        return args, kwargs

    utils.set_func_save(handle, mod, fn, _wrapper(getattr(mod, fn), handle, check))


def err_if_any_half(mod: Any, fn: str, handle: Any, custom_err_msg: str | None = None) -> None:
    """Lets `mod.fn` raise NotImplementedError where an argument is in half precision."""
    _refuse(mod, fn, handle, custom_err_msg or f"{fn} is refused in half precision under amp", first_only=False)


def err_if_arg0_half(mod: Any, fn: str, handle: Any, verbose: bool = False) -> None:
    """Lets `mod.fn` raise NotImplementedError where its first argument is in half precision."""
    _refuse(mod, fn, handle, f"{fn} is refused on tensors in half precision under amp", first_only=True)
