"""torchrun started from Python, for `apex run` and `python -m apex.parallel.multiproc`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch


def local_devices() -> int:
    """Return the number of accelerators of this machine, or 1 for the CPU."""
    return max(1, torch.accelerator.device_count()) if torch.accelerator.is_available() else 1


def torchrun(arguments: Sequence[str]) -> int:
    """Run processes with torchrun's command line; return 0 or the exit status of the first failure."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main(list(arguments))
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        _, failure = error.get_first_failure()
        # A process killed by a signal has a negative status, which a shell cannot represent.
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0
