"""DistributedFusedLAMB in four processes: what two cannot show."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.contrib.lamb_checks import clips_before, overflow, saved, trains
from tests.contrib.lamb_passes import accumulation
from tests.contrib.lamb_problem import STEPS, assert_solved, distributed_step, made, parameters
from tests.contrib.lamb_resharding import saves
from tests.parallel.processes import Check


def memory(rank: int) -> None:
    """What a process holds falls as 1/ranks, but for padding."""
    shapes = ((300, 41), (77,), (513, 3))
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    for size in (1, 2, 4):
        params = parameters(shapes=shapes)
        optimizer = made(params, dwu_group_size=size, dwu_num_blocks=1, dwu_num_chunks=2)
        distributed_step(optimizer, params, 0)
        state = optimizer.state_dict()
        held = [state[name].numel() for name in ("fp32_p", "fp32_m", "fp32_v")]
        assert len(set(held)) == 1
        assert elements / size <= held[0] <= elements / size + 128


def two_by_two(rank: int) -> None:
    """Machines of two processes; nobody but the processes of a machine is asked for norms."""
    params = parameters()
    optimizer = made(params, dwu_group_size=2, dwu_num_ar_pg=2, dwu_num_rs_pg=2, dwu_num_ag_pg=1)
    groups = optimizer._groups
    assert (groups.ranks, groups.replicas, groups.rank) == (2, 2, rank % 2)
    assert dist.get_process_group_ranks(groups.distributed) == [rank - rank % 2, rank - rank % 2 + 1]
    assert dist.get_process_group_ranks(groups.redundant) == [rank % 2, rank % 2 + 2]
    assert len(optimizer._groups.reduce) == len(optimizer._groups.scatter) == 2
    for step in range(STEPS):
        distributed_step(optimizer, params, step)
    assert_solved(params, STEPS)
    # A second one shares the groups of the first.
    other = made(parameters(), dwu_group_size=2, dwu_num_ar_pg=2, dwu_num_rs_pg=2, dwu_num_ag_pg=1)
    assert other._groups.reduce == optimizer._groups.reduce


CHECKS: dict[str, Check] = {
    "default": trains(),
    "nvlamb": trains(use_nvlamb=True, adam_w_mode=False),
    "two_by_two": two_by_two,
    "two_by_two_full_ar": trains(dwu_group_size=2, full_ar=True, dwu_num_ag_pg=1),
    "two_by_two_clips_before": clips_before(dwu_group_size=2, fused_norm=True, fuse_scale=True),
    "replicas": trains(dwu_group_size=1, overlap_reductions=False),
    "many_messages": trains(dwu_num_blocks=5, dwu_num_chunks=3),
    "accumulation": accumulation(dwu_group_size=2),
    "overflow": overflow,
    "memory": memory,
    "saved": saved(torch.float32, dwu_group_size=2),
    "saves": saves("four"),
    "saves_replicas": saves("two_by_two", dwu_group_size=2, dwu_num_blocks=1),
}
