"""Where parts of tensors lie in the whole, without processes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apex.transformer._resharding import place


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_a_stretch_of_memory_is_boxes(size: list[int], data: st.DataObject) -> None:
    whole = torch.arange(math.prod(size), dtype=torch.int64).view(size)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    found = []
    for first, sizes in place.boxes_of_stretch(size, start, stop):
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
)
def test_parts_fill_the_whole(ranks: int, stride: int, dim: int, block: int, words: int | None) -> None:
    """Split as the layers split a whole weight: into blocks of rows, of which each rank takes every so-many-th."""
    size = [2, 3, 4]
    size[dim] = ranks * stride * block
    whole = torch.arange(math.prod(size), dtype=torch.float32).view(size)
    found = {"": torch.full_like(whole, -1.0)}
    if words is not None and words <= size[dim]:
        parts = whole.split([words, size[dim] - words], dim)
        found = {suffix: torch.full_like(part, -1.0) for suffix, part in zip(("", place.PADDING), parts, strict=True)}
    for rank in range(ranks):
        part = torch.cat(whole.split(block, dim)[rank::ranks], dim)
        part.tensor_model_parallel, part.partition_dim, part.partition_stride = True, dim, stride
        if len(found) == 2:
            part.vocab_size = words
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(place, "tensor_parallel", lambda rank=rank: (ranks, rank))
            places = place.places_of(part)
        for suffix, where in places.items():
            assert where.size == tuple(found[suffix].shape)
            for first, view in where.boxes(part, (0, 0, 0)):
                target = found[suffix][tuple(slice(at, at + n) for at, n in zip(first, view.shape, strict=True))]
                assert (target == -1.0).all()
                target.copy_(view)
    assert torch.equal(torch.cat(list(found.values()), dim), whole)


def test_marks_that_do_not_fit() -> None:
    part = torch.zeros(5, 2)
    part.tensor_model_parallel, part.partition_dim, part.partition_stride = True, 0, 2
    with pytest.raises(ValueError, match="5 rows of dimension 0 are no 2 equal blocks"):
        place.places_of(part)
    part.partition_stride, part.vocab_size = 1, 6
    with pytest.raises(ValueError, match="vocab_size 6 of a parameter is not among its 5 rows"):
        place.places_of(part)
