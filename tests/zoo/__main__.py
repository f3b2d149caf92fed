"""The errors of boosted steps of many models: `make zoo`.

    python -m tests.zoo --library handwritten                         # a table in the terminal
    python -m tests.zoo --names "DiT*" VAE --precisions bf16
    python -m tests.zoo --jobs 8 --device cuda --output zoo.json      # with what is installed
    python -m tests.zoo --output zoo.json --resume                    # goes on after an interruption
    python -m tests.zoo --record              # writes benchmarks/results/<device>-zoo.json and docs/zoo.md

`judge.py` says what the errors are. A model is absent if it does not run in float32, and not judged if it does not run
under `torch.autocast`. Rows of earlier runs stay in the file.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

# Before anything imports PyTorch: processes that share cores should not start threads for each of them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from apex._bench.environment import describe, device_name, device_stem

from . import page
from .judge import COPIES, PRECISIONS, SEEDS, misses
from .table import EXCEPTIONS, LIBRARIES, RAISES, chosen
from .workers import run

ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__.splitlines()[0])
    parser.add_argument("--library", nargs="*", choices=LIBRARIES, default=list(LIBRARIES), help="default: all")
    parser.add_argument("--names", nargs="*", default=[], help='models, or patterns as in "BERT*"; default: all')
    parser.add_argument("--precisions", nargs="*", choices=PRECISIONS, default=None, help="default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="seeds of weights and inputs")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for a model")
    parser.add_argument("--output", type=Path, help="a JSON file for the rows")
    parser.add_argument("--resume", action="store_true", help="keep rows of the same source and versions in the file")
    parser.add_argument("--record", action="store_true", help="write the device's record and docs/zoo.md")
    arguments = parser.parse_args()

    output = _record_path(arguments.device) if arguments.record else arguments.output
    if arguments.precisions is None:  # "bf16" has copies on a GPU anyway
        arguments.precisions = [name for name in PRECISIONS if name != COPIES or arguments.device == "cpu"]
    keys, absent = chosen(arguments.library, arguments.names)
    record = json.loads(output.read_text()) if output is not None and output.exists() else {"rows": {}}
    head = {**describe(torch.device(arguments.device)), "run": _run(), "absent": absent}
    head["versions"] |= _versions()
    rows: dict[str, Any] = record["rows"]
    if arguments.resume:
        keys = [key for key in keys if rows.get(key, {}).get("run") != head["run"] or "died" in rows[key]]
    record = {**head, "rows": rows}
    console, found = Console(), dict[str, Any]()
    for library, reason in absent.items():
        _print(console, f"{library} is not here: {reason}")
    columns = (TextColumn("{task.description:44.44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(keys))
        running = run(
            keys, arguments.device, tuple(arguments.precisions), arguments.seeds, arguments.jobs, arguments.timeout
        )
        for key, row in running:
            found[key] = rows[key] = {**row, "run": head["run"]}
            progress.update(task, advance=1, description=key)
            if not console.is_terminal or _faults(key, row):
                progress.console.print(
                    f"{len(found):4}/{len(keys)} {_line(key, row)}", markup=False, highlight=False, soft_wrap=True
                )
            if output is not None:
                _write(output, record)
    _summarize(console, found)
    if arguments.record:
        page.write(ROOT)
    return int(any(_faults(key, row) for key, row in found.items()))


def _faults(key: str, row: dict[str, Any]) -> list[str]:
    """Return what a row misses, as in "bf16 loss", if no exception excuses it."""
    if "died" in row:
        return ["died"]
    if key in EXCEPTIONS:
        return []
    found = ((precision, name) for precision in PRECISIONS for name in misses(row, precision))
    return [f"{precision} {name}" for precision, name in found if (key, precision) not in RAISES]


def _line(key: str, row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    for reason in ("absent", "died"):
        if reason in row:
            return f"{key:44} {reason}: {row[reason]}"
    parts = [key.ljust(44)]
    for name in ("autocast", *PRECISIONS):
        if "error" in row.get(name, {}):
            parts.append(f"{name}: {row[name]['error'][:110]}")
        elif name in row:
            parts.append(f"{name} {page.number(row[name]['loss'])} {page.number(row[name]['gradient'])}")
    return "  ".join([*parts, *(["MISSES " + ", ".join(_faults(key, row))] if _faults(key, row) else [])])


def _summarize(console: Console, rows: dict[str, Any]) -> None:
    """Print how many models ran, and which missed what."""
    judged = [row for row in rows.values() if "error" not in row.get("autocast", {"error": ""})]
    _print(console, f"\n{len(rows)} models, {len(judged)} of which run in float32 and under torch.autocast")
    by_fault: dict[str, list[str]] = {}
    for key, row in rows.items():
        for fault in _faults(key, row):
            by_fault.setdefault(fault, []).append(key)
    for fault, keys in sorted(by_fault.items()):
        _print(console, f"{fault}: {len(keys)}: {', '.join(keys)}")


def _print(console: Console, text: str) -> None:
    """Print a line as it is, however long."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _record_path(device: str) -> Path:
    name = device_stem(device_name(torch.device(device))) if device == "cuda" else f"{platform.machine().lower()}-cpu"
    return ROOT / "benchmarks" / "results" / f"{name}-zoo.json"


def _write(path: Path, record: dict[str, Any]) -> None:
    """Write the record so that an interruption leaves the file before or the file after."""
    body = ",\n".join(f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in sorted(record["rows"].items()))
    head = json.dumps({name: value for name, value in record.items() if name != "rows"}, indent=1)
    temporary = path.with_suffix(".partial")
    temporary.write_text(f'{head[:-2]},\n "rows": {{\n{body}\n }}\n}}\n')
    temporary.replace(path)


def _versions() -> dict[str, str]:
    found = {}
    for name in ("transformers", "timm", "torchvision", "diffusers", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _run() -> str:
    """Return the commit of the source and PyTorch's version; changes that are not committed are marked."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return f"{commit}, PyTorch {torch.__version__}"


if __name__ == "__main__":
    sys.exit(main())
