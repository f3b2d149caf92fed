"""Tests in several processes: each test of a class runs in every process of an initialized process group.

The classes derive from PyTorch's own base class, which needs the package `expecttest`.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase

# Names of the original module, which test suites import to decide what to skip. UCC needs a driver from 470.42 on;
# a CUDA build of any PyTorch that apex supports starts on no older one.
HAS_TORCH_UCC: bool = dist.is_available() and dist.is_ucc_available()
HAS_TORCH_UCC_COMPAT_NVIDIA_DRIVER: bool = torch.version.cuda is not None and torch.cuda.is_available()


class DistributedTestBase(MultiProcessTestCase):
    """A test case that starts `world_size` processes per test, each with a process group and, with GPUs, one GPU.

    A subclass may set `DISTRIBUTED_BACKEND`, override `world_size`, and prepare files or the environment for all
    processes in `_setup_pre_spawn`. Without a GPU the backend is gloo, with two processes.
    """

    DISTRIBUTED_BACKEND: str | None = None

    def setUp(self) -> None:
        super().setUp()
        self._setup_pre_spawn()
        self._spawn_processes()

    def _setup_pre_spawn(self) -> None:
        """Prepare the test; called before processes start."""

    def tearDown(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        super().tearDown()

    @property
    def world_size(self) -> int:
        """Return the number of processes: one per GPU, four at most, or two without GPUs."""
        return min(torch.cuda.device_count(), 4) or 2

    @property
    def init_method(self) -> str:
        """Return the URL of the file through which the processes find each other."""
        return f"file://{self.file_name}"

    @property
    def destroy_pg_upon_exit(self) -> bool:
        """Return False: `_run` destroys the group, so that PyTorch's base class need not."""
        return False

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, parent_pipe: Any, **kwargs: Any) -> None:
        """Run the test in one of the processes."""
        self = cls(test_name)
        self.rank = rank
        self.file_name = file_name
        gpus = torch.cuda.device_count()
        dist.init_process_group(
            init_method=self.init_method,
            backend=cls.DISTRIBUTED_BACKEND if gpus else dist.Backend.GLOO,
            world_size=self.world_size,
            rank=rank,
        )
        if gpus:
            torch.cuda.set_device(rank % gpus)
        dist.barrier()
        self.run_test(test_name, parent_pipe)
        dist.barrier()
        dist.destroy_process_group()
        sys.exit(0)


class GlooDistributedTestBase(DistributedTestBase):
    """Base of tests with gloo."""

    DISTRIBUTED_BACKEND = "gloo"


class NcclDistributedTestBase(DistributedTestBase):
    """Base of tests with NCCL, or gloo if there is no GPU."""

    DISTRIBUTED_BACKEND = "nccl"


class UccDistributedTestBase(DistributedTestBase):
    """Base of tests with UCC; skipped if PyTorch lacks it or the driver is older than 470.42.01."""

    DISTRIBUTED_BACKEND = "ucc"

    def setUp(self) -> None:
        if not (HAS_TORCH_UCC and HAS_TORCH_UCC_COMPAT_NVIDIA_DRIVER):
            self.skipTest("needs a PyTorch with UCC and a GPU driver of version 470.42.01 or newer")
        super().setUp()

    def _setup_pre_spawn(self) -> None:
        self._environment = mock.patch.dict(
            "os.environ", {"MASTER_ADDR": "localhost", "MASTER_PORT": "12375", "UCX_TLS": "tcp,cuda"}
        )
        self._environment.start()

    def tearDown(self) -> None:
        super().tearDown()
        self._environment.stop()

    @property
    def init_method(self) -> str:
        """Return the URL that makes the processes use the address in the environment."""
        return "env://"
