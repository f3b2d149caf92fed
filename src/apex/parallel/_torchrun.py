"""torchrun, started from Python: the processes of `apex run` and `python -m apex.parallel.multiproc`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch


def local_devices() -> int:
    """How many accelerators this machine has; 1 if it has none, for the CPU."""
    return max(1, torch.accelerator.device_count()) if torch.accelerator.is_available() else 1


def torchrun(arguments: Sequence[str]) -> int:
    """Runs processes with torchrun's command line; returns 0, or the exit status of the first one that failed."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main(list(arguments))
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        _, failure = error.get_first_failure()
        # A process that was killed by a signal has a negative status, which no shell can be told.
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0
