"""Checks that fail on purpose in one of two processes, for tests of `processes.run_checks`."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def passes_before(rank: int) -> None:
    dist.barrier()


def one_rank_finds_a_wrong_number(rank: int) -> None:
    """Rank 1 fails a comparison while rank 0 waits for it in a collective."""
    assert rank == 0, "3 is not 4"
    dist.all_reduce(torch.ones(1))


def both_ranks_find_wrong_numbers(rank: int) -> None:
    raise ValueError(f"wrong on {rank}")


def one_rank_ends(rank: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def passes_after(rank: int) -> None:
    dist.barrier()


CHECKS = {
    check.__name__: check
    for check in (
        passes_before,
        one_rank_finds_a_wrong_number,
        both_ranks_find_wrong_numbers,
        one_rank_ends,
        passes_after,
    )
}
