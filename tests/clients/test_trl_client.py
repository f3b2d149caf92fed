"""The client for TRL: the functions whose calls it counts, which it finds by name, exist."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

spec: Any = importlib.util.spec_from_file_location("trl_calls", Path(__file__).with_name("trl_calls.py"))
calls = importlib.util.module_from_spec(spec)
spec.loader.exec_module(calls)


def test_counted_functions_exist() -> None:
    for module, name in calls.PLACES:
        assert callable(getattr(module, name, None)), f"{module.__name__} has no {name}"
