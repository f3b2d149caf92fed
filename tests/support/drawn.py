"""Hypothesis, or stand-ins that skip its tests: GPU tests also run where there is PyTorch, Triton and pytest alone."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

__all__ = ["HealthCheck", "given", "settings", "st"]


class Absent:
    """A stand-in for every name of Hypothesis; as a decorator it skips a test."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and inspect.isfunction(args[0]) and args[0].__name__.startswith("test_"):
            return pytest.mark.skip(reason="Hypothesis is not installed")(args[0])
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self


try:
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st
except ModuleNotFoundError:
    HealthCheck = given = settings = st = Absent()
