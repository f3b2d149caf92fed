"""`filter_attrs`, at upstream's path: scripts import it, although few use it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def filter_attrs(module: Any, attrs: Iterable[str]) -> list[str]:
    """Return the names in `attrs` that `module` has."""
    return [name for name in attrs if hasattr(module, name)]
