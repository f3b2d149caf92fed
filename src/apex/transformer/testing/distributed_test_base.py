"""The bases of tests in several processes, and whether UCC can be tested, under their names of `apex.transformer`."""

from ...distributed_testing.distributed_test_base import (
    HAS_TORCH_UCC,
    HAS_TORCH_UCC_COMPAT_NVIDIA_DRIVER,
    DistributedTestBase,
    GlooDistributedTestBase,
    NcclDistributedTestBase,
    UccDistributedTestBase,
)

__all__ = [
    "HAS_TORCH_UCC",
    "HAS_TORCH_UCC_COMPAT_NVIDIA_DRIVER",
    "DistributedTestBase",
    "GlooDistributedTestBase",
    "NcclDistributedTestBase",
    "UccDistributedTestBase",
]
