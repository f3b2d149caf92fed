"""Batch samplers."""

from __future__ import annotations

import pytest

from apex.transformer._data import MegatronPretrainingRandomSampler, MegatronPretrainingSampler


def test_every_rank_gets_its_part_in_order() -> None:
    ranks = [list(MegatronPretrainingSampler(22, 2, 2, rank, 3)) for rank in range(3)]
    assert ranks == [[[2, 3], [8, 9], [14, 15]], [[4, 5], [10, 11], [16, 17]], [[6, 7], [12, 13], [18, 19]]]
    last = [list(MegatronPretrainingSampler(22, 2, 2, rank, 3, drop_last=False))[-1] for rank in range(3)]
    assert last == [[20, 21], [], []]


def test_random_samples_are_seen_once_and_resumed() -> None:
    whole = []
    for rank in range(2):
        sampler = MegatronPretrainingRandomSampler(21, 0, 2, rank, 2)
        batches = list(sampler)
        assert sampler.consumed_samples == 20
        resumed = list(MegatronPretrainingRandomSampler(21, 8, 2, rank, 2))
        assert resumed == batches[2:]
        assert list(sampler) != batches  # another epoch, another order
        whole += batches
    assert sorted(index for batch in whole for index in batch) == list(range(20))


def test_batch_size_changes_between_batches() -> None:
    sampler = MegatronPretrainingSampler(20, 0, 2, 1, 2)
    batches = iter(sampler)
    assert next(batches) == [2, 3]
    sampler.local_minibatch_size = 3
    assert next(batches) == [7, 8, 9]
    random = MegatronPretrainingRandomSampler(40, 0, 2, 0, 2)
    batches = iter(random)
    assert len(next(batches)) == 2
    random.local_minibatch_size = 4
    assert len(next(batches)) == 4
    assert random.consumed_samples == 12
    assert (len(sampler), len(random)) == (20, 40)


def test_an_epoch_ends_although_a_new_batch_size_does_not_divide_it() -> None:
    for rank in range(2):
        random = MegatronPretrainingRandomSampler(32, 0, 4, rank, 2)
        batches = iter(random)
        assert len(next(batches)) == 4
        random.local_minibatch_size = 5
        assert [len(batch) for batch in batches] == [5, 5]
        assert random.consumed_samples == 28
        first, second = list(random), list(random)
        assert [len(batch) for batch in first + second] == [5] * 6
        assert first != second
        assert random.consumed_samples == 94  # two epochs of 32, of which 2 are dropped, after the first one
        random.local_minibatch_size = 17
        with pytest.raises(ValueError, match="32 samples are fewer than a global batch of 34"):
            next(iter(random))
    resumed = MegatronPretrainingRandomSampler(16, 3, 4, 0, 1)  # from a run with another batch size
    assert [len(list(resumed)) for _ in range(3)] == [3, 4, 4]


@pytest.mark.parametrize(
    ("sampler", "error"), [(MegatronPretrainingSampler, RuntimeError), (MegatronPretrainingRandomSampler, ValueError)]
)
def test_mistakes(sampler: type, error: type[Exception]) -> None:
    for arguments, words in (
        ((0, 0, 1, 0, 1), "total_samples is 0"),
        ((9, 0, 0, 0, 1), "local_minibatch_size must be positive"),
        ((9, 0, 1, 0, 0), "data_parallel_size must be positive"),
        ((9, 0, 1, 2, 2), "data_parallel_rank must be from 0"),
    ):
        with pytest.raises(error, match=words):
            sampler(*arguments)
    with pytest.raises(RuntimeError, match="no samples left to consume: 9, 9"):
        MegatronPretrainingSampler(9, 9, 1, 0, 1)
    with pytest.raises(ValueError, match="3 samples are fewer than a global batch of 4"):
        next(iter(MegatronPretrainingRandomSampler(3, 0, 2, 0, 2)))
