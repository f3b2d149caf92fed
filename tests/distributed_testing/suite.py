"""A test suite as clients write it: on gloo, on the base class, on NCCL and on UCC. Prints the results."""

import json
import os
import sys
import unittest

import torch
import torch.distributed as dist

from apex.distributed_testing import (
    DistributedTestBase,
    GlooDistributedTestBase,
    NcclDistributedTestBase,
    UccDistributedTestBase,
    distributed_test_base,
)
from apex.transformer.testing import distributed_test_base as names_of_transformer


class Common:
    """Tests of every class below."""

    def _spawn_processes(self) -> None:
        """Fork if possible, which is fast; otherwise every process imports PyTorch and its compiler."""
        if torch.cuda.is_available():
            super()._spawn_processes()
        else:
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def test_sum(self) -> None:
        assert self.rank == dist.get_rank()
        assert self.world_size == dist.get_world_size() == (min(torch.cuda.device_count(), 4) or 2)
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        total = torch.tensor([float(self.rank)], device=device)
        dist.all_reduce(total)
        self.assertEqual(total, torch.full_like(total, sum(range(self.world_size))))  # noqa: PT009


class Base(Common, DistributedTestBase):
    def _setup_pre_spawn(self) -> None:
        super()._setup_pre_spawn()
        os.environ["PREPARED"] = "yes"

    def test_the_preparation_comes_first(self) -> None:
        assert os.environ["PREPARED"] == "yes"


class Gloo(Common, GlooDistributedTestBase):
    def test_backend(self) -> None:
        assert dist.get_backend() == "gloo"

    def test_one_rank_fails(self) -> None:
        assert self.rank == self.world_size, "this is what it says"

    def test_skip(self) -> None:
        raise unittest.SkipTest("nothing to do")


class Nccl(Common, NcclDistributedTestBase):
    def test_backend(self) -> None:
        assert dist.get_backend() == ("nccl" if torch.cuda.is_available() else "gloo")


class Ucc(Common, UccDistributedTestBase):
    def test_backend(self) -> None:
        assert dist.get_backend() == "ucc"


class UccEnvironment(unittest.TestCase):
    def test_it_is_set_for_the_processes_only(self) -> None:
        before = dict(os.environ)
        test = UccDistributedTestBase()
        assert test.init_method == "env://"
        test._setup_pre_spawn()
        assert (os.environ["UCX_TLS"], os.environ["MASTER_PORT"]) == ("tcp,cuda", "12375")
        test.processes = []
        test.tearDown()
        assert dict(os.environ) == before


class UccNames(unittest.TestCase):
    def test_both_modules_say_the_same(self) -> None:
        names = ("HAS_TORCH_UCC", "HAS_TORCH_UCC_COMPAT_NVIDIA_DRIVER")
        found = [getattr(distributed_test_base, name) for name in names]
        assert found == [getattr(names_of_transformer, name) for name in names]
        assert found[0] == dist.is_ucc_available()
        assert isinstance(found[1], bool)
        assert torch.cuda.is_available() or not found[1]


def main() -> None:
    result = unittest.TestResult()
    suite = unittest.defaultTestLoader.loadTestsFromModule(sys.modules[__name__])
    names = [".".join(test.id().split(".")[-2:]) for group in suite for test in group]
    suite.run(result)
    outcomes = dict.fromkeys(names, "ok")
    for outcome in ("errors", "failures", "skipped"):
        for test, message in getattr(result, outcome):
            outcomes[".".join(test.id().split(".")[-2:])] = f"{outcome}: {message}"
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
