"""The benchmark cases of index_mul_2d on small shapes, and the bytes that cases of ops move."""

import pytest
import torch

from apex._bench.cases import index_mul
from apex._bench.check import worst_excess

CPU, GPU = torch.device("cpu"), torch.device("cuda")

PREPARED = [
    *((index_mul._prepare, (index_mul.Shape(torch.float32, 5, 30, 8), way)) for way in ("fwd", "bwd", "force step")),
]


@pytest.mark.parametrize(
    ("prepare", "arguments"),
    PREPARED,
    ids=[f"{p.__module__.rpartition('.')[2]}-{i}" for i, (p, _) in enumerate(PREPARED)],
)
def test_ours_and_the_peer_give_what_is_expected(prepare, arguments) -> None:
    prepared = prepare(*arguments, CPU)
    assert list(prepared.implementations) == ["ours", "torch"]
    for make in prepared.implementations.values():
        assert worst_excess(make()(), prepared.expected) <= 1
