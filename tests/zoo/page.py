"""docs/zoo.md, made of the records in benchmarks/results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .judge import GRADIENT_BAR, LOSS_BAR, PRECISIONS, misses
from .table import EXCEPTIONS

HEAD = """# The zoo

How far one step of a model is from the same step in float32, by `torch.autocast` in bfloat16 and by `apex.boost`:
{count} models, all tiny, of transformers, timm, torchvision and diffusers, and as people write them by hand. `make zoo`
does it again, in an environment of its own, and writes this page.

Weights, inputs and random draws are the same for each. The error of a loss is relative; the error of gradients is the
2-norm of all differences together, divided by the 2-norm of the gradients in float32. Both are root mean squares over
three seeds; the loss's stands first. A number in bold misses a bar: "bf16" runs wherever autocast runs, with an error
of the loss of at most {loss} autocast's, and of gradients of at most {gradient} autocast's. "fp8",
in which every linear layer that can multiplies in float8, however small, and "fp16" run too, with any error. "Not
finite" says that a number overflowed.
"""


def number(value: float | None) -> str:
    """Return an error with two digits."""
    return "not finite" if value is None else f"{value:.1e}"


def write(root: Path) -> None:
    """Write the page of a source tree from its records."""
    records = [json.loads(path.read_text()) for path in sorted((root / "benchmarks/results").glob("*-zoo.json"))]
    (root / "docs/zoo.md").write_text(text(records))


def text(records: list[dict[str, Any]]) -> str:
    """Return the page."""
    count = max((sum("autocast" in row for row in record["rows"].values()) for record in records), default=0)
    loss, gradient = (f"{more:g} + {times:g} times" for times, more in (LOSS_BAR, GRADIENT_BAR))
    return "\n".join([HEAD.format(count=count, loss=loss, gradient=gradient), *map(_section, records)])


def _section(record: dict[str, Any]) -> str:
    rows, versions = record["rows"], ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    missed = {key: misses(row, "bf16") for key, row in rows.items()}
    lines = [f"## {record['device']['name']}", "", f"{versions}.", ""]
    lines += [f"{library} is absent: {reason}." for library, reason in record["absent"].items()]
    ran = [row for row in rows.values() if "autocast" in row and "error" not in row["autocast"]]
    lines.append(f"{len(ran)} models run under autocast. Of these miss a bar: {sum(map(bool, missed.values()))}.")
    columns = ("autocast", *PRECISIONS)
    for library in dict.fromkeys(key.split("/")[0] for key in rows):
        lines += ["", f"### {library}", "", f"| model | {' | '.join(columns)} | |", "|---" * (len(columns) + 2) + "|"]
        lines += [_row(key, row, columns) for key, row in rows.items() if key.split("/")[0] == library]
    return "\n".join(lines) + "\n"


def _row(key: str, row: dict[str, Any], columns: tuple[str, ...]) -> str:
    cells, remarks = [], [EXCEPTIONS[key]] if key in EXCEPTIONS else []
    for name in columns:
        result, missed = row.get(name), misses(row, name)
        if result is None:
            cells.append("")
        elif "error" in result:
            cells.append("**raises**" if missed else "raises")
            remarks.append(f"{name}: {result['error']}")
        else:
            numbers = ((kind, number(result[kind])) for kind in ("loss", "gradient"))
            cells.append(", ".join(f"**{value}**" if kind in missed else value for kind, value in numbers))
    remarks += [f"not run: {row[reason]}" for reason in ("absent", "died") if reason in row]
    remark = re.sub(r"([|<>*_`\[\]])", r"\\\1", "; ".join(remarks)[:200])
    return f"| {key.split('/', 1)[1]} | {' | '.join(cells)} | {remark} |"
