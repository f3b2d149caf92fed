"""The memory of live tensors, counted while operators run."""

import gc

import torch

from apex._memory.storages import BLOCK, LiveStorages, rounded


def counting() -> LiveStorages:
    return LiveStorages(lambda tensor: True)


def test_storages_are_counted_until_they_are_freed() -> None:
    gc.collect()
    with counting() as storages:
        first = torch.zeros(1000)
        second = first + 1
        _ = first[:10]  # no memory of its own
        del first, _
        third = second * 2
    assert storages.peak == storages.live == 2 * rounded(4000)
    del second, third
    assert storages.live == 0


def test_tensors_saved_for_backward_are_counted() -> None:
    weight = torch.ones(1000, requires_grad=True)
    with counting() as storages:
        loss = (weight.exp() * 2).sum()  # exp's result is kept for the backward pass, the product is not
        loss.backward()
    assert 2 * rounded(4000) < storages.peak <= 4 * rounded(4000) + BLOCK
