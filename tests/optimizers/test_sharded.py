"""Parameters sharded by FSDP2: elementwise optimizers update shards, those that need whole norms refuse them."""

from pathlib import Path

import pytest
import torch
from torch import distributed, multiprocessing

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="needs torch.distributed")


LIKE_TORCH = [
    ("FusedSGD", "SGD", {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}),
    ("FusedAdagrad", "Adagrad", {"lr": 0.01}),
    ("NpuFusedAdamW", "AdamW", {"lr": 0.01, "amsgrad": True}),
    ("NpuFusedRMSprop", "RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    ("NpuFusedAdadelta", "Adadelta", {"lr": 1.0}),
]


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 4), step + 1.0)).square().sum().backward()
        optimizer.step()


def _worker(rank: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from apex import optimizers
    from apex.optimizers import FusedAdam, FusedLAMB

    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        model = fully_shard(_model(), mesh=mesh)
        optimizer = FusedAdam(model.parameters(), lr=0.01, weight_decay=0.1)
        _train(model, optimizer, 5)
        whole = _model()
        _train(whole, torch.optim.AdamW(whole.parameters(), lr=0.01, weight_decay=0.1), 5)
        for ours, expected in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(ours.full_tensor(), expected)
        resumed = FusedAdam(model.parameters())
        resumed.load_state_dict(optimizer.state_dict())
        for param in model.parameters():
            before, after = optimizer.state[param]["exp_avg"], resumed.state[param]["exp_avg"]
            assert type(after) is type(before)
            assert torch.equal(after.full_tensor(), before.full_tensor())
        for ours, torchs, options in LIKE_TORCH:
            sharded, whole = fully_shard(_model(), mesh=mesh), _model()
            _train(sharded, getattr(optimizers, ours)(sharded.parameters(), **options), 5)
            _train(whole, getattr(torch.optim, torchs)(whole.parameters(), **options), 5)
            for found, expected in zip(sharded.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(found.full_tensor(), expected)
        with pytest.raises(NotImplementedError, match="sharded"):
            FusedLAMB(model.parameters()).step()
    finally:
        distributed.destroy_process_group()


def test_fully_sharded_parameters(tmp_path: Path) -> None:
    multiprocessing.spawn(_worker, (str(tmp_path),), nprocs=2)
