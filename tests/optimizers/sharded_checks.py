"""Parameters sharded by FSDP2 over two processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from apex import optimizers
from apex.optimizers import FusedAdam, FusedLAMB
from tests.parallel.processes import Check

LIKE_TORCH: list[tuple[str, str, dict[str, Any]]] = [
    ("FusedSGD", "SGD", {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}),
    ("FusedAdagrad", "Adagrad", {"lr": 0.01}),
    ("NpuFusedAdamW", "AdamW", {"lr": 0.01, "amsgrad": True}),
    ("NpuFusedRMSprop", "RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    ("NpuFusedAdadelta", "Adadelta", {"lr": 1.0}),
]


def whole_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))


def sharded_model() -> torch.nn.Module:
    return fully_shard(whole_model(), mesh=init_device_mesh("cpu", (2,)))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(5):
        optimizer.zero_grad()
        model(torch.full((2, 4), step + 1.0)).square().sum().backward()
        optimizer.step()


def assert_like_torch(name: str, torchs: str, options: dict[str, Any]) -> tuple[torch.nn.Module, Any]:
    sharded, whole = sharded_model(), whole_model()
    optimizer = getattr(optimizers, name)(sharded.parameters(), **options)
    train(sharded, optimizer)
    train(whole, getattr(torch.optim, torchs)(whole.parameters(), **options))
    for found, expected in zip(sharded.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found.full_tensor(), expected)
    return sharded, optimizer


def like_torch(*case: Any) -> Check:
    def check(rank: int) -> None:
        assert_like_torch(*case)

    return check


def adam_and_its_state(rank: int) -> None:
    model, optimizer = assert_like_torch("FusedAdam", "AdamW", {"lr": 0.01, "weight_decay": 0.1})
    resumed = FusedAdam(model.parameters())
    resumed.load_state_dict(optimizer.state_dict())
    for param in model.parameters():
        before, after = optimizer.state[param]["exp_avg"], resumed.state[param]["exp_avg"]
        assert type(after) is type(before)
        assert torch.equal(after.full_tensor(), before.full_tensor())


def lamb_refuses(rank: int) -> None:
    model = sharded_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(NotImplementedError, match="sharded"):
        FusedLAMB(model.parameters()).step()


CHECKS: dict[str, Check] = {
    "adam_and_its_state": adam_and_its_state,
    **{case[0]: like_torch(*case) for case in LIKE_TORCH},
    "lamb_refuses": lamb_refuses,
}
