"""`apex memory`: estimate the GPU memory of a training step at each opt level, and measure it if asked to."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import torch
import typer

from .._memory.estimate import CONTEXT, GAPS, Measured, Memory, estimate, largest_batch, measure
from .._memory.optimizer_states import state_bytes
from .._memory.tasks import find_task, parse_shape
from .._memory.training import OPT_LEVELS, Settings
from .console import make_console, make_table, print_json_document, print_table
from .errors import as_bad_parameter

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_ROWS = ("parameters", "buffers", "gradients", "masters", "state", "buckets", "fixed", "activations", "peak")


def run_memory(
    model: str | None,
    *,
    states: bool = False,
    opt_levels: str | None,
    shapes: Sequence[str] | None,
    device_limit: str | None,
    measured: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Print the estimates, and measurements if asked for, or the bytes of optimizers, as a table or as JSON."""
    if states:
        if model is not None:
            raise typer.BadParameter(f"--states lists all optimizers and takes no model, but {model!r} is given")
        _print_states(as_json)
        return
    with as_bad_parameter(ValueError, TypeError, RuntimeError):
        if model is None:
            raise ValueError("a model is needed, as MODULE:FACTORY, FILE.py:FACTORY or a config.json; or --states")
        limit = parse_size(device_limit) if device_limit else gpu_memory()
        if measured and not torch.cuda.is_available():
            raise ValueError("--measure needs a GPU, and PyTorch finds none here")
        task = find_task(model, [parse_shape(shape) for shape in shapes or ()])
        levels = opt_levels.split(",") if opt_levels else list(OPT_LEVELS)
        rows = []
        for level in levels:
            settings = Settings(opt_level=level, **options)
            estimated = estimate(task, settings)
            fits = None if limit is None else largest_batch(task, settings, limit)
            real = measure(task, settings, torch.device("cuda", torch.cuda.current_device())) if measured else None
            rows.append((settings, estimated, fits, real))
    if as_json:
        print_json_document({"model": model, "limit": limit, "levels": [_as_dict(*row) for row in rows]})
    else:
        _print(rows, limit)


def _print_states(as_json: bool) -> None:
    """Print the bytes per parameter of every optimizer and format of state."""
    rows = state_bytes()
    if as_json:
        print_json_document({"states": [row._asdict() for row in rows]})
        return
    console = make_console()
    console.print("bytes per bfloat16 parameter: state with masters; total with the parameter and its gradient\n")
    table = make_table(console, None, "optimizer", "options", "state", "total", right=("state", "total"))
    for row in rows:
        table.add_row(row.optimizer, row.options, f"{row.state:.2f}", f"{row.total:.2f}")
    print_table(console, table)


def parse_size(text: str) -> int:
    """Return the bytes of a size such as "80GiB", "80GB" or "80B"; a size without a unit raises a ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*((?:[KMG]I?)?B)?\s*", text.upper())
    if match is None:
        raise ValueError(f"--device-limit {text!r} is not a size such as 80GiB, 80GB or 80B")
    if match[2] is None:
        number = match[1]
        raise ValueError(f"--device-limit {text!r} has no unit: write {number}GiB, {number}GB or {number}B")
    return int(float(match[1]) * _UNITS[match[2]])


def gpu_memory() -> int | None:
    """Return the memory of the current GPU in bytes, or None without a GPU."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def _as_dict(settings: Settings, memory: Memory, fits: int | None, real: Measured | None) -> dict[str, Any]:
    """Return a row as plain data for JSON."""
    estimated = {**dataclasses.asdict(memory), "margin": memory.margin, "total": memory.total}
    measured = None if real is None else dataclasses.asdict(real)
    return {**dataclasses.asdict(settings), "estimated": estimated, "largest_batch": fits, "measured": measured}


def _print(rows: Sequence[tuple[Settings, Memory, int | None, Measured | None]], limit: int | None) -> None:
    console = make_console()
    settings = rows[0][0]
    shown = {name: value for name, value in list(vars(settings).items())[1:] if value not in (False, 1)}
    shown = {"batch": settings.batch, **shown}
    console.print(f"a training step: {', '.join(f'{name} {value}' for name, value in shown.items())}\n")
    levels = [settings.opt_level for settings, *_ in rows]
    table = make_table(console, None, "MiB", *levels, right=tuple(levels))
    for name in (*_ROWS, "workspace", "margin", "total"):
        table.add_row(name, *(f"{getattr(memory, name) / (1 << 20):.1f}" for _, memory, *_ in rows))
    for name in ("fixed", "activations", "peak", "reserved"):
        if rows[0][3] is not None:
            table.add_row(f"measured {name}", *(f"{getattr(real, name) / (1 << 20):.1f}" for *_, real in rows))
    if limit is not None:
        batches = ["any" if fits is None else str(fits) for _, _, fits, _ in rows]
        table.add_row(f"largest batch in {limit / (1 << 30):.1f} GiB", *batches)
    print_table(console, table)
    console.print(f"margin: {CONTEXT >> 20} MiB for the driver's context and {GAPS:.0%} of the peak for gaps")
