"""Arguments that plugins accept for compatibility: find the changed ones, and warn of or refuse unsupported ones."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...checkpoint._ranks import is_first
from ...logging import get_dist_logger


def changed(init: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `init` whose value in `values` is not the default, by name."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(init).parameters.items()}
    return {name: values[name] for name, default in defaults.items() if name != "self" and values[name] != default}


def written(overrides: Mapping[str, Any], names: Iterable[str]) -> str:
    """Return "name=value, ..." for the arguments in `overrides` that `names` lists."""
    return ", ".join(f"{name}={overrides[name]!r}" for name in names if name in overrides)


def warn(message: str) -> None:
    """Warn in the first process; the warning names the line that made the plugin."""
    if is_first():
        warnings.warn(message, stacklevel=3)


def warn_of(overrides: Mapping[str, Any], names: str, why: str) -> None:
    """Warn in the first process if any of the named arguments was changed; `names` are separated by spaces."""
    unused = written(overrides, names.split())
    if unused and is_first():
        warnings.warn(f"no effect of {unused}: {why}", stacklevel=3)


def note(overrides: Mapping[str, Any], names: str, why: str) -> None:
    """Log a debug line in the first process if any of the named arguments was changed."""
    unused = written(overrides, names.split())
    if unused:
        get_dist_logger().debug(f"no effect of {unused}: {why}", ranks=[0])


def refuse(overrides: Mapping[str, Any], name: str, instead: str) -> None:
    """Raise NotImplementedError if the argument `name` was changed."""
    if name in overrides:
        raise NotImplementedError(f"{name}={overrides[name]!r} is not supported: {instead}")
