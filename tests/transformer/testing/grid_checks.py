"""A GPT divided over processes beside one process that runs the same microbatches: one check for each layout.

Some are run by default; `python -m tests.transformer.testing.grid_checks 2 4 8` runs all of 2, 4 and 8 processes.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from tests.parallel.processes import run_checks

from .gpt import WHOLE, Layout, groups, reference, train_in, worst_difference

# Relative to a tensor's largest number, if tensor-parallel ranks or replicas add up in another order.
TOLERANCE = 1e-12
SOME = {
    4: [Layout(1, 4, "zb_v", 2), Layout(2, 2, "zb_h1", 1, True)],
    8: [Layout(2, 2, "interleaved", 2, True), Layout(2, 2, "1f1b", 1, True, 2)],
}


def every_layout(processes: int) -> list[Layout]:
    """Return all layouts of the given number of processes with at most four chunks per rank and 16 stages."""
    sizes = [2**power for power in range(processes.bit_length())]
    divisions = [(tensor, stages) for tensor in sizes for stages in sizes if tensor * stages <= processes]
    kinds = [("1f1b", 1), ("zb_h1", 1), ("zb_v", 2), ("interleaved", 2), ("interleaved", 4)]
    return [
        Layout(tensor, stages, *kind, sequence, context)
        for tensor, stages in divisions
        for kind in (kinds if stages > 1 else [("no_pipelining", 1)])
        for sequence in ((False, True) if tensor > 1 else (False,))
        for context in (1, 2, 4)
        if stages * kind[1] <= 16 and tensor * stages * context <= processes
    ]


def check(layout: Layout, rank: int) -> None:
    """Compare losses, every gradient of each step and the final parameters; bitwise if only pipelines are split."""
    same_order = layout.pipeline == dist.get_world_size()
    dtype = torch.float32 if same_order else torch.float64
    alone = reference(layout.layers, params_dtype=dtype)
    with groups(layout):
        worst, name = worst_difference(train_in(layout, params_dtype=dtype), alone)
    limit = 0.0 if same_order else TOLERANCE
    assert worst <= limit, f"{dtype}, {name}: off by {worst:.2g} of its largest number"


def checks(layouts: list[Layout]) -> dict[str, functools.partial]:
    return {str(layout): functools.partial(check, layout) for layout in layouts}


CHECKS = checks(every_layout(int(os.environ[WHOLE])) if WHOLE in os.environ else SOME[8])

if __name__ == "__main__":
    failures = 0
    for processes in sys.argv[1:]:
        # The module is imported anew, with other checks.
        sys.modules.pop(module := "tests.transformer.testing.grid_checks", None)
        os.environ[WHOLE] = processes
        with tempfile.TemporaryDirectory() as folder:
            found = run_checks(module, Path(folder), int(processes), timeout=7200)
        passed = [name for name, said in found.items() if not said]
        print(f"{processes} processes: {len(passed)} of {len(found)} layouts equal one process", flush=True)
        failures += len(found) - len(passed)
        for name, said in found.items():
            if said:
                print(f"{name}\n{said}", flush=True)
    sys.exit(failures > 0)
