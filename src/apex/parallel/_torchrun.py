"""torchrun started from Python, for `apex run` and `python -m apex.parallel.multiproc`."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import _env


def local_devices() -> int:
    """Return the number of accelerators of this machine, or 1 for the CPU."""
    return max(1, torch.accelerator.device_count()) if torch.accelerator.is_available() else 1


def torchrun(arguments: Sequence[str]) -> int:
    """Run processes with torchrun's command line; return 0 or the exit status of the first failure."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # By default PyTorch gives restarted processes the store of the earlier processes, with their addresses: Gloo then
    # reaches no process, and waits for half an hour.
    restarts = any(re.match(r"--max[-_]restarts=[1-9]", argument) for argument in arguments)
    new_store = _env.changed("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1") if restarts else contextlib.nullcontext()
    try:
        with new_store:
            run.main(list(arguments))
    except ChildFailedError as error:
        rank, failure = first_failure(error.failures)
        print(report(rank, error.failures), file=sys.stderr)
        # A process killed by a signal has a negative status, which a shell cannot represent.
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


def first_failure(failures: Mapping[int, Any]) -> tuple[int, Any]:
    """Return the rank that failed first, and its failure.

    A process that was killed by a signal comes before processes that raised errors, which are most often about its
    loss: it leaves no record, and torchrun only knows when it was found to be gone. SIGTERM does not count, because
    torchrun sends it to the other processes.
    """

    def order(rank: int) -> tuple[bool, int]:
        failure, recorded = failures[rank], _details(failures[rank])
        was_killed = failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM and not recorded
        return not was_killed, recorded.get("nanoseconds") or failure.timestamp * 10**9

    rank = min(failures, key=order)
    return rank, failures[rank]


def report(first: int, failures: Mapping[int, Any]) -> str:
    """Return a text about failed processes: the error of the rank that failed first, then a line about the others."""
    failure = failures[first]
    details = _details(failure)
    lines = [f"rank {first} failed first: {_ending(failure)}"]
    if "py_callstack" in details:
        lines.append(details["py_callstack"].rstrip())
    elif failure.exitcode > 0:
        lines.append("It recorded no error: it ended by sys.exit or os._exit, or not in Python.")
    others = [f"{rank} ({_ending(other)})" for rank, other in failures.items() if rank != first]
    if others:
        lines.append(f"Ranks that failed after it: {', '.join(others)}")
    return "\n".join(lines)


def _details(failure: Any) -> dict[str, Any]:
    """Return the record of a failure: its traceback and its time. Empty if the process recorded nothing."""
    return failure.message.get("extraInfo", {}) if isinstance(failure.message, dict) else {}


def _ending(failure: Any) -> str:
    """Return how a process ended: an error, a signal or an exit status."""
    if isinstance(failure.message, dict):
        return str(failure.message.get("message", "an error")).splitlines()[0]
    if failure.exitcode < 0:
        return f"Signal {-failure.exitcode} ({failure.signal_name()})"
    return f"exit status {failure.exitcode}"
