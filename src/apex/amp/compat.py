"""An upstream function that scripts import, mostly unused; editors offer it for completion."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def filter_attrs(module: Any, attrs: Iterable[str]) -> list[str]:
    """Return the names in `attrs` that `module` has."""
    return [name for name in attrs if hasattr(module, name)]
