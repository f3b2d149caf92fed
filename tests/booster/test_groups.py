"""Which processes a plugin puts together, and which data each gets, in 6 processes that one process stands for.

Six are divided unevenly, as 3 times 2: a mesh of 2 times 2 looks the same when its sides are swapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler

from apex.booster.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from apex.contrib.optimizers._zero.groups import machine_groups
from apex.transformer import parallel_state
from tests.parallel.processes import needs_fsdp_on_a_cpu

WORLD = 6


@contextmanager
def place(rank: int, world: int = WORLD) -> Iterator[None]:
    """Make this process one of several fake ones, whose collectives change nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def ranks_of(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group)


def zero_groups(**options: Any) -> list[list[int]]:
    """Return the ranks that divide the optimizer's state with this one, and those that repeat it."""
    groups = LowLevelZeroPlugin(precision="fp32", **options)._groups()
    return [ranks_of(groups[f"{kind}_process_group"]) for kind in ("distributed", "redundant")]


def lamb_groups(size: int) -> list[list[int]]:
    groups = machine_groups(size, full=False, scatters=1, reduces=1, gathers=1, channels=0, verbose=False)
    assert ranks_of(groups.reduce[0]) == ranks_of(groups.redundant)
    assert ranks_of(groups.gather[0]) == ranks_of(groups.scatter[0])
    return [ranks_of(groups.distributed), ranks_of(groups.redundant)]


def sharding_mesh(plugin: Any) -> list[list[int]]:
    """Return the ranks that divide a weight with this one, and those that have the same part."""
    model = nn.Linear(6, 6)
    boosted, *_ = plugin.configure(model, torch.optim.SGD(model.parameters(), lr=0.1))
    mesh = next(boosted.parameters()).device_mesh
    return [ranks_of(mesh.get_group(dimension)) for dimension in (1, 0)]


def hybrid_groups(**options: Any) -> list[list[int]]:
    microbatches = {"num_microbatches": 2} if options["pp_size"] > 1 else {}
    plugin = HybridParallelPlugin(precision="fp32", **options, **microbatches)
    return [ranks_of(group) for group in (plugin.tp_group, plugin.pp_group, plugin.dp_group)]


# By name: the groups of rank 3 of 6.
GROUPS: dict[str, tuple[Callable[[], list[list[int]]], list[list[int]]]] = {
    "zero, 2 copies": (lambda: zero_groups(extra_dp_size=2), [[3, 4, 5], [0, 3]]),
    "zero, 3 copies": (lambda: zero_groups(extra_dp_size=3), [[2, 3], [1, 3, 5]]),
    "lamb, machines of 2": (lambda: lamb_groups(2), [[2, 3], [1, 3, 5]]),
    "lamb, machines of 3": (lambda: lamb_groups(3), [[3, 4, 5], [0, 3]]),
    "tensor 2": (lambda: hybrid_groups(tp_size=2, pp_size=1), [[2, 3], [3], [1, 3, 5]]),
    "tensor 3": (lambda: hybrid_groups(tp_size=3, pp_size=1), [[3, 4, 5], [3], [0, 3]]),
    "stages 3, replicas outside": (lambda: hybrid_groups(tp_size=1, pp_size=3), [[3], [3, 4, 5], [0, 3]]),
    "stages 3, replicas inside": (
        lambda: hybrid_groups(tp_size=1, pp_size=3, dp_outside=False),
        [[3], [1, 3, 5], [2, 3]],
    ),
    "tensor 2, stages 3": (lambda: hybrid_groups(tp_size=2, pp_size=3), [[2, 3], [1, 3, 5], [3]]),
    "tensor 3, stages 2": (lambda: hybrid_groups(tp_size=3, pp_size=2), [[3, 4, 5], [0, 3], [3]]),
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups_of_an_uneven_mesh(name: str) -> None:
    make, expected = GROUPS[name]
    with place(3):
        assert make() == expected


@needs_fsdp_on_a_cpu
@pytest.mark.parametrize("copies", [2, 3])
def test_shards_of_an_uneven_mesh(copies: int) -> None:
    with place(3):
        found = sharding_mesh(GeminiPlugin(precision="fp32", extra_dp_size=copies))
    assert found == ([[3, 4, 5], [0, 3]] if copies == 2 else [[2, 3], [1, 3, 5]])


@pytest.mark.parametrize("rank", range(WORLD))
def test_the_place_on_an_uneven_mesh(rank: int) -> None:
    with place(rank):
        mesh = HybridParallelPlugin(precision="fp32", tp_size=2, pp_size=3, num_microbatches=2).pg_mesh
        assert mesh.size() == (1, 3, 2, 1)
        assert mesh.coordinate() == (0, rank // 2, rank % 2, 0)
        assert [mesh.coordinate(dim) for dim in range(4)] == [0, rank // 2, rank % 2, 0]
        assert [mesh.get_ranks_in_group(mesh.get_group_along_axis(dim)) for dim in (1, 2)] == [
            [rank % 2, rank % 2 + 2, rank % 2 + 4],
            [rank // 2 * 2, rank // 2 * 2 + 1],
        ]


def test_data_are_shuffled_by_the_seed_and_divided_among_replicas() -> None:
    """The order is PyTorch's sampler's with this seed, so that a run can be repeated; workers are seeded too."""
    data = list(range(48))
    for seed in (1024, 3):
        with place(3):
            for plugin, replicas, replica in (
                (TorchDDPPlugin(), 6, 3),
                (HybridParallelPlugin(precision="fp32", tp_size=2, pp_size=1), 3, 1),
            ):
                options = {} if seed == 1024 else {"seed": seed}
                loader = plugin.prepare_dataloader(data, 4, shuffle=True, **options)
                expected = DistributedSampler(data, replicas, replica, shuffle=True, seed=seed)
                assert torch.cat(list(loader)).tolist() == list(expected)
                assert loader.generator.initial_seed() == seed
                random = []
                for worker in (0, 1):
                    loader.worker_init_fn(worker)
                    random.append(torch.initial_seed())
                assert random == [seed, seed + 1]
