"""What the scripts of all clients share: each runs its functions `check_*` and prints a line of JSON for each."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
import traceback
from collections.abc import Sequence

import torch


def falls(losses: Sequence[float], steps: str = "steps") -> str:
    """Says how far losses fell; they must by a third, from the mean of the first three to that of the last three."""
    first, last = sum(losses[:3]) / 3, sum(losses[-3:]) / 3
    assert last < 0.67 * first, f"the loss went from {first:.3f} to {last:.3f}: {losses}"
    return f"loss {first:.3f} to {last:.3f} in {len(losses)} {steps}"


def run(module: str, *packages: str) -> None:
    """Runs the checks of `module`; the exit status is 1 if one fails. `packages` are those to tell the versions of."""
    versions = {name: importlib.metadata.version(name) for name in ("apex", *packages)}
    versions |= {"torch": torch.__version__, "Python": platform.python_version()}
    print(json.dumps({"versions": versions}))
    torch.set_num_threads(1)
    failed = False
    for name, check in list(vars(sys.modules[module]).items()):
        if not name.startswith("check_"):
            continue
        torch.manual_seed(0)
        try:
            outcome = check()
        except Exception as error:
            traceback.print_exc()
            outcome, failed = f"FAILED: {type(error).__name__}: {error}", True
        print(json.dumps({"what": " ".join(check.__doc__.split()), "outcome": outcome}), flush=True)
    sys.exit(failed)
