"""Parameters sharded by FSDP2 over two processes."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from apex import optimizers
from apex.optimizers import FusedAdam, FusedLAMB, FusedLARS
from tests.parallel.processes import Check

LIKE_TORCH: list[tuple[str, str, dict[str, Any]]] = [
    ("FusedSGD", "SGD", {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}),
    ("FusedAdagrad", "Adagrad", {"lr": 0.01}),
    ("NpuFusedAdamW", "AdamW", {"lr": 0.01, "amsgrad": True}),
    ("NpuFusedRMSprop", "RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    ("NpuFusedAdadelta", "Adadelta", {"lr": 1.0}),
    ("FusedNAdam", "NAdam", {"lr": 0.01}),
    ("FusedRAdam", "RAdam", {"lr": 0.01}),
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


def norms_of_whole_parameters(rank: int) -> None:
    """Sharded over two processes, or replicated over two; the last bias has one element, so a shard is empty."""
    options: dict[Any, dict[str, Any]] = {
        FusedLAMB: {"lr": 0.1, "weight_decay": 0.1, "max_grad_norm": 0.5},
        FusedLARS: {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "trust_coefficient": 0.1},
    }
    for cls, numbers in options.items():
        for sizes in ((2,), (2, 1), (1, 2)):
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards")[-len(sizes) :])
            models = [whole_model().append(torch.nn.Linear(3, 1)) for _ in range(2)]
            models[1].load_state_dict(models[0].state_dict())
            sharded = fully_shard(models[0], mesh=mesh)
            for model in models:
                train(model, cls(model.parameters(), **numbers))
            for found, expected in zip(sharded.parameters(), models[1].parameters(), strict=True):
                torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-5, atol=1e-6)


def gradients_change_their_distribution(rank: int) -> None:
    """A step finds gradients that are distributed, or laid out, in another way than those of the step before."""
    mesh = init_device_mesh("cpu", (2,))
    start, shard = torch.arange(28.0).view(7, 4), [Shard(0)]
    whole = torch.nn.Parameter(start.clone())
    param = torch.nn.Parameter(distribute_tensor(start.clone(), mesh, shard))
    plain, sharded = FusedAdam([whole], lr=0.01), FusedAdam([param], lr=0.01)
    for number, placements in enumerate((shard, shard, [Replicate()], [Partial()], shard, None, shard, [Replicate()])):
        gradient = (start + number).cos()
        whole.grad = gradient.clone()
        if placements == [Partial()]:
            param.grad = DTensor.from_local(gradient / 2, mesh, placements)
        elif placements is None:  # the shard is not contiguous
            own = distribute_tensor(gradient, mesh, shard).to_local().t().contiguous().t()
            param.grad = DTensor.from_local(own, mesh, shard, shape=param.shape, stride=param.stride())
        else:
            param.grad = distribute_tensor(gradient.clone(), mesh, placements)
        plain.step()
        sharded.step()
        assert torch.equal(param.full_tensor(), whole), (number, placements)


CHECKS: dict[str, Check] = {
    "adam_and_its_state": adam_and_its_state,
    "gradients_change_their_distribution": gradients_change_their_distribution,
    **{case[0]: like_torch(*case) for case in LIKE_TORCH},
    "norms_of_whole_parameters": norms_of_whole_parameters,
}
