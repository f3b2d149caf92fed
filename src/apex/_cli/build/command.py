"""`apex build`: collect the launches of some calls, compile them in processes, say what was written."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ... import _env
from ...ops import _library
from ..console import make_console, make_table, print_json_document, print_table
from .calls import OPS, Call, ops_behind, parse_call, shape_of


@dataclass(frozen=True)
class Task:
    """One program to compile, for the first of the calls that need it."""

    call: str
    gpu: str
    launch: Any


@dataclass
class Row:
    """What became of a call on a GPU: kernels that it launches, programs compiled, and found in the cache."""

    call: str
    gpu: str
    kernels: int
    compiled: int = 0
    found: int = 0
    seconds: float = 0.0


_tasks: list[Task] = []  # what worker processes, which are forks, find under a number


def run_build(
    names: Sequence[str],
    *,
    gpus: Sequence[str] = (),
    dtype: str = "bfloat16",
    cache: Path | None = None,
    installed_at: Path | None = None,
    jobs: int | None = None,
    as_json: bool = False,
    list_only: bool = False,
) -> int:
    """Compiles the kernels of `names` (see `parse_call`) into Triton's cache and returns an exit status.

    `gpus` are names of `apex.ops._ahead.GPUS`, by default the GPU here. `cache` is the folder (default: Triton's own);
    `installed_at` is the path under which the machines of a job will see it, if not the same. The status is 0, 1 where
    a kernel did not compile, 2 for a request that cannot be met.
    """
    console, messages = make_console(), make_console(stderr=True)
    if list_only:
        table = make_table(console, None, "op", "shape", "for example")
        for name, op in OPS.items():
            table.add_row(name, " x ".join(op.sizes), f"{name}:{shape_of(op)}:{dtype}")
        print_table(console, table)
        return 0
    try:
        rows, failures, folder = build([parse_call(name, dtype) for name in names], gpus, cache, jobs)
    except (ValueError, OSError) as error:
        messages.print(f"apex build: {error}", style="red")
        return 2
    if installed_at is not None:
        _move(folder, installed_at)
    if as_json:
        document = {"cache": str(folder), "rows": [vars(row) for row in rows], "failures": failures}
        print_json_document(document)
        return 1 if failures else 0
    counted = ("kernels", "compiled", "in cache", "seconds")
    table = make_table(console, None, "call", "GPU", *counted, right=counted)
    for row in rows:
        numbers = map(str, (row.kernels, row.compiled, row.found, f"{row.seconds:.1f}"))
        table.add_row(row.call, row.gpu, *numbers)
    print_table(console, table)
    for failure in failures:
        messages.print(failure, style="red")
    console.print(f"the jobs find them with  TRITON_CACHE_DIR={installed_at or folder}")
    return 1 if failures else 0


def selected_ops() -> list[str]:
    """The ops that `APEX_BUILD_<OP>=1` selects; `APEX_BUILD_CUDA_OPS=1` selects all but those that are set to 0."""
    from apex.op_builder import ALL_OPS

    chosen = [
        name
        for name, builder in ALL_OPS.items()
        if _env.is_on(builder.BUILD_VAR if _env.is_set(builder.BUILD_VAR) else builder.INCLUDE_FLAG)
    ]
    return ops_behind(chosen)


def build(
    calls: Sequence[Call], gpus: Sequence[str], cache: Path | None, jobs: int | None
) -> tuple[list[Row], list[str], Path]:
    """Compiles what `calls` launch on `gpus`: a row for each of both, what failed, and the cache's folder."""
    if not calls:
        raise ValueError("name what to compile, for example layer_norm:16384x4096; `apex build --list` shows the ops")
    problem = _library.triton_problem()
    if problem or _env.triton_interpreter_requested():
        raise ValueError(f"kernels cannot be compiled: {problem or 'unset TRITON_INTERPRET'}")
    folder = (cache or _env.triton_cache()).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    targets = _targets(gpus)
    rows = _plan(calls, targets)
    with _env.changed("TRITON_CACHE_DIR", str(folder)):
        return list(rows.values()), _compile(rows, targets, folder, jobs or os.cpu_count() or 1), folder


def _targets(names: Sequence[str]) -> dict[str, Any]:
    from ...ops import _ahead

    if not names:
        here = _ahead.gpu_here()
        if here is None:
            raise ValueError(f"there is no GPU here; name one or more with --gpu: {', '.join(_ahead.GPUS)}")
        return {here.facts.name: here}
    unknown = [name for name in names if name not in _ahead.GPUS]
    if unknown:
        raise ValueError(f"--gpu {unknown[0]} is not known; use one of {', '.join(_ahead.GPUS)}, or none on the GPU")
    return {name: _ahead.GPUS[name] for name in names}


def _plan(calls: Sequence[Call], targets: dict[str, Any]) -> dict[tuple[str, str], Row]:
    """Fills `_tasks` with the programs that the calls need, each once."""
    from ...ops import _ahead

    _tasks.clear()
    rows = {}
    for gpu, target in targets.items():
        known: dict[tuple[Any, ...], None] = {}
        for call in calls:
            with _ahead.planning(target) as launches:
                try:
                    call.run(torch.device("meta"))
                except Exception as error:
                    raise ValueError(
                        f"{call.name} cannot be planned without its data: {type(error).__name__}: {error}. "
                        "A script makes its tensors on the default device, and reads no values of them"
                    ) from error
            if not launches:
                raise ValueError(f"{call.name} launches no kernel of apex on {gpu}: PyTorch's operators take it")
            rows[call.name, gpu] = Row(call.name, gpu, len(launches))
            for launch in launches:
                key = _ahead.program_key(launch)
                if key not in known:
                    known[key] = None
                    _tasks.append(Task(call.name, gpu, launch))
    return rows


def _compile(rows: dict[tuple[str, str], Row], targets: dict[str, Any], folder: Path, jobs: int) -> list[str]:
    from ...ops import _ahead

    messages = make_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=messages, disable=not messages.is_terminal, transient=True)
    before = {entry.name for entry in folder.iterdir()}
    nvidia = [number for number, task in enumerate(_tasks) if targets[task.gpu].target.backend == "cuda"]
    _ahead.hash_triton()
    failures: list[str] = []
    kinds: dict[Any, int] = {}
    with contextlib.ExitStack() as stack:
        if nvidia and shutil.which("cc"):
            stack.enter_context(_ahead.linkable_driver())
        elif nvidia:
            messages.print("no C compiler (cc) is here: the GPU machines will compile Triton's launchers themselves")
            nvidia = []
        pool = stack.enter_context(
            ProcessPoolExecutor(min(jobs, len(_tasks)), multiprocessing.get_context("fork"), _quietly)
        )
        stack.enter_context(progress)
        bar = progress.add_task("kernels", total=len(_tasks))
        futures = [pool.submit(_compile_task, targets[task.gpu], number) for number, task in enumerate(_tasks)]
        for number, (task, future) in enumerate(zip(_tasks, futures, strict=True)):
            row = rows[task.call, task.gpu]
            try:
                entry, kind, seconds = future.result()
            except Exception as error:
                kernel = task.launch.prepared.kernel.name
                failures.append(f"{kernel} of {task.call} for {task.gpu}: {type(error).__name__}: {error}")
            else:
                row.found += entry in before
                row.compiled += entry not in before
                row.seconds += seconds
                if number in nvidia:
                    kinds.setdefault(kind, number)
            progress.advance(bar)
        launchers = [None, *kinds.values()] if nvidia else []
        progress.update(bar, description="launchers", total=len(_tasks) + len(launchers))
        for done in [pool.submit(_compile_launcher, targets, number) for number in launchers]:
            done.result()
            progress.advance(bar)
    return failures


def _quietly() -> None:
    """What compilers print is no part of the table."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _compile_task(gpu: Any, number: int) -> tuple[str, tuple[str, ...], float]:
    """In a worker: the folder of the cache that holds the program, the types of its arguments, seconds."""
    from ...ops import _ahead

    start = time.perf_counter()
    compiled = _ahead.compile_launch(_tasks[number].launch, gpu)
    entry = Path(next(iter(compiled.metadata_group.values()))).parent.name
    return entry, tuple(map(str, compiled.src.signature.values())), time.perf_counter() - start


def _compile_launcher(targets: dict[str, Any], number: int | None) -> None:
    from ...ops import _ahead

    task = None if number is None else _tasks[number]
    _ahead.compile_launcher(None if task is None else _ahead.compile_launch(task.launch, targets[task.gpu]))


def _move(folder: Path, installed_at: Path) -> None:
    """Triton notes absolute paths in its cache; lets them begin with where the cache will be."""
    for group in folder.glob("*/__grp__*.json"):
        content = json.loads(group.read_text())
        content["child_paths"] = {
            name: str(installed_at / group.parent.name / Path(path).name)
            for name, path in content["child_paths"].items()
        }
        group.write_text(json.dumps(content))
