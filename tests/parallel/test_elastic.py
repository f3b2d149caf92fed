"""A loader whose position survives restarts, in any number of processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from apex.parallel import ElasticLoader

SAMPLES = list(range(23))


def batches(loader: ElasticLoader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_other_numbers_of_processes_go_on_with_the_same_samples(ranks: int, shuffle: bool) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": shuffle, "seed": 3}
    whole = ElasticLoader(SAMPLES, **options)
    iterator = iter(whole)
    taken = [next(iterator).tolist() for _ in range(3)]
    state = whole.state_dict()
    assert (state["epoch"], state["taken"]) == (0, 3)
    expected = [batch.tolist() for batch in iterator] + batches(whole)
    assert len(whole) == 5
    assert len(expected) == 7
    first_epoch = [sample for batch in (*taken, *expected[:2]) for sample in batch]
    assert len(set(first_epoch)) == 20
    assert (first_epoch == SAMPLES[:20]) != shuffle
    assert (expected[2:4] == taken[:2]) != shuffle  # another order in each epoch

    parts = []
    for rank in range(ranks):
        loader = ElasticLoader(SAMPLES, rank=rank, ranks=ranks, **options)
        loader.load_state_dict(state)
        parts.append(batches(loader) + batches(loader))
        assert (loader.epoch, loader.taken) == (2, 0)
    joined = [[sample for part in places for sample in part] for places in zip(*parts, strict=True)]
    assert joined == expected


def test_batches_that_workers_read_in_advance_are_not_taken() -> None:
    loader = ElasticLoader(SAMPLES, 2, num_workers=1, prefetch_factor=4)
    for _ in loader:
        break
    assert loader.taken == 1
    assert batches(ElasticLoader(SAMPLES, 2))[1:3] == [[2, 3], [4, 5]]
    assert next(iter(loader)).tolist() == [2, 3]


def test_the_users_random_numbers_are_not_drawn() -> None:
    before = torch.get_rng_state()
    batches(ElasticLoader(SAMPLES, 4, shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_do_not_depend_on_the_default_device() -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "collate_fn": list}
    expected = list(ElasticLoader(SAMPLES, **options))
    with torch.device("meta"):  # as a default GPU, no device of the loader's generator
        assert list(ElasticLoader(SAMPLES, **options)) == expected


def test_a_position_after_the_last_batch_is_the_next_epoch() -> None:
    loader, other = ElasticLoader(SAMPLES, 4), ElasticLoader(SAMPLES, 4)
    for _ in loader:
        other.load_state_dict(loader.state_dict())
    assert (other.epoch, other.taken) == (0, 5)
    assert batches(other) == []
    assert (other.epoch, len(batches(other))) == (1, 5)


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        return iter(SAMPLES)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"dataset": Endless()}, TypeError, "dataset must have __len__ and __getitem__, which Endless has not"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"batch_size": 24}, ValueError, "dataset has 23 samples, fewer than a global batch of 24"),
        ({"rank": 0, "ranks": 3}, ValueError, "batch_size=4 samples cannot be divided equally among 3 processes"),
        ({"rank": 2, "ranks": 2}, ValueError, "rank must be less than ranks=2, got 2"),
        ({"rank": 1}, ValueError, "rank and ranks must be given together"),
        ({"sampler": SAMPLES}, TypeError, "sampler cannot be given"),
        ({"num_workers": 2, "in_order": False}, ValueError, "in_order must be True"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        ElasticLoader(**{"dataset": SAMPLES, "batch_size": 4, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 2}, "the saved position is of batch_size=4, and this loader has 2"),
        ({"seed": 1}, "the saved position is of seed=0, and this loader has 1"),
        ({"shuffle": True}, "the saved position is of shuffle=False, and this loader has True"),
        ({"dataset": SAMPLES[:22]}, "the saved position is of samples=23, and this loader has 22"),
    ],
)
def test_positions_of_another_order_are_refused(options: dict[str, Any], message: str) -> None:
    state = ElasticLoader(SAMPLES, 4).state_dict() | {"taken": 2}
    loader = ElasticLoader(**{"dataset": SAMPLES, "batch_size": 4, **options})
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict(state)
    assert loader.taken == 0


def test_positions_outside_of_an_epoch_are_refused() -> None:
    loader = ElasticLoader(SAMPLES, 4)
    with pytest.raises(ValueError, match="the saved position is batch 6, but an epoch has 5 of them"):
        loader.load_state_dict(loader.state_dict() | {"taken": 6})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "not that of an ElasticLoader"),
        ({"epoch": -1}, "epoch -1"),
        ({"epoch": "first"}, "epoch"),
        ({"taken": 1.5}, "taken"),
    ],
)
def test_states_that_are_no_positions_are_refused(change: dict[str, Any] | None, message: str) -> None:
    loader = ElasticLoader(SAMPLES, 4)
    before = loader.state_dict()
    with pytest.raises((ValueError, TypeError), match=message):
        loader.load_state_dict({} if change is None else before | change)
    assert loader.state_dict() == before


@pytest.mark.parametrize("by", ["a loaded state", "another iteration"])
def test_an_iteration_whose_position_was_changed_does_not_go_on(by: str) -> None:
    """Its next batches would be counted at places of other batches, and a resumed run would miss or repeat samples."""
    loader = ElasticLoader(SAMPLES, 4)
    iterator = iter(loader)
    next(iterator)
    loader.load_state_dict(loader.state_dict())  # the same position: nothing changes
    assert next(iterator).tolist() == [4, 5, 6, 7]
    if by == "a loaded state":
        loader.load_state_dict(loader.state_dict() | {"taken": 4})
    else:
        assert next(iter(loader)).tolist() == [8, 9, 10, 11]
    before = loader.state_dict()
    with pytest.raises(RuntimeError, match="begin a new one"):
        next(iterator)
    assert loader.state_dict() == before
