"""Decorators that skip a test if `APEX_TEST_WITH_ROCM=1` or `APEX_SKIP_FLAKY_TEST=1` is set."""

from __future__ import annotations

import functools
import unittest
from collections.abc import Callable
from typing import Any, TypeVar

from .._env import is_one

F = TypeVar("F", bound=Callable[..., Any])

TEST_WITH_ROCM = is_one("APEX_TEST_WITH_ROCM")
SKIP_FLAKY_TEST = is_one("APEX_SKIP_FLAKY_TEST")


def _skipping(fn: F, skip: Callable[[], bool], reason: str) -> F:
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if skip():
            raise unittest.SkipTest(reason)
        return fn(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def skipIfRocm(fn: F) -> F:
    """Skip the test on AMD GPUs, that is if `TEST_WITH_ROCM` is True."""
    return _skipping(fn, lambda: TEST_WITH_ROCM, f"{fn.__name__} does not work on ROCm")


def skipFlakyTest(fn: F) -> F:
    """Skip the test if `SKIP_FLAKY_TEST` is True."""
    return _skipping(fn, lambda: SKIP_FLAKY_TEST, f"{fn.__name__} does not pass every time")
