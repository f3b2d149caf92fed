"""Every plugin in every precision on a GPU, in a process group of one, against plain PyTorch on the same GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from apex.lazy import LazyInitContext
from apex.optimizers import FusedSGD
from apex.transformer.amp import GradScaler
from tests.booster import hybrid_checks, problem, process_checks

pytestmark = pytest.mark.gpu
CHECKS = {**process_checks.CHECKS, **process_checks.EQUAL, **process_checks.RESUMES}
NAMES = [name for name in CHECKS if name.startswith(("equal", "resumes", "clips"))]


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
    CHECKS[name](0)


@pytest.mark.parametrize("precision", list(process_checks.TOLERANCE))
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_hybrid(precision: str, zero_stage: int) -> None:
    hybrid_checks.equality(precision, zero_stage=zero_stage)(0)


def test_the_device_is_the_default() -> None:
    booster = process_checks.Booster(mixed_precision="bf16")
    model, *_ = booster.boost(problem.Net())
    assert model(torch.randn(2, problem.FEATURES, device=booster.device)).device.type == "cuda"


@pytest.mark.parametrize("unscales_first", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, FusedSGD])
def test_a_loss_scale_on_a_busy_gpu_reaches_gradients_on_the_host(kind: Any, unscales_first: bool) -> None:
    """Copies to the host are waited for: the kernels before them take a tenth of a second here."""
    param = torch.nn.Parameter(torch.zeros(8))
    optimizer, scaler = kind([param], lr=1.0), GradScaler(init_scale=2.0**10)
    for step in range(1, 4):
        scaler.scale(torch.ones((), device="cuda"))
        param.grad = torch.full((8,), 2.0**10)
        torch.cuda._sleep(200_000_000)
        if unscales_first:
            scaler.unscale_(optimizer)
            assert torch.equal(param.grad, torch.ones(8))
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(param.detach(), torch.full((8,), -float(step)))


def test_offloaded_state_takes_no_memory_of_the_gpu() -> None:
    """The state of a bfloat16 model has 12 bytes a parameter: float32 weights and two moments."""
    sizes = {}
    for offloads in (False, True):
        gc.collect()  # memory of earlier tests must not be given back between the two readings
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
        plugin = process_checks.LowLevelZeroPlugin(2, "bf16", max_norm=1.0, cpu_offload=offloads)
        before = torch.cuda.memory_allocated()
        boosted, optimizer, *_ = problem.booster(plugin=plugin).boost(model, torch.optim.AdamW(model.parameters()))
        for _ in range(2):
            optimizer.backward(boosted(torch.ones(8, 1024, device="cuda")).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        sizes[offloads] = torch.cuda.memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        optimizer.optim.load_state_dict(optimizer.optim.state_dict())
        boosted.masters.write({param: torch.zeros_like(param) for param in boosted.parameters()})
        peak = torch.cuda.max_memory_allocated() - before - sizes[offloads]
        del boosted, optimizer, model
    count = 4 * 1025 * 1024
    assert peak < 4 * count, "a checkpoint needs memory of the GPU for state"
    assert 12 * count <= sizes[False] - sizes[True] <= 13 * count
    assert sizes[True] < 3 * count


@pytest.mark.parametrize("shards", [True, False])
def test_recorded_models_have_the_values_of_the_gpu(shards: bool) -> None:
    """Random numbers are drawn again on the GPU, and later ones are as without a LazyInitContext."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        expected = problem.Net()
    following = torch.rand(4, device="cuda")
    torch.manual_seed(0)
    with LazyInitContext(default_device="cuda"):
        model = problem.Net()
    assert torch.equal(torch.rand(4, device="cuda"), following)
    plugin = process_checks.TorchFSDPPlugin() if shards else None
    boosted, *_ = problem.booster(plugin=plugin).boost(model)
    found = process_checks.weights_of(boosted)
    for name, value in expected.state_dict().items():
        assert torch.equal(found[name].cuda(), value), name
