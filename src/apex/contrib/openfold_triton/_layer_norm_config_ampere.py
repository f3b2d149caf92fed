"""Tuned layer norm launches by degree of parallelism, as client code expects them; empty, because none are needed."""

from __future__ import annotations

from typing import Any

_auto_tuned_config_ampere: dict[int, dict[str, Any]] = {size: {} for size in (0, 1, 2, 4, 8)}
