"""The case of accumulated weight gradients, and the recorded times of dense layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from apex._bench import selection
from apex._bench.cases import weight_gradients
from apex._bench.check import worst_excess
from apex._bench.recorded import DIRECTORIES

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.skipif(not DIRECTORIES[1].is_dir(), reason="not a source tree")
def test_gpu_cases_cover_the_recorded_ones() -> None:
    rows = json.loads(Path(DIRECTORIES[1], "nvidia_h200.json").read_text())
    recorded = {row["case"] for row in rows if row["case"].startswith(("dense_", "mlp ", "wgrad_"))}
    assert len(recorded) == 5
    assert recorded <= {case.name for _, case in selection.select(["dense", "weight_gradients"], GPU)}


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
