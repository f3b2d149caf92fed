"""DistributedFusedAdam on a GPU: one process, NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
from apex.optimizers import FusedAdam

pytestmark = pytest.mark.gpu

BF16: dict[str, Any] = {"param_sync_dtype": torch.bfloat16}


@pytest.fixture(autouse=True, scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    torch.cuda.set_device(0)
    path: Path = tmp_path_factory.mktemp("nccl")
    torch.distributed.init_process_group("nccl", init_method=f"file://{path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def make(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, 257), nn.Tanh(), nn.Linear(257, 129), nn.Tanh(), nn.Linear(129, 5)).to(
        "cuda", dtype
    )


def train(net: nn.Module, optimizer: Any, steps: int = 4, micros: int = 1) -> None:
    dtype = next(net.parameters()).dtype
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(micros):
            inputs = torch.randn(8, 33, generator=torch.Generator().manual_seed(10 * step + micro))
            net(inputs.to("cuda", dtype)).float().square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"overlap_grad_sync": False, "bucket_cap_mb": 0.1}),
        (torch.float32, {"overlap_param_sync": True, "pipeline_size": 1}),
        (torch.float32, {"contiguous_grad_buffer": True, "contiguous_param_buffer": True, "nccl_ub": True}),
        (torch.float32, {"capturable": True}),
        (torch.bfloat16, BF16),
        (torch.bfloat16, {**BF16, "store_params": False, "store_param_remainders": True}),
    ],
    ids=str,
)
def test_as_fused_adam(dtype: torch.dtype, options: dict[str, Any]) -> None:
    net, twin = make(dtype), make(dtype)
    train(net, DistributedFusedAdam(net.parameters(), lr=1e-2, weight_decay=0.1, **options))
    train(twin, FusedAdam(twin.parameters(), lr=1e-2, weight_decay=0.1, master_weights=dtype != torch.float32))
    for found, expected in zip(net.parameters(), twin.parameters(), strict=True):
        # Remainders round halves away from zero, copies to even.
        rtol, atol = (0, 1e-5) if dtype == torch.float32 else (1.6e-2, 1e-3)
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def test_scaled_states() -> None:
    net, twin = make(), make()
    options: dict[str, Any] = {
        "dtype": torch.float16,
        "grad_sync_dtype": torch.float32,
        "param_sync_dtype": torch.float32,
    }
    train(net, DistributedFusedAdam(net.parameters(), lr=1e-2, with_scaled_states=True, **options))
    train(twin, FusedAdam(twin.parameters(), lr=1e-2))
    for found, expected in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=5e-3)


def scaled(net: nn.Module, optimizer: Any, scaler: Any, factor: float) -> None:
    optimizer.zero_grad()
    inputs = torch.ones(8, 33, device="cuda")
    scaler.scale(net(inputs).square().mean() * factor).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_step_does_not_wait_for_the_device() -> None:
    net = make()
    optimizer: Any = DistributedFusedAdam(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8)
    for factor in (1.0, torch.inf):
        scaled(net, optimizer, scaler, factor)
    before = [param.detach().clone() for param in net.parameters()]
    torch.cuda.set_sync_debug_mode("error")
    try:
        scaled(net, optimizer, scaler, torch.inf)
        skipped: list[Tensor] = [param.detach().clone() for param in net.parameters()]
        scaled(net, optimizer, scaler, 1.0)
        optimizer.zero_grad()
        net(torch.ones(8, 33, device="cuda")).square().mean().backward()
        optimizer.clip_grad_norm(0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, before, skipped))
    assert not any(map(torch.equal, before, net.parameters()))
    assert optimizer.state_dict()["state"]["step"] == 2


def test_in_a_cuda_graph() -> None:
    net, twin = make(), make()
    optimizer = DistributedFusedAdam(net.parameters(), lr=1e-2, capturable=True, contiguous_grad_buffer=True)
    plain = FusedAdam(twin.parameters(), lr=1e-2)
    inputs = torch.ones(8, 33, device="cuda")

    def step(model: nn.Module, any_optimizer: Any) -> None:
        any_optimizer.zero_grad()
        model(inputs).square().mean().backward()
        any_optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(net, optimizer)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(net, optimizer)
    for _ in range(3):
        graph.replay()
    for _ in range(5):
        step(twin, plain)
    for found, expected in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, expected)
    assert int(optimizer.state["step"]) == 5


def test_state_dicts() -> None:
    net, twin = make(), make()
    optimizer: Any = DistributedFusedAdam(net.parameters(), lr=1e-2)
    train(net, optimizer)
    for layout in (1, 2):
        other = DistributedFusedAdam(twin.parameters())
        other.load_state_dict(optimizer.state_dict(state_dict_format=layout))
        assert all(map(torch.equal, net.parameters(), twin.parameters()))
