"""What the tuned launches of a table gain, beside the launch rules' answers, also for other members of a shape class.

    python benchmarks/tuned_launches.py --output tuned.json

Times are microseconds of the pass that the launch belongs to, on the GPU alone and with a cold cache, medians of turns
by the rules and with the whole table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch

from apex._bench.environment import describe
from apex._cli.tune.replay import replay_of
from apex._cli.tune.search import Search, samples
from apex.ops import _library, _tuned, all_families
from apex.ops._device import facts

# Rows, tokens, ... as parts of those that a class is named after: all of its members are above a half.
PARTS = (1.0, 0.75, 0.52)


def measure(entry: dict[str, Any], part: float, whole: Any, rounds: int, device: torch.device) -> dict[str, Any] | None:
    """Both times of an entry for a member of its class; None where the table changes nothing there."""
    shape = {
        name: max(1, int(part * value)) if name in _tuned.ROUNDED else value for name, value in entry["shape"].items()
    }
    question = _tuned.Question(entry["op"], {**shape, "element_size": int(entry["dtype"].partition("-")[0]) // 8})
    if question.key != _tuned.key_of(entry) or (part < 1 and shape == entry["shape"]):
        return None
    replay = replay_of(question, device)
    if replay is None:
        return None
    with _tuned.noting() as noted, _tuned.trying({}):
        replay.results()
    _, answer = noted.get(question.key, (None, None))
    if any(getattr(answer, name, None) != value for name, value in entry["instead_of"].items()):
        return None
    del replay
    found = Search(question, answer, device)
    found.begin()
    assert found.call is not None, found.reason

    def microseconds(changes: Any) -> float:
        with _tuned.trying(changes):
            found.call()  # type: ignore[misc]
            return median(samples(found.call, device))  # type: ignore[arg-type]

    row = {"op": entry["op"], "dtype": entry["dtype"], "shape": shape, "config": entry["config"]}
    try:
        microseconds(whole)
    except Exception as error:  # needs more shared memory than the member that was tuned
        return {**row, "rule_us": round(microseconds({}), 2), "tuned_us": None, "error": type(error).__name__}
    turns = [(microseconds({}), microseconds(whole)) for _ in range(rounds)]
    before, after = (round(median(each), 2) for each in zip(*turns, strict=True))
    spread = [round(f(each), 2) for each in zip(*turns, strict=True) for f in (min, max)]
    return {**row, "rule_us": before, "tuned_us": after, "spread": spread}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, help="by default the tables that are in use here")
    parser.add_argument("--ops", default="", help="only entries of ops that contain this")
    parser.add_argument("--first", type=int, default=0, help="the number of the entry to begin with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    all_families()
    device = torch.device("cuda", torch.cuda.current_device())
    tables = _tuned.read_tables(options.table) if options.table else _tuned.tables()
    entries = [entry for table in tables if table.gpu == facts(device).name for entry in table.entries]
    whole = {_tuned.key_of(entry): entry["config"] for entry in entries}
    rows = []
    with _library.implementation("triton"):
        for entry in [each for each in entries[options.first :] if options.ops in each["op"]]:
            for part in PARTS:
                row = measure(entry, part, whole, options.rounds, device)
                if row is not None:
                    rows.append(row)
                    gain = f"{row['rule_us'] / row['tuned_us'] - 1:7.1%}" if row["tuned_us"] else "  fails"
                    print(gain, json.dumps(row), flush=True)
    lines = ",\n".join(map(json.dumps, rows))
    options.output.write_text(f'{json.dumps(describe(device))[:-1]}, "rows": [\n{lines}\n]}}\n')
    slower = [row for row in rows if not row["tuned_us"] or row["tuned_us"] > 1.02 * row["rule_us"]]
    print(f"{len(rows)} rows of {len(entries)} entries, {len(slower)} fail or are more than 2% slower")


if __name__ == "__main__":
    main()
