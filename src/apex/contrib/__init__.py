"""Further fused modules and optimizers; subpackages are imported at first use."""

from __future__ import annotations

import importlib
from typing import Any

_SUBPACKAGES = frozenset({"layer_norm"})


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBPACKAGES})
