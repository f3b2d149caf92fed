"""Locations of parts of tensors in the whole tensor, and checkpoints of a single process."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from apex.booster import Booster
from apex.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
from apex.checkpoint import save_sharded
from apex.optimizers import FusedAdam
from apex.transformer import checkpoint
from apex.transformer._resharding import model_parts, shards
from apex.transformer.pipeline_parallel.utils import unwrap_model
from tests.support.drawn import given, settings, st


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_a_range_of_memory_is_boxes(size: list[int], data: st.DataObject) -> None:
    whole = torch.arange(math.prod(size), dtype=torch.int64).view(size)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    found = []
    for first, sizes in shards.boxes_of_range(size, start, stop):
        box = whole[tuple(slice(at, at + length) for at, length in zip(first, sizes, strict=True))]
        assert box.shape == sizes
        found += box.reshape(-1).tolist()
    assert found == list(range(start, stop))


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.sampled_from([1, 2, 3, 4]),
    stride=st.integers(1, 3),
    dim=st.integers(0, 2),
    block=st.integers(1, 3),
    words=st.none() | st.integers(1, 3),
    experts=st.sampled_from([1, 2]),
)
def test_parts_fill_the_whole(ranks: int, stride: int, dim: int, block: int, words: int | None, experts: int) -> None:
    """Split a weight as the layers do: into blocks of rows, which ranks take in turn, and experts by dimension 0."""
    if dim == 0 or words is not None:
        experts = 1
    size = [2, 3, 4]
    size[dim] = ranks * stride * block
    whole = torch.arange(math.prod(size), dtype=torch.float32).view(size)
    found = {"": torch.full_like(whole, -1.0)}
    if words is not None and words <= size[dim]:
        parts = whole.split([words, size[dim] - words], dim)
        found = {suffix: torch.full_like(part, -1.0) for suffix, part in zip(("", shards.PADDING), parts, strict=True)}
    for expert, rank in itertools.product(range(experts), range(ranks)):
        part = torch.cat(whole.chunk(experts)[expert].split(block, dim)[rank::ranks], dim)
        part.tensor_model_parallel, part.partition_dim, part.partition_stride = True, dim, stride
        if len(found) == 2:
            part.vocab_size = words
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shards, "tensor_parallel", lambda _, rank=rank: (ranks, rank))
            patch.setattr(shards, "_expert_parallel", lambda _, expert=expert: (experts, expert))
            locations = shards.shard_locations(part)
        for suffix, location in locations.items():
            assert location.size == tuple(found[suffix].shape)
            for first, view in location.boxes(part, (0, 0, 0)):
                target = found[suffix][tuple(slice(at, at + n) for at, n in zip(first, view.shape, strict=True))]
                assert (target == -1.0).all()
                target.copy_(view)
    assert torch.equal(torch.cat(list(found.values()), dim), whole)


def test_attributes_that_do_not_fit() -> None:
    part = torch.zeros(5, 2)
    part.tensor_model_parallel, part.partition_dim, part.partition_stride = True, 0, 2
    with pytest.raises(ValueError, match="5 rows of dimension 0 are no 2 equal blocks"):
        shards.shard_locations(part)
    part.partition_stride, part.vocab_size = 1, 6
    with pytest.raises(ValueError, match="vocab_size 6 of a parameter is not among its 5 rows"):
        shards.shard_locations(part)
    expert = torch.zeros(4, 2)
    expert.tensor_model_parallel, expert.partition_dim, expert.partition_stride = True, 0, 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "tensor_parallel", lambda _: (2, 0))
        patch.setattr(shards, "_expert_parallel", lambda _: (2, 0))
        with pytest.raises(ValueError, match="cannot be split in dimension 0, which numbers the experts"):
            shards.shard_locations(expert)


class CountingSGD(torch.optim.SGD):
    """SGD with a number, and a tensor of another shape than the parameter's, in its state."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                count = self.state[param].get("count", 0) + 1
                self.state[param].update(count=count, rows=param.detach().sum(-1))


class Run:
    """A small training run in a process that belongs to no group."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, affine=False))
        self.model.register_buffer("empty", torch.zeros(0))
        self.optimizer = CountingSGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 3)).square().sum().backward()
        self.optimizer.step()


def test_a_process_without_groups(tmp_path: Path) -> None:
    """A resumed run continues its random numbers, with any kind of optimizer state."""
    one, other = Run(), Run()
    one.train()
    checkpoint.save(tmp_path / "saved", one.model, one.optimizer, step=1)
    one.train()
    assert checkpoint.load(tmp_path / "saved", other.model, other.optimizer) == {"step": 1}
    other.train()
    for (name, value), found in zip(one.model.state_dict().items(), other.model.state_dict().values(), strict=True):
        assert torch.equal(value, found), name
    state = other.optimizer.state[other.model[0].weight]
    assert state["count"] == 2
    assert torch.equal(state["rows"], one.optimizer.state[one.model[0].weight]["rows"])


def test_a_checkpoint_of_others(tmp_path: Path) -> None:
    save_sharded({"weight": torch.zeros(2)}, tmp_path / "plain")
    with pytest.raises(ValueError, match="plain was not written by apex"):
        checkpoint.load(tmp_path / "plain", nn.Linear(2, 1))


def test_a_stage_that_has_frozen_a_group_does_not_give_its_step_count() -> None:
    stages = [[({"lr": 1.0}, 2)], [({"lr": 1.0, "step": torch.tensor([3])}, 1)], [({"lr": 1.0, "step": 9}, 0)]]
    assert model_parts._options(stages) == [{"lr": 1.0, "step": 3}]


@pytest.mark.parametrize("plugin", [None, TorchDDPPlugin, lambda: LowLevelZeroPlugin(precision="fp32")])
def test_a_boosted_model_is_saved_under_the_names_of_the_users(plugin: Any, tmp_path: Path) -> None:
    def boosted() -> tuple[Any, Any]:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        booster = Booster("cpu", plugin=None if plugin is None else plugin())
        return booster.boost(model, FusedAdam(model.parameters(), lr=0.1))[:2]

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model, optimizer = boosted()
        optimizer.backward(model(torch.ones(3, 4)).square().sum())
        optimizer.step()
        checkpoint.save(tmp_path / "checkpoint", model, optimizer)
        loaded, other = boosted()
        checkpoint.load(tmp_path / "checkpoint", loaded, other)
        assert all(map(torch.equal, model.parameters(), loaded.parameters()))
        assert other.state_dict()["param_groups"][0]["step"] == 1
        assert unwrap_model(loaded) is loaded.unwrap()
    finally:
        torch.distributed.destroy_process_group()
