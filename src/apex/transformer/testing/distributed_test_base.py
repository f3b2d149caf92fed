"""Re-exports of the base classes of multi-process tests from `apex.distributed_testing`."""

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
