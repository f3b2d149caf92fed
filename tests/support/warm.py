"""A fork server: `python arguments...` in a fork of a process that has imported PyTorch already.

The tests start about a hundred processes. Importing PyTorch takes each of them 4.8 s of CPU time on two loaded cores,
with its compiler, which its optimizers import, and its distributed parts 11.5 s: `make test` would take more than ten
minutes. A fork has its own environment, folder and output, and imports this package itself. It differs from a real
process in three ways: PyTorch read its environment variables when the server started; at the end functions registered
with `atexit` are called, but PyTorch is not taken apart; triton is imported, so that it cannot be made to interpret
kernels. Tests of importing or of a process as such start real ones, and so do all where there is a GPU, whose driver
may not be forked.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import inspect
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

# What many forks need: each would import it anew, pytest for 0.3 s.
IMPORTED = (
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)


def run_python(
    *arguments: str, cwd: Path, environment: Mapping[str, str], timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """What `python arguments...` becomes; what it prints goes to files."""
    return run_together([arguments], cwd=cwd, environments=[environment], timeout=timeout)[0]


def run_together(
    commands: Sequence[Sequence[str]], *, cwd: Path, environments: Sequence[Mapping[str, str]], timeout: float = 120
) -> list[subprocess.CompletedProcess[str]]:
    """Several at once, each with an environment of its own."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [(f"{folder}/{index}.out", f"{folder}/{index}.err") for index in range(len(commands))]
        requests = [
            {"arguments": list(arguments), "cwd": str(cwd), "environment": dict(environment), "outputs": names}
            for arguments, environment, names in zip(commands, environments, outputs, strict=True)
        ]
        run = _run_real_ones if torch.cuda.is_available() else _ForkServer.common().run
        statuses = run(requests, timeout)
        texts = [[Path(name).read_text() if Path(name).exists() else "" for name in names] for names in outputs]
    if statuses is None:
        raise subprocess.TimeoutExpired(commands[0], timeout, *("\n".join(text) for text in zip(*texts, strict=True)))
    return [
        subprocess.CompletedProcess(list(arguments), status, *text)
        for arguments, status, text in zip(commands, statuses, texts, strict=True)
    ]


def _run_real_ones(requests: list[dict[str, Any]], timeout: float) -> list[int] | None:
    """As `_ForkServer.run`."""
    processes = []
    for request in requests:
        with open(request["outputs"][0], "w") as output, open(request["outputs"][1], "w") as errors:
            command = [sys.executable, *request["arguments"]]
            places: dict[str, Any] = {"cwd": request["cwd"], "stdin": subprocess.DEVNULL, "stdout": output}
            environment = {**request["environment"], "OMP_NUM_THREADS": "1"}
            processes.append(
                subprocess.Popen(command, **places, stderr=errors, env=environment, start_new_session=True)
            )
    deadline = time.monotonic() + timeout
    try:
        return [process.wait(deadline - time.monotonic()) for process in processes]
    except subprocess.TimeoutExpired:
        return None
    finally:
        _kill([process.pid for process in processes])
        for process in processes:
            process.wait()


class _ForkServer:
    """The process that forks: a line of JSON in, one with the numbers of the forks out, one with their exit codes."""

    _common: _ForkServer | None = None

    def __init__(self) -> None:
        left_out = ("APEX_IMPL", "PYTHONPATH", "TRITON_INTERPRET")
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # an answer that came into a buffer together with the one before would be waited for
            env={**environment, "OMP_NUM_THREADS": "1"},
        )

    @classmethod
    def common(cls) -> _ForkServer:
        """That of this process, which starts it when it is needed and stops it at its end."""
        if cls._common is None:
            cls._common = cls()
            atexit.register(cls.stop)
        return cls._common

    @classmethod
    def stop(cls) -> None:
        server, cls._common = cls._common, None
        if server is not None:
            server._process.communicate()

    def run(self, requests: list[dict[str, Any]], timeout: float) -> list[int] | None:
        """Exit codes; None if not all ended in time, and then they were killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        children: list[int] = []
        try:
            self._process.stdin.write(json.dumps(requests).encode() + b"\n")
            children = self._answer()
            in_time = select.select([self._process.stdout], [], [], timeout)[0]
            if not in_time:
                _kill(children)
            statuses = self._answer()
        except BaseException:  # such as one that ends a test
            _kill(children)
            self._process.kill()
            type(self).stop()
            raise
        return statuses if in_time else None

    def _answer(self) -> list[int]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that forks is gone: {self._process.wait()}")
        return json.loads(line)


def _kill(children: list[int]) -> None:
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


def _serve() -> dict[str, Any] | None:
    """Answers requests; returns None at their end, and in a fork what it is to be."""
    reading, writing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    for line in reading:
        children = []
        for request in json.loads(line):
            child = os.fork()
            if child == 0:
                reading.close()
                writing.close()
                return request
            children.append(child)
        writing.write(json.dumps(children).encode() + b"\n")
        writing.flush()
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        writing.write(json.dumps(statuses).encode() + b"\n")
        writing.flush()
    return None


def _become(request: dict[str, Any]) -> None:
    """`python arguments...`, to the end of the process."""
    status = 1
    try:
        _run(request)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for output in (sys.stdout, sys.stderr):
            output.flush()
        os._exit(status)


def _run(request: dict[str, Any]) -> None:
    os.setsid()
    for path, number in zip((os.devnull, *request["outputs"]), range(3), strict=True):
        opened = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    first, *rest = request["arguments"]
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    start = os.path.dirname(os.path.abspath(first)) if first not in ("-c", "-m") else os.getcwd()
    sys.path[:] = [start, *map(os.path.abspath, given), *sys.path[1:]]
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    for name in IMPORTED:
        importlib.import_module(name)
    torch.set_num_threads(1)  # threads are lost in a fork
    inspect.getmodule(sys._getframe())  # notes the file of every module: 0.04 s for each fork that registers an op
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # as in `conftest`
    fork = _serve()
    if fork is not None:
        _become(fork)
