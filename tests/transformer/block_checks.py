"""A GPT block split over processes, compared with one process: outputs, every gradient, optimizer steps."""

from __future__ import annotations

import torch
import torch.distributed as dist

from apex.transformer import parallel_state
from tests.support.grids import pairs
from tests.transformer import block


def block_equals_one_process(rank: int) -> None:
    """Split over all processes, with and without sequence parallelism; two runs must be bitwise equal.

    By default two processes use float64 and four float32, in which sums in another order show.
    """
    ranks = dist.get_world_size()
    for _, dtype in pairs((ranks,), (torch.float32, torch.float64), each=1, first=ranks // 2):
        alone = block.train_alone(dtype)
        parallel_state.initialize_model_parallel(dist.get_world_size())
        for sequence in (False, True):
            found = block.train(sequence, dtype)
            block.assert_equals_alone(found, alone)
        block.assert_bit_equal(found, block.train(sequence, dtype))
        parallel_state.destroy_model_parallel()


def replicated_block_equals_one_process(rank: int) -> None:
    """Split over half of the processes: two replicas with half of the batch each."""
    alone = block.train_alone(torch.float64)
    parallel_state.initialize_model_parallel(dist.get_world_size() // 2)
    sequence = dist.get_world_size() > 2
    block.assert_equals_alone(block.train(sequence, torch.float64), alone)
    parallel_state.destroy_model_parallel()
