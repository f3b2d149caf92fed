"""Colossal-AI's process objects and ZeRO optimizer, for the runs of `tests/booster/process_checks.py`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from apex.cluster import DistCoordinator, ProcessGroupMesh
from apex.shardformer.layer import Linear1D_Col, Linear1D_Row
from apex.testing import assert_equal_in_group
from apex.transformer import parallel_state
from apex.zero import LowLevelZeroOptimizer
from apex.zero.low_level._utils import all_gather_into_flat_tensor_nd
from tests.parallel.processes import Check


def coordinates(rank: int) -> None:
    coordinator = DistCoordinator()
    assert coordinator is DistCoordinator()
    ranks = dist.get_world_size()
    assert (coordinator.rank, coordinator.world_size) == (rank, ranks) == (coordinator._rank, coordinator._world_size)
    assert coordinator.is_master() == (rank == 0)
    assert coordinator.is_last_process() == (rank == ranks - 1)
    assert coordinator.on_master_only()(lambda value: value)(3) == (3 if rank == 0 else None)
    order: list[int] = []
    with coordinator.priority_execution(executor_rank=ranks - 1):
        order.append(rank)
    coordinator.block_all()
    assert order == [rank]

    def run_first() -> None:
        with coordinator.priority_execution():
            raise KeyError("missing")

    # The others do not wait for a process that failed.
    expected, message = (KeyError, "missing") if rank == 0 else (RuntimeError, "rank 0 failed .* KeyError: 'missing'")
    with pytest.raises(expected, match=message):
        run_first()


def makes_groups_along_axes(rank: int) -> None:
    ranks = dist.get_world_size()
    mesh = ProcessGroupMesh(ranks, 1)
    assert (mesh.shape, mesh.size(0), mesh.coordinate()) == ((ranks, 1), ranks, (rank, 0))
    rows, columns = mesh.get_group_along_axis(0), mesh.get_group_along_axis(1)
    assert mesh.get_ranks_in_group(rows) == list(range(ranks))
    assert mesh.get_ranks_in_group(columns) == [rank]
    assert mesh.get_group_along_axis(0) is rows
    assert mesh.get_ranks_in_group(mesh.get_group_along_axis([0, 1])) == list(range(ranks))
    first = mesh.create_group_along_axis(0, [0])
    assert first is None if rank else mesh.get_ranks_in_group(first) == [0]
    values = torch.full((2,), float(rank))
    out = torch.empty(2 * ranks)
    all_gather_into_flat_tensor_nd(out, values, (rows, columns))
    assert out.tolist() == [float(r) for r in range(ranks) for _ in range(2)]
    mesh.destroy_mesh_process_groups()
    with pytest.raises(AssertionError, match=f"a mesh of {ranks} x 2 needs {2 * ranks} processes; there are {ranks}"):
        ProcessGroupMesh(ranks, 2)


def divides_linear_layers(rank: int) -> None:
    parallel_state.initialize_model_parallel(dist.get_world_size(), 1)
    try:
        torch.manual_seed(0)
        first, second, inputs = nn.Linear(4, 8), nn.Linear(8, 3), torch.randn(2, 4)
        group = parallel_state.get_tensor_model_parallel_group()
        parts = (Linear1D_Col.from_native_module(first, group), Linear1D_Row.from_native_module(second, [group]))
        torch.testing.assert_close(parts[1](parts[0](inputs)), second(first(inputs)))
        assert parts[0].weight.shape == (8 // dist.get_world_size(), 4)
    finally:
        parallel_state.destroy_model_parallel()


def trains_as_ddp(dtype: torch.dtype, partition_grad: bool, overlap: bool, cpu_offload: bool = False) -> Check:
    """Return a check that LowLevelZeroOptimizer trains as DistributedDataParallel does in float32."""

    def check(rank: int) -> None:
        torch.manual_seed(3)
        plain = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
        model = copy.deepcopy(plain).to(dtype)
        unused = nn.Parameter(torch.zeros(3, dtype=dtype))
        peer = torch.optim.AdamW(plain.parameters(), lr=0.01)
        options: dict[str, Any] = {"partition_grad": partition_grad, "overlap_communication": overlap}
        options |= {"cpu_offload": cpu_offload}
        optimizer = LowLevelZeroOptimizer(
            torch.optim.AdamW([*model.parameters(), unused], lr=0.01), initial_scale=4.0, clip_grad_norm=0.1, **options
        )
        assert (optimizer.scaler is not None) == (dtype == torch.float16)
        scale = 4.0 if dtype == torch.float16 else 1.0
        tolerance = {torch.float32: 1e-5, torch.float16: 0.01, torch.bfloat16: 0.05}[dtype]
        start = [param.detach().clone() for param in plain.parameters()]
        for step in range(3):
            inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.backward(model(inputs.to(dtype)).float().square().mean())
            plain(inputs).square().mean().backward()
            for param in plain.parameters():
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
            for own, param in zip(model.parameters(), plain.parameters(), strict=True):
                found = optimizer.get_param_grad(own)
                assert (found.float() / scale - param.grad).norm() <= 4 * tolerance * param.grad.norm()
            assert optimizer.get_param_grad(unused) is None
            nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            for each in (optimizer, peer):
                each.step()
                each.zero_grad()
        optimizer._force_wait_all_gather()
        for own, param, before in zip(model.parameters(), plain.parameters(), start, strict=True):
            assert_equal_in_group(own.data)
            # Weights are rounded to `dtype` once, their float32 masters are not.
            rounding = (param - param.to(dtype)).norm()
            assert (own - param).norm() <= rounding * 2 + tolerance * 4 * (param - before).norm()
        saved = optimizer.state_dict()
        assert list(saved["state"]) == sorted(saved["state"])
        assert list(saved["state"][0]) == list(peer.state_dict()["state"][0])
        optimizer.load_state_dict(saved)
        assert float(optimizer.state_dict()["state"][0]["step"]) == 3.0

    return check


def ends_with_its_last_reference(rank: int) -> None:
    deleted = []

    class Watched(LowLevelZeroOptimizer):
        def __del__(self) -> None:
            super().__del__()
            deleted.append(self)

    model = nn.Linear(3, 3)
    optimizer = Watched(torch.optim.SGD(model.parameters(), lr=1.0))
    del optimizer
    assert len(deleted) == 1
    model(torch.ones(1, 3)).sum().backward()  # no hook is left
    deleted.clear()


def is_refused(rank: int) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    for options, message in (
        ({"fp8_communication": True}, "fp8_communication=True is not supported"),
        ({"pg_to_param_list": {}}, "pg_to_param_list is not supported"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            LowLevelZeroOptimizer(optimizer, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="extra_dp_group needs dp_process_group"):
        LowLevelZeroOptimizer(optimizer, extra_dp_group=dist.group.WORLD)
    with pytest.raises(RuntimeError, match="no_sync needs partition_grad=False"):
        LowLevelZeroOptimizer(optimizer, partition_grad=True).no_sync()


def enters_a_context(rank: int) -> None:
    """Check that each backward pass runs inside of a `backward_context`."""
    events: list[str] = []

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        events.append("enters")
        yield
        events.append("leaves")

    param = nn.Parameter(torch.ones(2))
    param.register_hook(lambda gradient: events.append("backward"))
    optimizer = LowLevelZeroOptimizer(torch.optim.SGD([param], lr=1.0), backward_context=context)
    for _ in range(2):
        optimizer.backward(param.sum())
    assert events == ["enters", "backward", "leaves"] * 2


CHECKS: dict[str, Check] = {
    "coordinates": coordinates,
    "makes groups along axes": makes_groups_along_axes,
    "divides linear layers": divides_linear_layers,
    "zero optimizer ends": ends_with_its_last_reference,
    "zero optimizer refuses": is_refused,
    "zero optimizer backward context": enters_a_context,
    "zero optimizer float32": trains_as_ddp(torch.float32, partition_grad=False, overlap=False),
    "zero optimizer float16": trains_as_ddp(torch.float16, partition_grad=False, overlap=True),
    "zero optimizer offloaded": trains_as_ddp(torch.float16, partition_grad=True, overlap=False, cpu_offload=True),
    "zero optimizer bfloat16": trains_as_ddp(torch.bfloat16, partition_grad=True, overlap=True),
}
