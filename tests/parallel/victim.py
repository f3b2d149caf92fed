"""Training runs of which one rank kills or stops itself in the middle of a step; started by test_survival.py.

Arguments: a folder, a number of processes, and kinds of runs, which all go on at once: this process imports everything
and divides. Of a run there is a folder of that name, with what its processes printed; `ends.json` has their exit codes.

In the run of a kind the last rank kills itself. In `KIND.killed` and `KIND.stopped` it is the first rank, which has the
store of the process group, as without a launcher, and the others wait for `LIMIT` from then on.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex._distributed.groups import make_mesh
from apex.checkpoint import Series
from apex.contrib.groupbn import BatchNorm2d_NHWC
from apex.contrib.optimizers import DistributedFusedAdam, DistributedFusedLAMB
from apex.parallel import DistributedDataParallel, SyncBatchNorm, create_syncbn_process_group
from apex.transformer import parallel_state
from apex.transformer.tensor_parallel import ColumnParallelLinear, model_parallel_cuda_manual_seed
from tests.support.forks import fork

# The number of steps between checkpoints; the rank (from the end) that dies, the step, and the way it dies.
EVERY = 5
VICTIM, DEATH, SIGNAL = 1, 12, signal.SIGKILL
WAYS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
PATIENCE, LIMIT = timedelta(seconds=40), timedelta(seconds=2)


def plain() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(50, 50) for _ in range(6)])


def normed(norm: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(nn.Unflatten(1, (2, 5, 5)), *[norm() for _ in range(6)], nn.Flatten())


def data_parallel() -> tuple[nn.Module, Any]:
    model = DistributedDataParallel(plain(), message_size=2550)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def data_parallel_in_streams() -> tuple[nn.Module, Any]:
    model = DistributedDataParallel(plain(), message_size=2550, num_allreduce_streams=2)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def zero_adam() -> tuple[nn.Module, Any]:
    model = plain()
    return model, DistributedFusedAdam(model.parameters(), bucket_cap_mb=0.01)


def zero_mesh() -> tuple[nn.Module, Any]:
    model, mesh = plain(), make_mesh("cpu", (dist.get_world_size(), 1), ("redundant", "distributed"))
    groups = {f"{name}_process_group": mesh.get_group(name) for name in ("redundant", "distributed")}
    return model, DistributedFusedAdam(model.parameters(), bucket_cap_mb=0.01, **groups)


def zero_lamb() -> tuple[nn.Module, Any]:
    model = plain()
    return model, DistributedFusedLAMB(model.parameters())


def sync_batch_norm() -> tuple[nn.Module, Any]:
    model = normed(lambda: SyncBatchNorm(2))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def sync_batch_norm_in_a_group() -> tuple[nn.Module, Any]:
    group = create_syncbn_process_group(dist.get_world_size())
    model = normed(lambda: SyncBatchNorm(2, process_group=group))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def group_batch_norm() -> tuple[nn.Module, Any]:
    model = normed(lambda: BatchNorm2d_NHWC(5, bn_group=dist.get_world_size()))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


class TensorParallel(nn.Sequential):
    """Layers whose halves lie on different ranks."""

    def __init__(self) -> None:
        parallel_state.initialize_model_parallel(dist.get_world_size())
        model_parallel_cuda_manual_seed(0)
        super().__init__(*[ColumnParallelLinear(50, 50 * dist.get_world_size(), gather_output=False) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)[0].tanh()
        return x


def tensor_parallel() -> tuple[nn.Module, Any]:
    model = TensorParallel()
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


MAKERS = (
    data_parallel,
    data_parallel_in_streams,
    zero_adam,
    zero_mesh,
    zero_lamb,
    sync_batch_norm,
    sync_batch_norm_in_a_group,
    group_batch_norm,
    tensor_parallel,
)
KINDS = {make.__name__: make for make in MAKERS}


def train(kind: str, folder: Path, limit: timedelta | None = None) -> None:
    """Train until a rank dies while gradients, their sums, or statistics of group norms are being exchanged."""
    torch.manual_seed(dist.get_rank())
    model, optimizer = KINDS[kind]()
    layers = getattr(model, "module", model)
    series = Series(folder / "checkpoints", keep=2)
    for step in range(1, 100):
        if step == DEATH and dist.get_rank() == dist.get_world_size() - VICTIM:
            if kind == "group_batch_norm":
                layers[3].register_forward_hook(die)
            else:
                layers[4].bias.register_hook(die)
        elif step == DEATH and limit is not None:
            for group in list(dist.distributed_c10d._world.pg_map):
                dist.distributed_c10d._set_pg_timeout(limit, group)
        optimizer.zero_grad()
        model(torch.randn(4, 50)).square().mean().backward()
        optimizer.step()
        if step % EVERY == 0:
            series.save(
                {"step": step, "model": layers.state_dict(), "optimizer": optimizer.state_dict()}, step, wait=True
            )
    raise AssertionError("nobody died")


def die(*_: Tensor) -> None:
    os.kill(os.getpid(), SIGNAL)


def divide(folder: Path, processes: int, kinds: list[str]) -> None:
    """Fork every rank of every run; end those that are stopped when the others of their run have ended."""
    children: dict[int, tuple[str, int]] = {}
    stopped: dict[int, tuple[str, int]] = {}
    for kind in kinds:
        (folder / kind).mkdir()
        way = kind.partition(".")[2]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(processes):
            child = fork()
            if not child:
                os._exit(run(kind, folder / kind, rank, processes, port))
            (stopped if way == "stopped" and not rank else children)[child] = kind, rank
    ends = {kind: [0] * processes for kind in kinds}
    for child, (kind, rank) in children.items():
        ends[kind][rank] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for child, (kind, rank) in stopped.items():
        os.kill(child, signal.SIGKILL)
        ends[kind][rank] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    (folder / "ends.json").write_text(json.dumps(ends))


def run(kind: str, folder: Path, rank: int, processes: int, port: int = 0) -> int:
    """Run one rank and return an exit code; one that waits forever is ended."""
    global VICTIM, SIGNAL
    kind, _, way = kind.partition(".")
    if way:
        VICTIM, SIGNAL = processes, WAYS[way]
    signal.alarm(2 * int(PATIENCE.total_seconds()))
    with open(folder / f"rank{rank}.txt", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        try:
            store = f"tcp://127.0.0.1:{port}" if way else f"file://{folder}/store"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes, timeout=PATIENCE)
            train(kind, folder, LIMIT if way else None)
        except BaseException:
            traceback.print_exc(file=output)
    return 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    divide(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
