"""Base classes of tests that run in several processes."""

from .distributed_test_base import (
    DistributedTestBase,
    GlooDistributedTestBase,
    NcclDistributedTestBase,
    UccDistributedTestBase,
)

__all__ = ["DistributedTestBase", "GlooDistributedTestBase", "NcclDistributedTestBase", "UccDistributedTestBase"]
