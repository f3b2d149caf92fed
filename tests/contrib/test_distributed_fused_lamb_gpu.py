"""DistributedFusedLAMB on a GPU: one process, NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex._distributed.collectives import all_gather
from apex.contrib.optimizers._zero.groups import Groups
from apex.contrib.optimizers._zero.lamb import LambReducer
from apex.contrib.optimizers.distributed_fused_lamb import DistributedFusedLAMB
from apex.optimizers import FusedLAMB

pytestmark = pytest.mark.gpu

HYPER: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "max_grad_norm": 1.0}
STEPS = 5


@pytest.fixture(autouse=True)
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def busy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that several processes do is done, with NCCL, by the one that there is."""
    monkeypatch.setattr(Groups, "is_one", False)
    made = LambReducer.__init__

    def never_in_place(self: LambReducer, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        if not options["full"]:
            self._gets_all = False
            for arena in self.arenas:
                arena.gradient_shard = arena.new_shard(arena.dtypes.gradients)

    monkeypatch.setattr(LambReducer, "__init__", never_in_place)


def net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(100, 257), nn.Tanh(), nn.Linear(257, 300), nn.Tanh(), nn.Linear(300, 10)]
    return nn.Sequential(*layers).cuda().to(dtype)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.dim() == 1], "weight_decay": 0.0},
    ]


def inputs(step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(16, 100, generator=torch.Generator().manual_seed(step)).cuda().to(dtype)


def trained(dtype: torch.dtype, scale: float = 1.0, **options: Any) -> list[Tensor]:
    model = net(dtype)
    optimizer = DistributedFusedLAMB(groups(model), **{**HYPER, **options})
    optimizer.set_global_scale(scale)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(inputs(step, dtype)).float().square().mean().mul(scale).backward()
        optimizer.complete_reductions()
        optimizer.step()
        if options.get("skip_allgather"):
            optimizer.param_sync()
    return [param.detach().clone() for param in model.parameters()]


def expected(dtype: torch.dtype, scale: float = 1.0, **options: Any) -> list[Tensor]:
    model = net(dtype)
    optimizer = FusedLAMB(groups(model), master_weights=dtype != torch.float32, **{**HYPER, **options})
    for step in range(STEPS):
        optimizer.zero_grad()
        model(inputs(step, dtype)).float().square().mean().mul(scale).backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad.div_(scale)
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"use_nvlamb": True},
    {"adam_w_mode": False, "bias_correction": False, "grad_averaging": False},
    {"full_ar": True},
    {"overlap_reductions": False},
    {"clip_after_ar": False},
    {"clip_after_ar": False, "fused_norm": True, "fuse_scale": True},
    {"clip_after_ar": False, "full_ar": True, "fuse_scale": True},
    {"set_param_views_to_flat_buffer": True},
    {"skip_allgather": True, "nccl_allgather_channels": 2, "dwu_num_ag_pg": 1},
]
OF_ALGORITHM = ("use_nvlamb", "adam_w_mode", "bias_correction", "grad_averaging")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_as_fused_lamb(options: dict[str, Any], dtype: torch.dtype) -> None:
    compare(options, dtype)


@pytest.mark.usefixtures("busy_alone")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_collectives(options: dict[str, Any], dtype: torch.dtype) -> None:
    compare(options, dtype)


def compare(options: dict[str, Any], dtype: torch.dtype) -> None:
    scale = 64.0
    own = {name: options[name] for name in OF_ALGORITHM if name in options}
    limits = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
    for found, truth in zip(trained(dtype, scale, **options), expected(dtype, scale, **own), strict=True):
        error = (found.double() - truth.double()).norm() / truth.double().norm()
        assert error.item() < limits[dtype]


def test_two_runs_have_equal_bits() -> None:
    assert all(map(torch.equal, trained(torch.float16, 8.0), trained(torch.float16, 8.0)))


def test_eight_bits_are_gathered() -> None:
    values = torch.randn(64, device="cuda").to(torch.float8_e5m2)
    gathered = torch.empty_like(values)
    all_gather(gathered, values, torch.distributed.group.WORLD, "eight bits").wait()
    assert torch.equal(gathered.float(), values.float())
    for found, truth in zip(trained(torch.float16, e5m2_allgather=True), expected(torch.float16), strict=True):
        assert torch.equal(found.to(torch.float8_e5m2).to(found.dtype), found)
        assert ((found.double() - truth.double()).norm() / truth.double().norm()).item() < 0.2


def test_a_step_does_not_wait_for_the_device() -> None:
    model = net(torch.float16)
    optimizer = DistributedFusedLAMB(groups(model), **HYPER)
    optimizer.set_global_scale(torch.full((), 16.0, device="cuda"))
    x = inputs(0, torch.float16)

    def iteration() -> None:
        optimizer.zero_grad()
        model(x).float().square().mean().mul(16.0).backward()
        optimizer.complete_reductions()
        optimizer.step()

    for _ in range(2):
        iteration()
    torch.cuda.set_sync_debug_mode("error")
    try:
        iteration()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(optimizer._step) == 3


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop:FutureWarning")
def test_overflow_lowers_the_scale() -> None:
    model = net(torch.float16)
    optimizer = DistributedFusedLAMB(groups(model), **HYPER)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    before = [param.detach().clone() for param in model.parameters()]
    for factor in (torch.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(model(inputs(0, torch.float16)).float().square().mean() * factor).backward()
        optimizer.complete_reductions()
        optimizer.set_global_scale(scaler._get_scale_async())
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**9
        assert all(map(torch.equal, model.parameters(), before)) == (factor == torch.inf)
    assert int(optimizer._step) == 1


def test_in_a_cuda_graph() -> None:
    """A whole training step is captured; the learning rate is written to its tensor between replays."""

    def run(captured: bool) -> list[Tensor]:
        model = net(torch.float32)
        optimizer = DistributedFusedLAMB(groups(model), **HYPER)
        x = inputs(0, torch.float32)

        def iteration() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.complete_reductions()
            optimizer.step()

        assert isinstance(optimizer._lr, Tensor)
        optimizer._lr.fill_(0.01)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                iteration()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                iteration()
        for step in range(4):
            optimizer._lr.fill_(0.01 * (step + 1))
            x.copy_(inputs(step, torch.float32))
            graph.replay() if captured else iteration()
        torch.cuda.synchronize()
        assert int(optimizer._step) == 7
        return [param.detach().clone() for param in model.parameters()]

    for found, truth in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(found, truth)
