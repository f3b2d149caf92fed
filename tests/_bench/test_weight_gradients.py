"""The case of accumulated weight gradients."""

from __future__ import annotations

import pytest
import torch

from apex._bench.cases import weight_gradients
from apex._bench.check import worst_excess

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_are_checked_from_zero(dtype: torch.dtype) -> None:
    prepared = weight_gradients._prepare(dtype, 96, 64, 32, CPU)
    assert set(prepared.implementations) == {"ours", "torch"}
    for name, make in prepared.implementations.items():
        call = make()
        for _ in range(2):
            assert worst_excess(call(), prepared.expected_of.get(name, prepared.expected)) <= 1
    for make in (prepared.timed or {}).values():
        assert all(result.isfinite().all() for result in make()())
