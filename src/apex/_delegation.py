"""Attributes that a wrapper has from what it wraps."""

from __future__ import annotations

from operator import attrgetter
from typing import Any


def delegated(wrapped: str, name: str) -> Any:
    """The attribute `name` of the object that is the wrapper's attribute `wrapped`, to be read and set."""

    def setter(self: Any, value: Any) -> None:
        setattr(getattr(self, wrapped), name, value)

    return property(attrgetter(f"{wrapped}.{name}"), setter, doc=f"`{name}` of `{wrapped}`.")
