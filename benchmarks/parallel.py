"""Training in several processes: apex.parallel beside torch.nn.parallel, and what a process keeps in memory.

    python benchmarks/parallel.py --output benchmarks/results/aarch64-cpu-parallel.json

Two processes with Gloo, one thread each, train the same model of 20 million parameters in several ways that take turns,
one step each at a time, so that a drift of the machine hits all alike. A figure is the median over the rounds, a ratio
the median of the ratios of one round; the fastest step is there because others may use the machine. Then, for 1, 2 and
4 processes, the bytes that remain after two steps.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

LAYERS, WIDTH = 20, 1000
TORCH = "torch DDP"
WHOLE, ZERO = "FusedAdam with DDP", "DistributedFusedAdam"
Step = Callable[[], None]


def make_model(layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[module for _ in range(layers) for module in (nn.Linear(width, width), nn.Tanh())])


def contenders(arguments: argparse.Namespace) -> dict[str, Step]:
    """Each takes a training step with SGD."""
    from apex import amp
    from apex.parallel import DistributedDataParallel, Reducer

    inputs = torch.randn(arguments.rows, arguments.width, generator=torch.Generator().manual_seed(dist.get_rank()))
    of_torch = nn.parallel.DistributedDataParallel
    wrappers: dict[str, Callable[[nn.Module], nn.Module]] = {
        TORCH: of_torch,
        "torch DDP, gradient_as_bucket_view": lambda net: of_torch(net, gradient_as_bucket_view=True),
        "apex DDP": DistributedDataParallel,
        "apex DDP, delay_allreduce": lambda net: DistributedDataParallel(net, delay_allreduce=True),
    }

    def plain(wrap: Callable[[nn.Module], nn.Module]) -> Step:
        model = wrap(make_model(arguments.layers, arguments.width))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step() -> None:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

        return step

    def combined() -> Step:
        net = make_model(arguments.layers, arguments.width)
        model, optimizer = amp.initialize(
            net, torch.optim.SGD(net.parameters(), lr=1e-3), opt_level="O0", combine_ddp=True, verbosity=0
        )
        Reducer(model)

        def step() -> None:
            optimizer.zero_grad()
            with amp.scale_loss(model(inputs).square().mean(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()

        return step

    found = {name: plain(wrap) for name, wrap in wrappers.items()}
    found["apex amp O0, combine_ddp"] = combined()
    found["one process, nothing sent"] = plain(lambda net: net)
    return found


def measure_steps(arguments: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a step, and of processor time in all threads of this process."""
    steps = contenders(arguments)
    wall: dict[str, list[float]] = {name: [] for name in steps}
    busy: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(3 + arguments.rounds):
        # Each follows each other one in turn.
        names = list(steps)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            start, start_busy = time.perf_counter(), time.process_time()
            steps[name]()
            if number >= 3:
                busy[name].append(1e3 * (time.process_time() - start_busy))
                wall[name].append(1e3 * (time.perf_counter() - start))
    return {
        name: {
            "milliseconds": statistics.median(wall[name]),
            "fastest_milliseconds": min(wall[name]),
            "processor_milliseconds": statistics.median(busy[name]),
            "of_torch": statistics.median(map(lambda a, b: a / b, wall[name], wall[TORCH])),
            "rounds": [round(value, 2) for value in wall[name]],
        }
        for name in steps
    }


def tensor_bytes(tensors: Any) -> int:
    """Of different memory: views of one buffer count once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def measure_memory(arguments: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Bytes of one process after two steps of a bfloat16 model: of the optimizer's state, and of the process."""
    train(Weights(1, 8), kind)  # imports what is needed
    before = resident()
    model = Weights(arguments.layers, arguments.width)
    optimizer = train(model, kind)
    if kind == ZERO:
        state = [tensor for each in optimizer._states for tensor in each.shards().values()]
    else:
        state = [value for each in optimizer.state.values() for value in each.values() if torch.is_tensor(value)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "parameter_bytes": tensor_bytes(model.parameters()),
        "state_bytes": tensor_bytes(state),
        "resident_growth_bytes": resident() - before,
        "peak_growth_bytes": peak - before,
    }


class Weights(nn.Module):
    """Parameters in bfloat16 that get gradients without a product of matrices, for which some processors take long."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = make_model(layers, width).bfloat16()

    def forward(self) -> torch.Tensor:
        return torch.stack([param.sum() for param in self.parameters()]).float().square().sum()


def train(model: nn.Module, kind: str) -> Any:
    """Two steps of Adam with float32 state and master weights; returns the optimizer."""
    from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
    from apex.optimizers import FusedAdam
    from apex.parallel import DistributedDataParallel

    optimizer: Any
    if kind == ZERO:
        half = torch.bfloat16
        optimizer = DistributedFusedAdam(
            model.parameters(), grad_sync_dtype=half, param_sync_dtype=half, bucket_cap_mb=5
        )
    else:
        optimizer = FusedAdam(model.parameters(), master_weights=True)
        model = DistributedDataParallel(model)
    for _ in range(2):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    return optimizer


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def work(rank: int, processes: int, folder: str, task: str, arguments: argparse.Namespace) -> None:
    """One process; rank 0 writes what it found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    found = measure_steps(arguments) if task == "steps" else measure_memory(arguments, task)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def run(task: str, processes: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Starts processes and returns what rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (processes, folder, task, arguments), nprocs=processes)
        return json.loads(Path(folder, "found.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--rows", type=int, default=16, help="of a batch, in each process")
    parser.add_argument("--rounds", type=int, default=40, help="how often the contenders take turns")
    parser.add_argument("--only", choices=("steps", "memory"), help="leave out the other part")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    arguments = parser.parse_args()
    steps: dict[str, Any] = {} if arguments.only == "memory" else run("steps", 2, arguments)
    for name, figures in steps.items():
        line = f"{name:36} {figures['milliseconds']:8.2f} ms {figures['of_torch']:6.3f} of {TORCH}"
        line += f", fastest {figures['fastest_milliseconds']:8.2f} ms"
        print(f"{line} {figures['processor_milliseconds']:8.2f} ms of processor time", flush=True)
    memory: dict[str, Any] = {}
    for kind in () if arguments.only == "steps" else (WHOLE, ZERO):
        for processes in (1, 2, 4):
            found = memory.setdefault(kind, {})[str(processes)] = run(kind, processes, arguments)
            line = ", ".join(f"{name} {value / 1e6:.1f} MB" for name, value in found.items())
            print(f"{kind:22} {processes} processes: {line}", flush=True)
    report = {
        "device": f"{platform.machine()} cpu, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "backend": "gloo",
        "parameters": arguments.layers * (arguments.width**2 + arguments.width),
        "rows_per_process": arguments.rows,
        "rounds": arguments.rounds,
        "method": "two processes of one thread; contenders take turns, a step each; medians over the rounds of rank 0, "
        "ratios within a round; memory of rank 0 after two steps, parameters in bfloat16, state in float32",
        "steps": steps,
        "memory": memory,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
