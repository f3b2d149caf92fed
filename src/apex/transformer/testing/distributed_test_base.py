"""The bases of tests in several processes, under the name that they have here."""

from ...distributed_testing import (
    DistributedTestBase,
    GlooDistributedTestBase,
    NcclDistributedTestBase,
    UccDistributedTestBase,
)

__all__ = ["DistributedTestBase", "GlooDistributedTestBase", "NcclDistributedTestBase", "UccDistributedTestBase"]
