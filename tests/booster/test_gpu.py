"""Every plugin in every precision on a GPU, in a process group of one, against plain PyTorch on the same GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.booster import hybrid_checks, problem, process_checks

pytestmark = pytest.mark.gpu
NAMES = [name for name in process_checks.CHECKS if name.startswith(("equal", "resumes", "clips"))]


@pytest.fixture(autouse=True)
def alone_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(problem, "DEVICE", "cuda")
    for cached in (problem.plain, hybrid_checks.plain):
        cached.cache_clear()
    store = f"file://{tmp_path}/store"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    for cached in (problem.plain, hybrid_checks.plain):
        cached.cache_clear()


@pytest.mark.parametrize("name", NAMES)
def test_as_plain_pytorch(name: str) -> None:
    process_checks.CHECKS[name](0)


@pytest.mark.parametrize("precision", list(process_checks.TOLERANCE))
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_hybrid(precision: str, zero_stage: int) -> None:
    hybrid_checks.equality(precision, zero_stage=zero_stage)(0)


def test_the_device_is_the_default() -> None:
    booster = process_checks.Booster(mixed_precision="bf16")
    model, *_ = booster.boost(problem.Net())
    assert model(torch.randn(2, problem.FEATURES, device=booster.device)).device.type == "cuda"
