"""DistributedDataParallel and Reducer in two processes, and tests of their parts without processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from apex.parallel import DistributedDataParallel, Reducer, distributed
from apex.parallel._buckets import plan
from tests.parallel import distributed_checks, four_checks
from tests.parallel.processes import run_checks
from tests.support.drawn import given, settings, st


@pytest.fixture(scope="module")
def in_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(distributed_checks.__name__, Path(tmp_path_factory.mktemp("two")))


@pytest.fixture(scope="module")
def in_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(four_checks.__name__, Path(tmp_path_factory.mktemp("four")), processes=4)


@pytest.mark.parametrize("name", distributed_checks.CHECKS)
def test_two_processes(name: str, in_two: dict[str, str]) -> None:
    assert not in_two[name], in_two[name]


@pytest.mark.parametrize("name", four_checks.CHECKS)
def test_four_processes(name: str, in_four: dict[str, str]) -> None:
    assert not in_four[name], in_four[name]


@pytest.mark.parametrize("kind", [DistributedDataParallel, Reducer])
def test_a_process_group_is_needed(kind: type) -> None:
    with pytest.raises(RuntimeError, match=f"{kind.__name__} needs a process group"):
        kind(nn.Linear(2, 2))


def test_tensors_by_type() -> None:
    names = ("float32", "float16", "float64", "bfloat16", "float32", "int64")
    tensors = [torch.zeros(index + 1, dtype=getattr(torch, name)) for index, name in enumerate(names)]

    def lengths(buckets: object) -> list[list[int]]:
        return [[len(tensor) for tensor in bucket] for bucket in buckets]

    assert lengths(distributed.split_half_float_double(tensors)) == [[2], [1, 5], [3]]
    assert lengths(distributed.split_half_float_double_bfloat16(tensors)) == [[2], [1, 5], [3], [4]]
    by_type = distributed.split_by_type(tensors)
    assert list(by_type)[:2] == ["torch.FloatTensor", "torch.HalfTensor"]
    assert lengths(by_type.values()) == [[1, 5], [2], [3], [4], [6]]


def test_any_callable_gets_all_tensors_as_one() -> None:
    """Methods of built-in types belong to no module, and objects have no name."""
    seen: list[torch.Tensor] = []

    class Twice:
        __module__ = "torch.distributed"

        def __call__(self, vector: torch.Tensor) -> None:
            vector.mul_(2)

    tensors = [torch.ones(2), torch.full((1, 2), 3.0)]
    for call in (seen.append, Twice()):
        distributed.apply_flat_dist_call(tensors, call)
    assert torch.equal(seen[0], torch.tensor([1.0, 1.0, 3.0, 3.0]))
    assert [tensor.flatten().tolist() for tensor in tensors] == [[2.0, 2.0], [6.0, 6.0]]


def test_flatten_and_back() -> None:
    tensors = [torch.randn(2, 3), torch.randn(()), torch.randn(0, 2), torch.randn(4)]
    flat = distributed.flatten(tensors)
    assert flat.shape == (11,)
    parts = distributed.unflatten(flat, tensors)
    assert all(map(torch.equal, parts, tensors))
    flat.zero_()
    assert not any(part.any() for part in parts)


def test_tensors_in_nested_iterables() -> None:
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    found: list[torch.Tensor] = []
    distributed.extract_tensors([one, (two, [None, 3, "text"]), iter([three])], found)
    assert [len(tensor) for tensor in found] == [1, 2, 3]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_plan_has_every_parameter_once(data: st.DataObject) -> None:
    dtypes = data.draw(st.lists(st.sampled_from([torch.float16, torch.float32]), min_size=1, max_size=12))
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=len(dtypes), max_size=len(dtypes)))
    params = [torch.empty(size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
    order = data.draw(st.permutations(range(len(params))))
    arrived = order[: data.draw(st.integers(0, len(order)))]
    message_size = data.draw(st.none() | st.integers(1, 20))
    triggers = data.draw(st.none() | st.lists(st.sampled_from(range(len(params)))))
    buckets = plan(params, arrived, message_size, triggers)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(params)))
    for bucket in buckets:
        assert len({params[index].dtype for index in bucket}) == 1
        # Whether a gradient arrived is the same for all of a bucket.
        assert len({index in arrived for index in bucket}) == 1
        if triggers is not None:
            assert not set(bucket[:-1]) & set(triggers)
        elif message_size is not None:
            assert sum(params[index].numel() for index in bucket[:-1]) < message_size


def test_the_last_bucket_is_short() -> None:
    """It is sent after the backward pass and cannot overlap with it."""
    params = [torch.empty(1_000_000, device="meta") for _ in range(25)]

    def sizes(**options: object) -> list[int]:
        arguments = {"message_size": 10_000_000, "triggers": None, **options}
        return [len(bucket) for bucket in plan(params, range(25), **arguments)]

    assert sizes() == [10, 10, 3, 2]
    assert sizes(message_size=3_000_000) == [3] * 8 + [1]
    assert sizes(message_size=None) == [25]
    assert sizes(triggers=[4]) == [5, 20]
    buckets = plan([torch.empty(9_000_000, device="meta")], [0], 10_000_000, None)
    assert buckets == [[0]]
