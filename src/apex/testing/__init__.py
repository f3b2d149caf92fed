"""What test suites of apex share: decorators that skip tests, by the environment."""

from .common_utils import SKIP_FLAKY_TEST, TEST_WITH_ROCM, skipFlakyTest, skipIfRocm

__all__ = ["SKIP_FLAKY_TEST", "TEST_WITH_ROCM", "skipFlakyTest", "skipIfRocm"]
