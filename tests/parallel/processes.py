"""Checks that run in several processes at once, connected by Gloo on the CPU: all of a file in one start.

A module of checks has a dict `CHECKS` of functions that take the rank. After a check fails in one process the others
may wait for it; nothing after it is run. One process imports everything and divides then: imports take longer than
most checks.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import apex
from tests.warm import run_python

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(apex.__file__).resolve().parents[1]
# Seconds that a process waits for others: a hang is an error, not a test that takes long.
PATIENCE = 30
needs_fsdp_on_a_cpu = pytest.mark.skipif(torch.__version__ < "2.7", reason="PyTorch 2.6 has no FSDP2 for a CPU")

Check = Callable[[int], None]


def run_checks(module: str, folder: Path, processes: int = 2, timeout: float = 150) -> dict[str, str]:
    """What became of each check: "" if it passed in all processes, else what went wrong.

    On a busy machine Gloo at times loses a connection that it is making, without any process having ended: all is
    started once more then.
    """
    found = _run_checks(module, folder, processes, timeout)
    if any("connectFullMesh failed" in problem for problem in found.values()):
        again = folder / "again"
        again.mkdir()
        found = _run_checks(module, again, processes, timeout)
    return found


def _run_checks(module: str, folder: Path, processes: int, timeout: float) -> dict[str, str]:
    arguments = ("-m", __name__, module, str(folder), str(processes))
    try:
        done = run_python(*arguments, cwd=folder, environment=environment(), timeout=timeout)
        output = done.stdout + done.stderr
    except subprocess.TimeoutExpired as late:
        output = f"{late.output}{late.stderr}\nkilled after {timeout} s"
    found: dict[str, str] = {}
    for name in importlib.import_module(module).CHECKS:
        problems = []
        for rank in range(processes):
            path = folder / f"rank{rank}.json"
            results = json.loads(path.read_text()) if path.exists() else {}
            problem = results.get(name, f"was not run\n{output[-3000:]}")
            problems.extend([f"rank {rank}: {problem}"] if problem else [])
        found[name] = "\n".join(problems)
    return found


def environment() -> dict[str, str]:
    """That of a process that runs this package as users do, and can import the tests."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("APEX_IMPL", "TRITON_INTERPRET")}
    paths = map(str, (SOURCE, SOURCE / "compiled_names", ROOT))  # the second one of a source tree only
    return {**inherited, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def launched(processes: int) -> Iterator[list[dict[str, str]]]:
    """The numbers that a launcher gives each process in its environment, and the place where they meet."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    common = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    yield [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def main(module: str, folder: str, processes: int) -> None:
    """Imports, divides, and waits for all parts."""
    torch.set_num_threads(1)
    importlib.import_module(module)
    children = []
    for rank in range(processes):
        child = os.fork()
        if not child:
            status = 1
            try:
                run(module, folder, rank, processes)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def run(module: str, folder: str, rank: int, processes: int) -> None:
    """One process."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=PATIENCE),
    )
    checks: dict[str, Check] = importlib.import_module(module).CHECKS
    results = {}
    for name, check in checks.items():
        torch.manual_seed(0)
        try:
            check(rank)
            dist.barrier()
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
        Path(folder, f"rank{rank}.json").write_text(json.dumps(results))
        if results[name]:
            os._exit(1)
    dist.destroy_process_group()


def everywhere(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A tensor of all processes, by rank."""
    bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    gathered = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, bits)
    return [each.view(tensor.dtype).reshape(tensor.shape) for each in gathered]


def assert_same_everywhere(tensors: list[torch.Tensor]) -> None:
    """Equal bits in all processes."""
    for index, tensor in enumerate(tensors):
        for rank, other in enumerate(everywhere(tensor)):
            same = torch.equal(tensor.detach().reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
            assert same, f"tensor {index} differs on rank {rank}"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
