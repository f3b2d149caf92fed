"""Groups of ranks for every way to split a model over up to 64 processes, without starting any."""

from __future__ import annotations

import itertools

import pytest

from apex.transformer._groups.layout import ParallelSizes, default_mesh, parallel_sizes, rank_groups

POWERS = (1, 2, 4, 8, 16, 32, 64)
ALL_SIZES = [
    (tensor, pipeline, data, context)
    for tensor, pipeline, data, context in itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4, 8), POWERS, (1, 2, 4))
    if tensor * pipeline * data * context <= 64
]


@pytest.mark.parametrize("tensor", [1, 2, 3, 4, 8])
def test_every_layout_up_to_64_ranks(tensor: int) -> None:
    for tp, stages, data, context in ALL_SIZES:
        if tp != tensor:
            continue
        world = tp * stages * data * context
        for expert in (size for size in range(1, data * context + 1) if (data * context) % size == 0):
            sizes = parallel_sizes(world, tp, stages, context, expert)
            assert sizes == ParallelSizes(tp, stages, data, context, expert, tp)
            check_groups(sizes, rank_groups(default_mesh(sizes), expert))
        if stages > 2 or context > 2:
            continue
        for expert, part in itertools.product((1, 2, 3, 4, 8), repeat=2):  # folded over ranks in any other way
            if part != tp and (world // stages) % (expert * part) == 0:
                sizes = parallel_sizes(world, tp, stages, context, expert, part)
                assert sizes == ParallelSizes(tp, stages, data, context, expert, part)
                check_groups(sizes, rank_groups(default_mesh(sizes), expert, expert_tensor=part))


def check_groups(sizes: ParallelSizes, groups: dict[str, list[list[int]]]) -> None:
    """Each kind divides all ranks into groups of its size, and crossing two kinds meets every rank once."""
    world = sizes.tensor * sizes.pipeline * sizes.data * sizes.context
    lengths = {
        "tensor": sizes.tensor,
        "pipeline": sizes.pipeline,
        "data": sizes.data,
        "context": sizes.context,
        "model": sizes.tensor * sizes.pipeline,
        "data_with_context": sizes.data * sizes.context,
        "tensor_context": sizes.tensor * sizes.context,
        "tensor_data": sizes.tensor * sizes.data,
        "tensor_data_context": sizes.tensor * sizes.data * sizes.context,
        "expert": sizes.expert,
        "expert_tensor": sizes.expert_tensor,
        "expert_tensor_model": sizes.expert * sizes.expert_tensor,
        "expert_data": world // sizes.pipeline // sizes.expert // sizes.expert_tensor,
        "expert_model": sizes.pipeline * sizes.expert * sizes.expert_tensor,
        "amax_reduction": sizes.tensor * sizes.data * sizes.context,
    }
    for kind, length in lengths.items():
        assert sorted(itertools.chain(*groups[kind])) == list(range(world)), kind
        assert {len(ranks) for ranks in groups[kind]} == {length}, kind
        assert all(ranks == sorted(ranks) for ranks in groups[kind]), kind
    for one, other in (
        ("model", "data_with_context"),
        ("tensor", "pipeline"),
        ("expert_tensor", "expert"),
        ("expert_tensor_model", "pipeline"),
        ("expert", "expert_data"),
        ("expert_model", "expert_data"),
    ):
        members = {rank: set(ranks) for ranks in groups[other] for rank in ranks}
        assert all(members[rank] & set(ranks) == {rank} for ranks in groups[one] for rank in ranks), (one, other)
    slab = world // sizes.pipeline
    for ranks in groups["tensor"]:
        assert ranks == list(range(ranks[0], ranks[0] + sizes.tensor))
    for ranks in groups["pipeline"]:
        assert ranks == list(range(ranks[0], world, slab))
    for ranks in groups["data"]:
        assert {rank // slab for rank in ranks} == {ranks[0] // slab}
        assert ranks == list(
            range(ranks[0], ranks[0] + sizes.data * sizes.tensor * sizes.context, sizes.tensor * sizes.context)
        )


def test_sixteen_ranks_of_the_original_docs() -> None:
    groups = rank_groups(default_mesh(parallel_sizes(16, 2, 4)))
    assert groups["tensor"][:3] == [[0, 1], [2, 3], [4, 5]]
    assert groups["data"] == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert groups["pipeline"] == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    assert groups["model"] == [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]
    assert groups["embedding"] == [[0, 12], [1, 13], [2, 14], [3, 15]]
    assert groups["position_embedding"] == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("stages", "split", "embedding", "position", "encoder", "decoder"),
    [
        (4, None, [0, 3], [0], [0], [0]),
        (4, 2, [0, 2, 3], [0, 2], [0, 1], [2, 3]),
        (4, 3, [0, 3], [0, 3], [0, 1, 2], [3]),
        (4, 0, [0, 3], [0], None, [0, 1, 2, 3]),
        (1, None, [0], [0], [0], [0]),
        (1, 0, [0], [0], [0], [0]),
    ],
)
def test_embeddings(
    stages: int, split: int | None, embedding: list, position: list, encoder: list | None, decoder: list
) -> None:
    groups = rank_groups(default_mesh(parallel_sizes(stages, 1, stages)), split=split)
    assert groups["embedding"] == [embedding]
    assert groups["position_embedding"] == [position]
    assert groups["encoder_relative_position_embedding"] == ([] if encoder is None else [encoder])
    assert groups["decoder_relative_position_embedding"] == [decoder]


@pytest.mark.parametrize(
    ("sizes", "error", "words"),
    [
        ((8, 3, 1), RuntimeError, r"`world_size` \(8\) is not divisible by tensor_model_parallel_size \(3\)"),
        ((8, 2, 2, 3), RuntimeError, r"context_parallel_size \(3\)"),
        ((8, 2, 2, 1, 4), RuntimeError, r"expert_model_parallel_size \(4\) must divide the 2 ranks"),
        ((8, 2, 2, 1, 1, 3), RuntimeError, r"expert_tensor_parallel_size \(3\) must divide the 4 ranks of a pipeline"),
        ((8, 2, 2, 1, 4, 0), ValueError, "expert tensor model parallel size must be a positive integer, got 0"),
        ((8, 0, 1), ValueError, "tensor model parallel size must be a positive integer, got 0"),
        ((8, 1, 2.0), ValueError, "pipeline model parallel size must be a positive integer, got 2.0"),
    ],
)
def test_sizes_that_do_not_fit(sizes: tuple, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        parallel_sizes(*sizes)


def test_experts_that_fit_no_ranks_name_the_other_size() -> None:
    with pytest.raises(RuntimeError, match=r"\(4\) must divide the 2 ranks.*expert_tensor_parallel_size=1"):
        parallel_sizes(4, 2, 1, 1, 4)
    assert parallel_sizes(4, 2, 1, 1, 4, 1).expert == 4
