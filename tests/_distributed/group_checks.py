"""Process groups and meshes, in six processes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from apex._distributed import neighbours
from apex._distributed.groups import make_group, make_local_group, make_mesh, own_group, timeout_of
from apex.parallel import DistributedDataParallel, create_syncbn_process_group
from apex.transformer import parallel_state
from tests.parallel.processes import PATIENCE, Check


def sum_of_ranks(group: Any) -> int:
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total, group=group)
    return int(total)


def all_groups_have_the_timeout_of_the_default_group(rank: int) -> None:
    parallel_state.initialize_model_parallel(2, 3, use_fp8_=True)
    streams = DistributedDataParallel(torch.nn.Linear(2, 2), num_allreduce_streams=2)
    made = {
        "make_group": make_group(),
        "make_local_group": make_local_group([rank // 2 * 2, rank // 2 * 2 + 1]),
        "own_group": own_group(),
        "a group for halos": neighbours.group_of(range(6)),
        "create_syncbn_process_group": create_syncbn_process_group(3),
        **{f"DistributedDataParallel {index}": group for index, group in enumerate(streams._groups or ())},
        **{f"parallel_state {kind}": group for kind, group in parallel_state._state.groups.by_kind.items()},
        **{f"mesh {name}": make_mesh("cpu", (2, 3), ("a", "b")).get_group(name) for name in "ab"},
    }
    found = {name: timeout_of(group) for name, group in made.items()}
    parallel_state.destroy_model_parallel()
    assert len(found) > 12
    assert {name: timeout for name, timeout in found.items() if timeout != timedelta(seconds=PATIENCE)} == {}


def an_uneven_mesh_has_rows_and_columns(rank: int) -> None:
    mesh = make_mesh("cpu", (2, 3), ("rows", "columns"))
    assert dist.get_process_group_ranks(mesh.get_group("columns")) == [rank // 3 * 3 + each for each in range(3)]
    assert dist.get_process_group_ranks(mesh.get_group("rows")) == [rank % 3, rank % 3 + 3]
    assert list(mesh.get_coordinate()) == [rank // 3, rank % 3]
    assert mesh["columns"].get_local_rank() == rank % 3
    assert make_mesh("cpu", (6,), ("all",)).get_group().size() == 6


def groups_of_few_ranks_need_nobody_else(rank: int) -> None:
    """This holds if ranks are in different numbers of groups, and after a group of the same ranks was destroyed."""
    for first in range(3):
        dist.new_group([first])
    if rank in (0, 4):
        for _ in range(2):
            group = make_local_group([0, 4])
            assert sum_of_ranks(group) == 4
            dist.destroy_process_group(group)


def own_groups_are_made_once(rank: int) -> None:
    halves = [make_group(ranks) for ranks in ((0, 1, 2), (3, 4, 5))]
    half = halves[rank // 3]
    if rank < 3:  # the others wrap no model
        assert own_group(half) is own_group(half)
        assert own_group(half) is not half
        assert sum_of_ranks(own_group(half)) == 3
    assert own_group() is own_group()
    assert own_group() is not dist.group.WORLD
    assert sum_of_ranks(own_group()) == 15
    alone = [make_group([each]) for each in range(6)][rank]
    assert own_group(alone) is alone


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        all_groups_have_the_timeout_of_the_default_group,
        an_uneven_mesh_has_rows_and_columns,
        groups_of_few_ranks_need_nobody_else,
        own_groups_are_made_once,
    )
}
