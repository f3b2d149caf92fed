"""Subpackages that are imported at first use, so that importing a package is quick and starts no CUDA context."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ._refused import reason_for


def lazy_subpackages(
    package: str, names: Iterable[str], members: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for the module `package`, whose subpackages `names` become attributes.

    `members` maps the names of further attributes to the modules below `package` that define them. The AttributeError
    of a name of Colossal-AI without a counterpart says so; imports of it raise `_refused.Refusals`'s error.
    """
    known, members = frozenset(names), members or {}

    def get_attribute(name: str) -> Any:
        if name in known:
            return importlib.import_module(f"{package}.{name}")
        if name in members:
            return getattr(importlib.import_module(f"{package}.{members[name]}"), name)
        reason = reason_for(f"{package}.{name}".removeprefix("apex."))
        raise AttributeError(reason or f"module {package!r} has no attribute {name!r}")

    def list_attributes() -> list[str]:
        return sorted({*vars(sys.modules[package]), *known, *members})

    return get_attribute, list_attributes
