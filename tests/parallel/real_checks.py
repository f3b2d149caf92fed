"""Checks of real processes, for tests of `processes.run_checks`."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

# As CUDA does when a process asks for its devices, note that this process is a fork of one that has done so.
FORKS: list[int] = []
os.register_at_fork(after_in_child=lambda: FORKS.append(os.getpid()))


def no_fork_of_a_process_with_a_driver(rank: int) -> None:
    assert not FORKS
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2


def one_rank_ends(rank: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


CHECKS = {check.__name__: check for check in (no_fork_of_a_process_with_a_driver, one_rank_ends)}
