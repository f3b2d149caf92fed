"""A training run whose last rank kills itself in the middle of a step; started by test_survival.py.

Arguments: a folder, and the rank and number of processes where no launcher gives them.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex.checkpoint import Series
from apex.parallel import DistributedDataParallel

EVERY, DEATH = 5, 12


def main(folder: Path, rank: int | None = None, processes: int | None = None) -> None:
    torch.set_num_threads(1)
    if rank is None:
        dist.init_process_group("gloo")
    else:
        store = f"file://{folder}/store"
        patience = timedelta(seconds=40)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes, timeout=patience)
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(50, 50) for _ in range(6)]), message_size=2550)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    series = Series(folder / "checkpoints", keep=2)
    for step in range(1, 100):
        if step == DEATH and dist.get_rank() == dist.get_world_size() - 1:
            # Some buckets have been sent then, others not.
            model.module[2].bias.register_hook(die)
        optimizer.zero_grad()
        model(torch.randn(4, 50)).square().mean().backward()
        optimizer.step()
        if step % EVERY == 0:
            series.save({"step": step, "model": model.module.state_dict()}, step, wait=True)
    raise AssertionError("nobody died")


def die(_gradient: Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
