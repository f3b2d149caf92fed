"""`apex tune`: note which launches a script or a list of shapes makes, search for quicker ones, write a table."""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ... import _env
from ..._atomic import atomic_file, make_folder
from ...ops import _library, _tuned
from ...ops._device import facts, forget_launches
from ...ops._tuned import Question, noting
from ..build.calls import known_ops, parse_call
from ..console import make_console, make_table, print_table, with_progress
from .search import Search, search

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def run_tune(
    *,
    ops: str = "",
    shapes: Path | None = None,
    record: Path | None = None,
    arguments: Sequence[str] | None = None,
    budget: str = "5m",
    output: Path | None = None,
) -> int:
    """Tune the launches of a script, of a file of shapes, or of the examples of `apex build --list`.

    Return the exit status: 0, or 130 if the search was interrupted; entries found before are in the table. Raise a
    ValueError or an OSError for a request that cannot be met.
    """
    seconds, device = parse_budget(budget), _gpu()
    output = output or _env.tuned_launches()
    if output is None:
        raise ValueError("there is no table to write to; name one with --output, or set APEX_TUNED")
    for table in _tuned.read_tables(output):
        if table.problem is not None:
            raise ValueError(f"{output} {table.problem}; name another file with --output")
    make_folder(output.parent)  # now, and not after a search of minutes
    if not os.access(output if output.exists() else output.parent, os.W_OK):
        raise PermissionError(f"{str(output)!r} cannot be written; name another file with --output")
    if arguments and record is None:
        raise ValueError(f"{arguments[0]!r} is an argument of no script; name the script with --record")
    if record is not None and shapes is not None:
        raise ValueError("give --shapes or --record, not both")
    if record is not None:
        questions = record_script(record, arguments or ())
    else:
        questions = record_shapes(list(known_ops()) if shapes is None else _lines(shapes), device)
    words = [word for word in ops.split(",") if word]
    chosen = [each for each in questions if not words or any(word in each[0].op for word in words)]
    if not chosen:
        asked = sorted({question.op for question, _ in questions})
        raise ValueError(f"nothing to tune: --ops {ops!r} is in none of the ops that are asked for, {', '.join(asked)}")
    outcomes, interrupted = tune(chosen, device, seconds, output)
    report(outcomes, len(chosen), output)
    return 130 if interrupted else 0


def parse_budget(text: str) -> float:
    """Return the seconds of `90s`, `5m`, `1h` or `90`; raise a ValueError for other text."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in UNITS else (text, "s")
    try:
        seconds = float(number) * UNITS[unit]
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"--budget {text!r} is no time; write 90s, 5m or 1h")
    return seconds


def _gpu() -> torch.device:
    problem = _library.triton_problem()
    if problem is None and not torch.cuda.is_available():
        problem = "there is no GPU here"
    if problem is not None:
        raise ValueError(f"launches are timed on the GPU that they are for: {problem}")
    return torch.device("cuda", torch.cuda.current_device())


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise ValueError(f"there is no file of shapes {str(path)!r}")
    try:
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is no text: {error}") from error
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    named = [line for line in lines if line]
    if not named:
        raise ValueError(f"{str(path)!r} names no shapes; write OP:SHAPE:DTYPE on each line")
    return named


def record_shapes(names: Sequence[str], device: torch.device) -> list[tuple[Question, Any]]:
    """Return the launches that calls of `apex build` would make, each with its rule's configuration; run no kernel."""
    from ...ops import _compile_ahead

    calls = [parse_call(name, "bfloat16") for name in names]
    (gpu,) = _compile_ahead.gpu_here().values()
    with noting() as noted, _compile_ahead.planning(gpu), _library.implementation("triton"):
        for call in calls:
            try:
                call.run(torch.device("meta"))
            except Exception as error:
                raise ValueError(f"{call.name} cannot be planned: {type(error).__name__}: {error}") from error
    return list(noted.values())


def record_script(script: Path, arguments: Sequence[str]) -> list[tuple[Question, Any]]:
    """Run a script; return its launches, each with its rule's configuration. Ctrl-C ends the script only."""
    if not script.is_file():
        raise ValueError(f"there is no script {str(script)!r}")
    before, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    try:
        with noting() as noted:
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise ValueError(f"{script} ended with status {end.code}, so that its launches are not tuned") from end
    except KeyboardInterrupt:
        pass
    except Exception as error:
        raise ValueError(f"{script} failed: {type(error).__name__}: {error}") from error
    finally:
        sys.argv, sys.path[:] = before, path
    if not noted:
        raise ValueError(f"{script} launches nothing that can be tuned")
    return list(noted.values())


def tune(
    questions: Sequence[tuple[Question, Any]], device: torch.device, seconds: float, output: Path
) -> tuple[list[Search], bool]:
    """Search, and write the table again after every entry found; return the outcomes and whether Ctrl-C ended it."""
    outcomes: list[Search] = []
    try:
        for outcome in with_progress(search(questions, device, seconds), "launches", len(questions)):
            outcomes.append(outcome)
            if outcome.config:
                write_entries(output, facts(device).name, [outcome.entry()])
    except KeyboardInterrupt:
        return outcomes, True
    finally:
        forget_launches()
    return outcomes, False


def write_entries(path: Path, gpu: str, entries: Sequence[dict[str, Any]]) -> None:
    """Add entries for this GPU, driver and Triton to a file, which keeps its other tables."""
    here = {"gpu": gpu, **_tuned.versions()}
    tables = {tuple(getattr(table, name) for name in here): table.entries for table in _tuned.read_tables(path)}
    mine = [*tables.get(tuple(here.values()), ()), *entries]
    tables[tuple(here.values())] = list({_tuned.key_of(entry): entry for entry in mine}.values())
    make_folder(path.parent)
    with atomic_file(path, "w") as file:
        # A line for each entry, so that differences can be read.
        heads = [json.dumps({**dict(zip(here, head, strict=True)), "entries": []})[:-2] for head in tables]
        lines = [",\n".join(map(json.dumps, each)) for each in tables.values()]
        bodies = ",\n".join(f"{head}\n{line}\n]}}" for head, line in zip(heads, lines, strict=True))
        file.write(f'{{"format": {_tuned.FORMAT}, "tables": [\n{bodies}\n]}}\n')


def report(outcomes: Sequence[Search], asked: int, output: Path) -> None:
    """Print a row for every launch: the configuration found, or why the default stays."""
    console = make_console()
    numbers = ("before", "after", "gain", "tried")
    table = make_table(console, None, "op", "dtype", "shape", *numbers, "found", right=numbers)
    for each in outcomes:
        shape = " ".join(f"{name}={value}" for name, value in each.question.shape.items())
        times = ["", "", ""]
        if each.config:
            times = [f"{each.before:.1f}", f"{each.after:.1f}", f"{each.before / each.after - 1:.1%}"]
        found = ", ".join(f"{name} {each.instead_of[name]} -> {value}" for name, value in each.config.items())
        found = found or each.reason or "the rule's answer"
        table.add_row(each.question.op, each.question.dtype, shape, *times, str(each.tried), found)
    print_table(console, table)
    kept = sum(bool(each.config) for each in outcomes)
    console.print(f"{kept} of {len(outcomes)} launches have something quicker, at least 3% beyond noise.")
    if len(outcomes) < asked:
        console.print(f"{asked - len(outcomes)} were not looked at: raise --budget, or choose with --ops.")
    if kept:
        console.print(f"table: {output}")
