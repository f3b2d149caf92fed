"""The machines of `apex run --host ...`: their selection, and the start of the command on each."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
# Seconds between two polls of the running processes.
_PERIOD = 0.2


def chosen_hosts(
    host: str | None, hostfile: Path | None, include: str | None, exclude: str | None, num_nodes: int
) -> list[str]:
    """Return the machines that the options name; an empty list means this machine only.

    A ValueError says which options do not fit.
    """
    if host is not None and hostfile is not None:
        raise ValueError("--host and --hostfile both name machines: give one of them")
    if include is not None and exclude is not None:
        raise ValueError("--include and --exclude cannot be used together")
    if host is None and hostfile is None:
        if include is not None or exclude is not None:
            raise ValueError("--include and --exclude choose among the machines of --hostfile, which is missing")
        if num_nodes != -1:
            raise ValueError("--num-nodes chooses among the machines of --host or --hostfile, which are missing")
        return []
    if hostfile is not None:
        if not hostfile.is_file():
            raise FileNotFoundError(f"--hostfile={str(hostfile)!r} is not a file")
        try:
            text = hostfile.read_text()
        except UnicodeDecodeError as error:
            raise ValueError(f"--hostfile={str(hostfile)!r} is no text: {error}") from error
        lines = (line.split("#")[0].split() for line in text.splitlines())
        hosts = [fields[0] for fields in lines if fields]  # other launchers write options after the name
    else:
        hosts = _listed(host)
    # ssh would read a name with a leading dash as one of its options, and execute it.
    if wrong := [name for name in hosts if name.startswith("-")]:
        raise ValueError(f"{wrong[0]!r} is no name of a machine: names do not begin with a dash")
    for option, requested in (("--include", _listed(include)), ("--exclude", _listed(exclude))):
        if unknown := [name for name in requested if name not in hosts]:
            raise ValueError(f"{option} names {', '.join(unknown)}, but the machines are {', '.join(hosts)}")
    hosts = [name for name in hosts if name in _listed(include) or include is None]
    hosts = [name for name in hosts if name not in _listed(exclude)]
    if num_nodes != -1 and not 1 <= num_nodes <= len(hosts):
        raise ValueError(f"--num-nodes={num_nodes} must be -1, or between 1 and the number of machines, {len(hosts)}")
    if not hosts:
        raise ValueError("no machine is left to run on")
    return hosts if num_nodes == -1 else hosts[:num_nodes]


def _listed(names: str | None) -> list[str]:
    return [name.strip() for name in (names or "").split(",") if name.strip()]


def extra_arguments(text: str | None) -> list[str]:
    """Return options of torchrun from "name=value,name=value"."""
    pairs = [pair.partition("=") for pair in _listed(text)]
    if wrong := ["".join(pair) for pair in pairs if not pair[0] or not pair[1]]:
        raise ValueError(f"--extra-launch-args has {', '.join(wrong)}, which is not name=value")
    return [f"--{name}={value}" for name, _, value in pairs]


def machine_counts(text: str) -> tuple[int, int]:
    """Return the smallest and the largest number of machines of "4" or "1:4"."""
    counts = [int(part) if part.isdecimal() else 0 for part in text.split(":")]
    if len(counts) > 2 or not 1 <= counts[0] <= counts[-1]:
        raise ValueError(f"{text!r} is no number of machines: give one, or the fewest and the most, such as 1:4")
    return counts[0], counts[-1]


def is_this_machine(host: str) -> bool:
    """Return True if the name is this machine's."""
    return host in (*_THIS_MACHINE, socket.gethostname())


def run_on(hosts: Sequence[str], options: Sequence[str], command: Sequence[str], ssh_port: int | None) -> int:
    """Run `apex run` on every machine, through ssh on others; return 0 or the exit status of the first failure.

    All machines must have this process's working directory and Python at the same paths. If one fails, the others are
    ended.
    """
    running = []
    for rank, host in enumerate(hosts):
        numbers = [f"--nnodes={len(hosts)}", f"--node-rank={rank}"]
        arguments = [sys.executable, "-m", "apex", "run", *options, *numbers, *command]
        if not is_this_machine(host):
            remote_command = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(arguments)}"
            # With a terminal, ssh ends the remote command when ssh itself is ended.
            arguments = ["ssh", "-tt", *([] if ssh_port is None else ["-p", str(ssh_port)]), host, remote_command]
        running.append(subprocess.Popen(arguments, stdin=subprocess.DEVNULL))
    try:
        while True:
            states = [process.poll() for process in running]
            failed = [state for state in states if state]
            if failed:
                return failed[0] if failed[0] > 0 else 1
            if None not in states:
                return 0
            time.sleep(_PERIOD)
    finally:
        for process in running:
            if process.poll() is None:
                process.terminate()
        for process in running:
            process.wait()
