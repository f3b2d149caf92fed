"""Decorators for apex's test suites that skip tests depending on the environment."""

from .common_utils import SKIP_FLAKY_TEST, TEST_WITH_ROCM, skipFlakyTest, skipIfRocm

__all__ = ["SKIP_FLAKY_TEST", "TEST_WITH_ROCM", "skipFlakyTest", "skipIfRocm"]
