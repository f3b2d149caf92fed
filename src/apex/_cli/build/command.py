"""`apex build`: collect the launches of some calls, compile them in processes, list the written files."""

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
import typer

from ... import _env
from ...op_builder import ALL_OPS
from ...ops import _library
from ..console import make_console, make_table, print_json_document, print_table, with_progress
from .calls import Call, known_ops, parse_call


@dataclass
class Row:
    """Outcome of building a call for a GPU: kernels launched, programs compiled, programs found in the cache."""

    call: str
    gpu: str
    kernels: int
    compiled: int = 0
    found: int = 0
    seconds: float = 0.0


_compile_ahead = _library.LazyModule("apex.ops._compile_ahead")  # it needs Triton

# Programs to compile, each as the first row that needs it, GPU and launch. Worker processes are forks and get indices.
_tasks: list[tuple[Row, Any, Any]] = []


def run_build(
    ops: Sequence[str] | None,
    *,
    gpus: Sequence[str] | None = None,
    dtype: str = "bfloat16",
    cache: Path | None = None,
    installed_at: Path | None = None,
    jobs: int | None = None,
    as_json: bool = False,
    list_only: bool = False,
) -> int:
    """Compile the kernels of `ops` (see `parse_call`), or of the ops that environment variables select.

    Return the exit status: 0, or 1 if a kernel did not compile.
    """
    console, messages = make_console(), make_console(stderr=True)
    if list_only:
        table = make_table(console, None, "op", "shape", "for example")
        for name, op in known_ops().items():
            table.add_row(name, op.sizes[0], f"{name}:{op.sizes[1]}:{dtype}")
        print_table(console, table)
        return 0
    folder = (cache or _env.triton_cache()).absolute()
    problem = _library.triton_problem() or ("unset TRITON_INTERPRET" if _env.triton_interpreter_requested() else None)
    try:
        calls = [parse_call(name, dtype) for name in ops or selected_ops()]
        if not calls or problem:
            advice = "name what to compile, for example layer_norm:16384x4096; `apex build --list` shows the ops"
            raise ValueError(f"kernels cannot be compiled: {problem}" if calls else advice)
        rows = _plan(calls, gpus or ())
        folder.mkdir(parents=True, exist_ok=True)
        with _env.changed("TRITON_CACHE_DIR", str(folder)):
            failures = _compile(folder, jobs or os.cpu_count() or 1)
    except (ValueError, OSError) as error:
        option = "--gpu" if "--gpu" in str(error) else None
        raise typer.BadParameter(str(error), param_hint=option) from error
    if installed_at is not None:  # where the machines of a job will see the folder
        _move(folder, installed_at)
    if as_json:
        print_json_document({"cache": str(folder), "rows": [vars(row) for row in rows], "failures": failures})
        return int(bool(failures))
    counted = ("kernels", "compiled", "in cache", "seconds")
    table = make_table(console, None, "call", "GPU", *counted, right=counted)
    for row in rows:
        table.add_row(row.call, row.gpu, str(row.kernels), str(row.compiled), str(row.found), f"{row.seconds:.1f}")
    print_table(console, table)
    for failure in failures:
        messages.print(failure, style="red")
    console.print(f"the jobs find them with  TRITON_CACHE_DIR={installed_at or folder}")
    return int(bool(failures))


def selected_ops() -> list[str]:
    """Return the ops that `APEX_BUILD_<OP>=1` selects; `APEX_BUILD_CUDA_OPS=1` selects all except ops set to 0."""
    chosen = {name for name, op in ALL_OPS.items() if _env.is_on(op.BUILD_VAR, op.INCLUDE_FLAG)}
    return [name for name, op in known_ops().items() if chosen & set(op.extensions)]


def _plan(calls: Sequence[Call], gpus: Sequence[str]) -> list[Row]:
    """Fill `_tasks` with the programs that the calls need, each once; return a row for each call and GPU."""
    known = _compile_ahead.GPUS if gpus else _compile_ahead.gpu_here()
    unknown = [name for name in gpus if name not in known]
    if unknown or not known:
        said = f"--gpu {unknown[0]} is not known" if unknown else "there is no GPU here"
        raise ValueError(f"{said}; name one or more with --gpu: {', '.join(_compile_ahead.GPUS)}")
    _tasks.clear()
    rows, planned = [], set()
    for name in gpus or known:
        for call in calls:
            with _compile_ahead.planning(known[name]) as launches:
                try:
                    call.run(torch.device("meta"))
                except Exception as error:
                    raise ValueError(
                        f"{call.name} cannot be planned without its data: {type(error).__name__}: {error}. "
                        "A script makes its tensors on the default device, and reads no values of them"
                    ) from error
            if not launches:
                raise ValueError(f"{call.name} launches no kernel of apex on {name}: PyTorch's operators take it")
            rows.append(Row(call.name, name, len(launches)))
            for launch in launches:
                key = (name, *_compile_ahead.program_key(launch))
                if key not in planned:
                    planned.add(key)
                    _tasks.append((rows[-1], known[name], launch))
    return rows


def _compile(folder: Path, jobs: int) -> list[str]:
    """Compile `_tasks` and count the results in their rows; return the failures."""
    messages = make_console(stderr=True)
    before = {entry.name for entry in folder.iterdir()}
    failures: list[str] = []
    _compile_ahead.hash_triton()
    has_compiler = shutil.which("cc") is not None
    if not has_compiler and any(gpu.target.backend == "cuda" for _, gpu, _ in _tasks):
        messages.print("no C compiler (cc) is here: machines will compile Triton's launchers themselves")
    context = multiprocessing.get_context("fork")
    with (
        _compile_ahead.linkable_driver() if has_compiler else contextlib.nullcontext(),
        ProcessPoolExecutor(min(jobs, len(_tasks)), context, _ignore_output) as pool,
    ):
        futures = [pool.submit(_compile_task, number, has_compiler) for number in range(len(_tasks))]
        for number, future in enumerate(with_progress(futures, "kernels")):
            row, _, launch = _tasks[number]
            try:
                entry, seconds = future.result()
            except Exception as error:
                kernel = launch.prepared.kernel.name
                failures.append(f"{kernel} of {row.call} for {row.gpu}: {type(error).__name__}: {error}")
                continue
            row.found += entry in before
            row.compiled += entry not in before
            row.seconds += seconds
    return failures


def _ignore_output() -> None:
    """Keep the compilers' own output out of the table."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _compile_task(number: int, has_compiler: bool) -> tuple[str, float]:
    """Compile a program and its launcher in a worker process; return its folder in the cache, and the seconds."""
    start = time.perf_counter()
    _, gpu, launch = _tasks[number]
    compiled = _compile_ahead.compile_launch(launch, gpu)
    if has_compiler and gpu.target.backend == "cuda":
        _compile_ahead.compile_launcher(compiled)
    return _compile_ahead.entry_of(compiled), time.perf_counter() - start


def _move(folder: Path, installed_at: Path) -> None:
    """Rewrite the absolute paths in Triton's cache to the folder where the cache will be installed."""
    for group in folder.glob("*/__grp__*.json"):
        paths = json.loads(group.read_text())["child_paths"]
        moved = {name: str(installed_at / group.parent.name / Path(path).name) for name, path in paths.items()}
        group.write_text(json.dumps({"child_paths": moved}))
