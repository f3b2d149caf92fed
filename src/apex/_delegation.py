"""Attributes of a wrapper that are stored in the wrapped object."""

from __future__ import annotations

from operator import attrgetter
from typing import Any


def delegated(wrapped: str, name: str) -> Any:
    """Return a property that reads and sets the attribute `name` of the wrapper's attribute `wrapped`."""

    def setter(self: Any, value: Any) -> None:
        setattr(getattr(self, wrapped), name, value)

    return property(attrgetter(f"{wrapped}.{name}"), setter, doc=f"`{name}` of `{wrapped}`.")
