"""docs/zoo.md, made of the records in benchmarks/results: `python -m tests.zoo.page`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .judge import GRADIENT_BAR, LOSS_BAR, PRECISIONS, misses
from .table import EXCEPTIONS, RAISES

HEAD = """# The zoo

How far one step of a model is from the same step in float32, by `torch.autocast` in bfloat16 and by `apex.boost`:
{count} models, all tiny, of transformers, timm, torchvision and diffusers, and as people write them by hand. `make zoo`
does it again, in an environment of its own, and writes this page.

Weights, inputs and random draws are the same for each. The error of a loss is relative; the error of gradients is the
2-norm of all differences together, divided by the 2-norm of the gradients in float32. Both are root mean squares over
three seeds, or twelve if a bar would be missed; the loss's stands first. A number in bold misses a bar: "bf16" runs
wherever autocast runs, with an error of the loss of at most {loss} autocast's, and of gradients of
at most {gradient} autocast's. "bf16 copies" is "bf16" as on an accelerator, where a model computes with
half-precision copies of its weights; on a GPU that is "bf16" itself. "fp8", in which every linear layer that can
multiplies in float8, however small, and "fp16" run too, with any error. "Not finite" says that a number overflowed.
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
    missed = [key for key, row in rows.items() if any(misses(row, precision) for precision in PRECISIONS)]
    lines = [f"## {record['device']['name']}", "", f"{versions}.", ""]
    lines += [f"{library} is absent: {reason}." for library, reason in record["absent"].items()]
    ran = [row for row in rows.values() if "autocast" in row and "error" not in row["autocast"]]
    lines.append(f"{len(ran)} models run under autocast. {len(missed)} of them miss a bar{':' if missed else '.'}")
    lines += ["", "| model | why |", "|---|---|", *(f"| {key} | {_reason(key, rows[key])} |" for key in missed)]
    columns = ["autocast", *(name for name in PRECISIONS if any(name in row for row in rows.values()))]
    for library in dict.fromkeys(key.split("/")[0] for key in rows):
        lines += ["", f"### {library}", "", f"| model | {' | '.join(columns)} | |", "|---" * (len(columns) + 2) + "|"]
        own = {key: row for key, row in rows.items() if key.split("/")[0] == library}
        lines += [_row(key, row, columns) for key, row in own.items() if "absent" not in row]
        missing = [key.split("/", 1)[1] for key, row in own.items() if "absent" in row]
        lines += ["", f"Not in these releases, or not run in float32: {'; '.join(missing)}."] if missing else []
    return "\n".join(lines) + "\n"


def _reason(key: str, row: dict[str, Any]) -> str:
    """Return what bars a row misses, and the reasons that are known."""
    parts = []
    for precision in PRECISIONS:
        what = " and ".join(misses(row, precision))
        reason = RAISES.get((key, precision)) or EXCEPTIONS.get(key) or "no reason is known"
        parts += [f"{precision}, {what}: {reason}"] if what else []
    return "; ".join(parts)


def _row(key: str, row: dict[str, Any], columns: list[str]) -> str:
    cells, remarks = [], list[str]()
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
    remarks += [row["died"]] if "died" in row else []
    remark = re.sub(r"([|<>*_`\[\]])", r"\\\1", "; ".join(remarks)[:200])
    return f"| {key.split('/', 1)[1]} | {' | '.join(cells)} | {remark} |"


if __name__ == "__main__":
    write(Path(__file__).parents[2])
