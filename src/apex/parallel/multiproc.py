"""`python -m apex.parallel.multiproc script.py ...`: one process for each GPU of this machine, started by torchrun.

The script gets `--world-size N --rank R` after its own arguments; existing values of these options are replaced.
`--world-size` on the command line sets the number of processes. Output of ranks other than 0 goes to GPU_R.log. `apex
run` changes neither arguments nor output.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from .. import _env
from ._torchrun import local_devices, torchrun

_WORLD_SIZE, _RANK = "--world-size", "--rank"


def main(arguments: Sequence[str]) -> int:
    """Start the processes and return the exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m apex.parallel.multiproc script.py [--world-size N] [the script's arguments]")
        return 0 if arguments else 2
    requested = _value_of(_WORLD_SIZE, arguments)
    if requested is None:
        processes = local_devices()
    elif requested.isdigit() and int(requested) > 0:
        processes = int(requested)
    else:
        print(f"--world-size {requested} is not a number of processes", file=sys.stderr)
        return 2
    return torchrun(["--standalone", f"--nproc-per-node={processes}", "-m", __spec__.name, *arguments])


def run_script(arguments: Sequence[str], rank: int, world_size: int) -> None:
    """Run the script in one of the processes, with its rank and the world size as arguments."""
    script, *rest = arguments
    rest = _separated(rest)
    for name, number in ((_WORLD_SIZE, world_size), (_RANK, rank)):
        if name in rest[:-1]:
            rest[rest.index(name) + 1] = str(number)
        else:
            rest += [name, str(number)]
    if rank > 0:
        log = os.open(f"GPU_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, sys.stdout.fileno())
    sys.argv = [script, *rest]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


def _value_of(name: str, arguments: Sequence[str]) -> str | None:
    arguments = _separated(arguments)
    return arguments[arguments.index(name) + 1] if name in arguments[:-1] else None


def _separated(arguments: Sequence[str]) -> list[str]:
    """Return arguments with the two options in the form of two words, also if they were given as OPTION=VALUE."""
    words = [word.split("=", 1) if word.startswith((f"{_WORLD_SIZE}=", f"{_RANK}=")) else [word] for word in arguments]
    return [part for parts in words for part in parts]


if __name__ == "__main__":
    numbers = _env.torchrun_numbers()
    if numbers is None:
        sys.exit(main(sys.argv[1:]))
    run_script(sys.argv[1:], *numbers)
