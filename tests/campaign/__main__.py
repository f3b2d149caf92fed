"""Everything that may go wrong in long runs, many times, at random: `make campaign`, for some minutes.

Each part does so many trials with random numbers of one seed, in a process of its own, and counts those after which
something that docs/reliability.md promises was not so. Results are written with the versions of what was tested.

    python -m tests.campaign --output benchmarks/results/reliability-campaign.txt
    python -m tests.campaign --scale 0.1 --seed 5 --only damage code
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import apex
from tests.campaign.boosted import damage_boosted, foreign, full_disk_boosted, readers, refused
from tests.campaign.differences import differ
from tests.campaign.inputs import arguments, elsewhere
from tests.campaign.runs import calls, overflow, ranks
from tests.campaign.saves import code, damage, full_disk, kill, metadata, threads
from tests.campaign.trials import Trials, in_child
from tests.checkpoint import test_untrusted

# Of a part: seconds after which it has failed; longer in campaigns of a larger scale.
LIMIT = 1800
# By name: the trials of a campaign of scale 1, and what is done.
PARTS: dict[str, tuple[Any, ...]] = {
    "kill, a file": (250, kill, False, None),
    "kill, the same file again": (250, kill, False, 7),
    "kill, sharded": (100, kill, True, None),
    "kill, the same sharded again": (100, kill, True, 7),
    "kill, asynchronous": (100, kill, True, None, True),
    "kill, the same asynchronous": (100, kill, True, 7, True),
    "threads, files": (20, threads, False),
    "threads, sharded": (8, threads, True),
    "full disk": (100, full_disk),
    "damage, a file": (600, damage, False),
    "damage, sharded": (300, damage, True),
    "damage, Booster": (400, damage_boosted),
    "readers and writers, Booster": (30, readers),
    "full disk, Booster": (60, full_disk_boosted),
    "foreign files": (200, foreign),
    "refused loads, Booster": (100, refused),
    "code in files": (200, code),
    "changed metadata": (300, metadata),
    "links and names elsewhere": (400, elsewhere),
    "a rank dies": (4, ranks, signal.SIGKILL),
    "a rank stops": (2, ranks, signal.SIGSTOP),
    "a rank differs": (60, differ),
    "overflow": (60, overflow),
    "calls": (1, calls),
    "wrong arguments": (5000, arguments),
}


def warm_up() -> None:
    """Imports once what all processes that are forked would import each by themselves."""
    for place in test_untrusted.PLACES:
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(Exception):
            place(Path(folder), 0)


def run(name: str, scale: float, seed: int) -> dict[str, Any]:
    """A part in a process of its own, so that nothing that it does to this one matters to the next."""
    count, part, *options = PARTS[name]
    print(f"{name}: {part.__doc__.splitlines()[0]}", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(name, max(1, round(count * scale)), seed, Path(folder))

        def work() -> str:
            signal.alarm(round(LIMIT * max(1, scale)))
            torch.set_num_threads(1)
            warnings.simplefilter("ignore")
            with trials.expecting("the part itself"):
                part(trials, *options)
            failed = trials.failures
            return json.dumps([trials.done, len(failed), [each[-3000:] for each in failed[:5]], trials.outcomes])

        said = in_child(work)
    try:
        done, failed, failures, outcomes = json.loads(said)
    except ValueError:
        done, failed, failures, outcomes = 0, 1, [said], {}
    seconds = time.monotonic() - start
    return {"name": name, "trials": done, "failed": failed, "failures": failures, "of": outcomes, "seconds": seconds}


def report(results: list[dict[str, Any]], seed: int) -> str:
    text = io.StringIO()
    versions = f"apex {apex.__version__}, PyTorch {torch.__version__}, Python {platform.python_version()}"
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    print(f"Reliability campaign: {versions}, {machine}, seed {seed}\n", file=text)
    print(f"{'part':30} {'trials':>7} {'failed':>7} {'seconds':>8}  of these", file=text)
    for each in results:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(each["of"].items()) if count)
        print(f"{each['name']:30} {each['trials']:7} {each['failed']:7} {each['seconds']:8.0f}  {counts}", file=text)
    total = [sum(each[key] for each in results) for key in ("trials", "failed", "seconds")]
    print(f"{'all':30} {total[0]:7} {total[1]:7} {total[2]:8.0f}", file=text)
    return text.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="how many trials, of those of a usual campaign")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[""], help="parts whose names begin so")
    parser.add_argument("--output", type=Path, help="a file for the table")
    arguments = parser.parse_args()

    warm_up()
    results = []
    for name in PARTS:
        if name.startswith(tuple(arguments.only)):
            results.append(run(name, arguments.scale, arguments.seed))
            for failure in results[-1]["failures"]:
                print(failure, flush=True)
    text = report(results, arguments.seed)
    print(f"\n{text}", end="")
    if arguments.output is not None:
        arguments.output.write_text(text)
    return int(any(each["failed"] for each in results))


if __name__ == "__main__":
    sys.exit(main())
