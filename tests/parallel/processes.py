"""Checks that run in several processes at once, connected by Gloo on the CPU: all of a file in one start.

A module of checks has a dict `CHECKS` of functions that take the rank, and may have a function `BEFORE` that every rank
calls before it is connected to the others. One process imports everything and then forks a process per rank: imports
take longer than most checks. These processes see no GPU. Checks that need one run in real processes, since the driver
of a GPU cannot be used in forks.

A rank whose check fails writes its error down and keeps its connections open, so that the other ranks wait for it
instead of failing with "connection closed". The forking process gives them `GRACE` seconds to find an error of their
own, and then ends them all. Checks behind the failed one run in new processes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import apex
from tests.support.forks import fork
from tests.support.warm import run_python

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(apex.__file__).resolve().parents[1]
# Seconds that a process waits for others: a hang is an error, not a test that takes long.
PATIENCE = 30
# Seconds that the other ranks have to find an error of their own after one rank has failed.
GRACE = 2.0
# How a line about a rank begins that ended without being told to.
ENDED = "ended by itself: rank"
needs_fsdp_on_a_cpu = pytest.mark.skipif(torch.__version__ < "2.7", reason="PyTorch 2.6 has no FSDP2 for a CPU")

Check = Callable[[int], None]


def run_checks(
    module: str, folder: Path, processes: int = 2, timeout: float = 150, on_gpu: bool = False
) -> dict[str, str]:
    """Run all checks of a module and return what went wrong in each: "" if it passed in all processes.

    With `on_gpu` the processes see the GPU, which they share. Checks behind a failed one are run in new processes. On a
    busy machine Gloo at times loses a connection that it is making, without any process having ended: all checks are
    started once more then.
    """
    checks = list(importlib.import_module(module).CHECKS)
    found = _run_checks(module, checks, folder, processes, timeout, on_gpu)
    if any("connectFullMesh failed" in problem for problem in found.values()):
        folder = folder / "again"
        folder.mkdir()
        found = _run_checks(module, checks, folder, processes, timeout, on_gpu)
    while len(found) < len(checks):
        found |= _run_checks(module, checks[len(found) :], folder, processes, timeout, on_gpu)
    return found


def _run_checks(
    module: str, checks: list[str], folder: Path, processes: int, timeout: float, on_gpu: bool
) -> dict[str, str]:
    """Run checks in one set of processes and return their problems, up to and including the first failed check."""
    for rank in range(processes):
        (folder / f"rank{rank}.json").unlink(missing_ok=True)
    (folder / "store").unlink(missing_ok=True)
    arguments = ("-m", __name__, module, str(folder), str(processes), checks[0], *(["real"] if on_gpu else []))
    try:
        done = run_python(*arguments, cwd=folder, environment=environment(on_gpu), timeout=timeout)
        output = done.stdout + done.stderr
    except subprocess.TimeoutExpired as late:
        output = f"{late.output}{late.stderr}\nkilled after {timeout} s"
    paths = [folder / f"rank{rank}.json" for rank in range(processes)]
    results = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
    found: dict[str, str] = {}
    for name in checks:
        found[name] = _problem_of([result.get(name) for result in results], output)
        if found[name]:
            break
    return found


def _problem_of(results: list[str | None], output: str) -> str:
    """Return what went wrong in a check, given each rank's error: "" if it passed, None if the rank did not finish.

    A rank that did not finish waited for one that failed, unless it ended by itself: `main` prints that.
    """
    problems = [f"rank {rank}: {result}" for rank, result in enumerate(results) if result]
    ended = [line for line in output.splitlines() if line.startswith(ENDED)]
    unfinished = [str(rank) for rank, result in enumerate(results) if result is None]
    if unfinished and (ended or not problems):
        problems += [*ended, f"not finished by rank {', '.join(unfinished)}; output:\n{output[-3000:]}"]
    return "\n".join(problems)


def environment(on_gpu: bool = False) -> dict[str, str]:
    """Return the environment of a process that runs this package as users do and can import the tests.

    Without `on_gpu` it hides the GPUs of the machine, so that the process may fork.
    """
    inherited = {key: value for key, value in os.environ.items() if key not in ("APEX_IMPL", "TRITON_INTERPRET")}
    paths = map(str, (SOURCE, SOURCE / "compiled_names", ROOT))  # the second one of a source tree only
    hidden = {} if on_gpu else {"CUDA_VISIBLE_DEVICES": "-1"}
    return {**inherited, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **hidden}


@contextlib.contextmanager
def launched(processes: int) -> Iterator[list[dict[str, str]]]:
    """Return the environment variables that a launcher sets for each process: its numbers and the meeting point."""
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


def main(module: str, folder: str, processes: int, first: str, real: bool) -> None:
    """Start a process per rank that runs the checks from `first` on, and wait for all of them."""
    if not real:
        prepare(module)
        gc.freeze()  # no rank looks for garbage among the objects of its imports
    # A failed rank writes a byte; the pipe ends when all ranks have ended.
    reading, failed = os.pipe()
    start = _start if real else _fork
    children = [start(module, folder, rank, processes, first, failed) for rank in range(processes)]
    os.close(failed)
    all_end = not os.read(reading, 1) or _have_others_ended(reading, processes - 1)
    for rank, child in enumerate(children):
        ended, status = os.waitpid(child, 0 if all_end else os.WNOHANG)
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        elif status:
            print(f"{ENDED} {rank}, exit code {os.waitstatus_to_exitcode(status)}", flush=True)


def prepare(module: str) -> None:
    """Import a module of checks into a process in which a rank is to run."""
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        # For devices that may come PyTorch would keep the stack of every call that seeds them: a millisecond each time.
        for devices in (torch.cuda, torch.mtia, torch.xpu):
            devices.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]
    importlib.import_module(module)


def _fork(module: str, folder: str, rank: int, processes: int, first: str, failed: int) -> int:
    """Return the number of a fork of this process that becomes a rank."""
    child = fork()
    if child:
        return child
    status = 1
    try:
        run(module, folder, rank, processes, first, failed)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _start(module: str, folder: str, rank: int, processes: int, first: str, failed: int) -> int:
    """Return the number of a new process that becomes a rank."""
    code = f"from {__spec__.name} import prepare, run; prepare({module!r})"
    code += f"; run({module!r}, {folder!r}, {rank}, {processes}, {first!r}, {failed})"
    os.set_inheritable(failed, True)
    return os.posix_spawn(sys.executable, (sys.executable, "-c", code), os.environ)


def _have_others_ended(reading: int, others: int) -> bool:
    """Wait until this many further ranks have failed or all have ended, at most for `GRACE` seconds."""
    end = time.monotonic() + GRACE
    while others and select.select([reading], [], [], max(0.0, end - time.monotonic()))[0]:
        if not os.read(reading, 1):
            return True
        others -= 1
    return False


def run(module: str, folder: str, rank: int, processes: int, first: str, failed: int) -> None:
    """Run the checks from `first` on as one rank; after a failure tell the forking process through `failed`."""
    getattr(importlib.import_module(module), "BEFORE", lambda: None)()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=PATIENCE),
    )
    checks: dict[str, Check] = importlib.import_module(module).CHECKS
    results = {}
    for name in list(checks)[list(checks).index(first) :]:
        torch.manual_seed(0)
        try:
            checks[name](rank)
            dist.barrier()
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
        Path(folder, f"rank{rank}.json").write_text(json.dumps(results))
        if results[name]:
            sys.stdout.flush()
            sys.stderr.flush()
            os.write(failed, b"!")
            signal.pause()  # connections stay open; the forking process ends this one
    dist.destroy_process_group()


def everywhere(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return a tensor of all processes, by rank."""
    bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    gathered = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, bits)
    return [each.view(tensor.dtype).reshape(tensor.shape) for each in gathered]


def assert_same_everywhere(tensors: list[torch.Tensor]) -> None:
    """Assert that a tensor is bitwise equal in all processes."""
    for index, tensor in enumerate(tensors):
        for rank, other in enumerate(everywhere(tensor)):
            same = torch.equal(tensor.detach().reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
            assert same, f"tensor {index} differs on rank {rank}"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], real=sys.argv[5:] == ["real"])
