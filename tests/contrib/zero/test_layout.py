"""Where parameters lie in buckets and shards: every element once, wherever the cuts are."""

from __future__ import annotations

import pytest
import torch

from apex.contrib.optimizers._zero.layout import Layout, WholeLayout, merge_adjacent
from tests.support.drawn import given, settings, st

LAYOUTS = st.builds(
    Layout,
    st.lists(st.integers(0, 70), max_size=9),
    st.integers(1, 5),
    st.none() | st.integers(1, 90),
    st.sampled_from([1, 2, 8]),
)
WHOLE_LAYOUTS = st.builds(
    lambda sizes, ranks, bucket, alignment: WholeLayout(sizes, ranks, bucket, alignment, work=[n**2 for n in sizes]),
    st.lists(st.integers(0, 70), max_size=9),
    st.integers(1, 5),
    st.none() | st.integers(1, 90),
    st.sampled_from([1, 2, 8]),
)


@settings(max_examples=150, deadline=None)
@given(LAYOUTS | WHOLE_LAYOUTS)
def test_every_element_is_in_one_bucket_and_owned_by_one_rank(layout: Layout) -> None:
    elements = {(param, at) for param, size in enumerate(layout.sizes) for at in range(size)}
    in_buckets = [
        ((piece.param, piece.start + k), (piece.bucket, piece.offset + k))
        for pieces in layout.pieces
        for piece in pieces
        for k in range(piece.size)
    ]
    owned = [
        ((piece.param, piece.start + k), (piece.bucket, rank * layout.shard_sizes[piece.bucket] + piece.offset + k))
        for rank in range(layout.ranks)
        for piece in layout.owned_by(rank)
        for k in range(piece.size)
    ]
    for found in (in_buckets, owned):
        assert len(found) == len(elements)
        assert {element for element, _ in found} == elements
        assert len({place for _, place in found}) == len(found)
    # A shard's elements are those of its bucket.
    assert dict(in_buckets) == dict(owned)


@settings(max_examples=150, deadline=None)
@given(LAYOUTS)
def test_buckets_shards_and_flat_shards(layout: Layout) -> None:
    unit = layout.ranks * layout.alignment
    assert sum(layout.bucket_sizes) == layout.size
    assert sum(layout.shard_sizes) == layout.shard_size
    assert all(size % unit == 0 and size for size in layout.bucket_sizes)
    assert len(set(layout.bucket_sizes[:-1])) <= 1
    assert layout.bucket_sizes[-1:] <= layout.bucket_sizes[:1]
    for number, pieces in enumerate(layout.pieces):
        assert pieces, "a bucket that holds nothing"
        for piece in pieces:
            assert piece.offset + piece.size <= layout.bucket_sizes[number]
            # A parameter lies in one stretch of the flat space, across buckets.
            assert layout.bucket_starts[number] + piece.offset == layout.starts[piece.param] + piece.start
            assert (layout.starts[piece.param]) % layout.alignment == 0
    for rank in range(layout.ranks):
        pieces = layout.owned_by(rank)
        ends = [0, *(piece.flat + piece.size for piece in pieces)]
        assert all(piece.flat >= end for piece, end in zip(pieces, ends, strict=False))
        assert ends[-1] <= layout.shard_size
        for piece in pieces:
            assert piece.flat == layout.shard_starts[piece.bucket] + piece.offset


@settings(max_examples=100, deadline=None)
@given(LAYOUTS | WHOLE_LAYOUTS)
def test_cut_buckets(layout: Layout) -> None:
    for number, (size, pieces) in enumerate(zip(layout.bucket_sizes, layout.pieces, strict=True)):
        views = layout.cut(torch.arange(size), number)
        assert [(view[0].item(), len(view)) for view in views] == [(piece.offset, piece.size) for piece in pieces]


@settings(max_examples=100, deadline=None)
@given(LAYOUTS)
def test_merged_pieces(layout: Layout) -> None:
    for rank in range(layout.ranks):
        pieces = layout.owned_by(rank)
        wide = merge_adjacent(pieces)
        expected = {(piece.param, piece.start + k, piece.flat + k) for piece in pieces for k in range(piece.size)}
        assert {(piece.param, piece.start + k, piece.flat + k) for piece in wide for k in range(piece.size)} == expected
        assert sum(piece.size for piece in wide) == len(expected)
    if layout.ranks == 1:
        assert [(piece.param, piece.size) for piece in wide] == [(i, n) for i, n in enumerate(layout.sizes) if n]


@settings(max_examples=100, deadline=None)
@given(WHOLE_LAYOUTS)
def test_whole_parameters(layout: WholeLayout) -> None:
    unit = layout.ranks * layout.alignment
    assert all(size and size % unit == 0 for size in layout.bucket_sizes)
    assert sum(layout.bucket_sizes) == layout.size
    for rank in range(layout.ranks):
        pieces = layout.owned_by(rank)
        assert all(piece.size == layout.sizes[piece.param] for piece in pieces)
        ends = [0, *(piece.flat + piece.size for piece in pieces)]
        assert all(piece.flat >= end for piece, end in zip(pieces, ends, strict=False))
        assert ends[-1] <= layout.shard_size


def test_work_is_divided_evenly() -> None:
    layout = WholeLayout([64] * 10, 4, 256, 8, work=[1] * 10)
    assert layout.shard_sizes == (64, 64, 64)
    assert sorted(len(layout.owned_by(rank)) for rank in range(4)) == [2, 2, 3, 3]
    # The largest matrix is a rank's only one; the loads of one bucket count in the next.
    layout = WholeLayout([64, 16, 16, 16, 16, 16], 2, 80, 8, work=[8, 1, 1, 1, 1, 1])
    (alone,) = (
        [piece.param for piece in layout.owned_by(rank)] for rank in range(2) if len(layout.owned_by(rank)) == 1
    )
    assert alone == [0]


@pytest.mark.parametrize(
    ("sizes", "ranks", "bucket", "buckets"),
    [((100,), 4, None, (112,)), ((100,), 4, 64, (64, 48)), ((5, 3), 2, 1, (8, 8)), ((), 2, 8, ()), ((0, 0), 2, 8, ())],
)
def test_bucket_sizes(sizes: tuple, ranks: int, bucket: int | None, buckets: tuple) -> None:
    assert Layout(sizes, ranks, bucket, 4).bucket_sizes == buckets


def test_what_cannot_be_laid_out() -> None:
    with pytest.raises(ValueError, match="ranks=0"):
        Layout((1,), 0)
    with pytest.raises(ValueError, match="negative"):
        Layout((1, -1))
    with pytest.raises(ValueError, match="rank=2 is not among the 2 ranks"):
        Layout((1,), 2).owned_by(2)
