"""The engine below the optimizers, in several processes: sums of gradients, shards, and parameters from shards."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from apex._distributed import collectives as module_of_collectives
from apex._distributed.collectives import all_gather, all_reduce, reduce_scatter
from apex.contrib.optimizers._zero.arena import Arena, Dtypes
from apex.contrib.optimizers._zero.gradients import GradientSync
from apex.contrib.optimizers._zero.groups import Groups
from apex.contrib.optimizers._zero.parameters import ParameterSync
from tests.parallel.processes import Check

SHAPES = ((33, 7), (), (5,), (64, 3), (0, 4), (129,))


def made(rank: int, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """What a rank contributes for each parameter: small integers, whose sums are exact."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return [torch.randint(-8, 9, shape, generator=generator).to(dtype) for shape in SHAPES]


def arenas(groups: Groups, dtype: torch.dtype = torch.float32, bucket_bytes: float | None = 600) -> list[Arena]:
    params = [torch.nn.Parameter(value) for value in made(0, 99, dtype)]
    dtypes = Dtypes(torch.float32, torch.float32, dtype)
    return [
        Arena(part, [0] * len(part), dtypes, groups, bucket_bytes)
        for part in (params[:4], params[4:])
        if any(map(Tensor.numel, part))
    ]


def owned(values: list[list[Tensor]], lists: list[Arena]) -> list[Tensor]:
    """Of each arena, the elements of this rank's parts."""
    return [
        torch.cat([value[part.param].reshape(-1)[part.start : part.stop] for part in arena.parts] or [torch.empty(0)])
        for value, arena in zip(values, lists, strict=True)
    ]


def collectives(rank: int) -> None:
    size = dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        inputs = (torch.arange(4 * size) + rank).to(dtype)
        total = torch.stack([torch.arange(4 * size) + other for other in range(size)]).double()
        for average in (False, True):
            output = torch.empty(4, dtype=dtype)
            reduce_scatter(output, inputs, None, average, "a test").wait()
            expected = total.mean(0) if average else total.sum(0)
            torch.testing.assert_close(output, expected[4 * rank :][:4].to(dtype), rtol=0, atol=0)
            both = inputs.clone()
            all_reduce(both, None, "a test", average).wait()
            torch.testing.assert_close(both, expected.to(dtype), rtol=0, atol=0)
        gathered = torch.empty(4 * size, dtype=dtype)
        gathered[4 * rank :][:4] = rank
        all_gather(gathered, gathered[4 * rank :][:4], None, "a test").wait()
        assert gathered.tolist() == [float(index // 4) for index in range(4 * size)]


def rounds(contiguous: bool, in_flight: int) -> Check:
    """Gradients in any order, missing ones, ones that come twice; in one process some never come."""

    def check(rank: int) -> None:
        groups = Groups()
        sync = GradientSync(groups, average=False, in_flight=in_flight, contiguous=contiguous)
        lists = arenas(groups)
        for arena in lists:
            sync.add(arena)
        places = [(place, index) for place, arena in enumerate(lists) for index in range(len(arena.params))]
        total = [[torch.zeros(param.shape) for param in arena.params] for arena in lists]

        def contribute(seed: int, chosen: list[int], arrives: bool) -> None:
            """All processes know what all contribute."""
            for other in range(groups.size):
                values = made(other, seed)
                for number in chosen:
                    if other == 1 and number in (0, 5):  # has none of these
                        continue
                    place, index = places[number]
                    total[place][index] += values[number]
                    if other == rank:
                        lists[place].params[index].grad = values[number].clone()
                        if arrives:
                            sync.arrived(place, index)
            if arrives and sync.has_begun:  # what the end of a backward pass does
                sync.end_round()

        for epoch in range(2):
            contribute(10 * epoch, [0, 1, 2, 3, 4, 5], arrives=True)
            contribute(10 * epoch + 1, [3, 1], arrives=True)
            contribute(10 * epoch + 2, [2, 5, 3], arrives=False)
            sync.synchronize()
            sync.synchronize()
            for arena, expected in zip(lists, owned(total, lists), strict=True):
                torch.testing.assert_close(torch.cat(sync.local(arena)), expected, rtol=0, atol=0)
            sync.clear()
            for values in total:
                torch._foreach_zero_(values)
        sync.synchronize()
        assert not any(gradient.any() for arena in lists for gradient in sync.local(arena))

    return check


def gradients_are_only_read(rank: int) -> None:
    """Gradients that arrive before their bucket is sent add up beside those of the user, in every round."""
    groups = Groups()
    sync, lists = GradientSync(groups, average=False), arenas(groups)
    for arena in lists:
        sync.add(arena)
    param = lists[0].params[0]
    for done in (1, 2, 3):
        given = [torch.full_like(param, number) for number in (1.0, 2.0, 4.0)]
        for gradient in given:
            param.grad = gradient
            sync.take(0, 0)
        sync.synchronize()
        assert [float(gradient.detach()[0, 0]) for gradient in given] == [1.0, 2.0, 4.0]
        found = [values for part, values in zip(lists[0].parts, sync.local(lists[0]), strict=True) if part.param == 0]
        assert all((values == 7.0 * done * groups.size).all() for values in found)


def parameters(contiguous: bool, dtype: torch.dtype) -> Check:
    """Every rank changes what it owns; all have all of it afterwards."""

    def check(rank: int) -> None:
        groups = Groups()
        sync = ParameterSync(groups, contiguous=contiguous)
        lists = arenas(groups, dtype)
        for arena in lists:
            sync.add(arena)
            arena.outgoing = arena.shards(arena.parameter_buffer or arena.new_shard(dtype))
            for piece in arena.owned:
                value = arena.params[piece.param].detach().reshape(-1)[piece.start : piece.stop]
                arena.outgoing[piece.bucket][piece.offset : piece.offset + piece.size] = value + 1
        sync.updated()
        sync.start()
        assert groups.size == 1 or not sync.is_complete
        sync.wait_for([(0, 0)])
        sync.synchronize()
        assert sync.is_complete
        found = [param for arena in lists for param in arena.params]
        for value, expected in zip(found, made(0, 99, dtype), strict=True):
            torch.testing.assert_close(value.detach(), expected + 1, rtol=0, atol=0)

    return check


def grid(rank: int) -> None:
    """State divided among two processes and repeated in two."""
    if dist.get_world_size() < 4:
        return
    across = [dist.new_group(ranks) for ranks in ((0, 1), (2, 3))][rank // 2]
    along = [dist.new_group(ranks) for ranks in ((0, 2), (1, 3))][rank % 2]
    groups = Groups(None, across, along)
    assert (groups.size, groups.ranks, groups.replicas, groups.rank, groups.root) == (4, 2, 2, rank % 2, 0)
    sync = GradientSync(groups)
    lists = arenas(groups)
    expected: list[list[Tensor]] = []
    for place, arena in enumerate(lists):
        sync.add(arena)
        values: list[list[Any]] = [made(other, 3)[4 * place : 4 * place + len(arena.params)] for other in range(4)]
        expected.append([sum(each) / 4 for each in zip(*values, strict=True)])
        for index, param in enumerate(arena.params):
            param.grad = values[rank][index]
    sync.synchronize()
    for arena, mean in zip(lists, owned(expected, lists), strict=True):
        torch.testing.assert_close(torch.cat(sync.local(arena)), mean, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="process_group has 4 processes"):
        Groups(None, across, None)


def native(rank: int) -> None:
    """The collectives that devices use; Gloo has them in later versions."""
    if not hasattr(dist, "reduce_scatter_single"):
        return
    with (
        mock.patch.object(module_of_collectives, "on_host", return_value=False),
        mock.patch.object(module_of_collectives, "_through_host", return_value=False),
    ):
        rounds(contiguous=False, in_flight=2)(rank)
        parameters(contiguous=True, dtype=torch.bfloat16)(rank)
        parameters(contiguous=False, dtype=torch.float32)(rank)


CHECKS: dict[str, Check] = {
    "collectives": collectives,
    "engine_rounds": rounds(contiguous=False, in_flight=1),
    "engine_rounds_contiguous": rounds(contiguous=True, in_flight=3),
    "engine_only_reads_gradients": gradients_are_only_read,
    "engine_parameters": parameters(contiguous=False, dtype=torch.float32),
    "engine_parameters_contiguous": parameters(contiguous=True, dtype=torch.bfloat16),
    "engine_grid": grid,
    "engine_native": native,
}
