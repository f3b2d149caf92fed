"""The cases of dense layers: names, and results that hold for every implementation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from apex._bench import registry, selection
from apex._bench.cases import dense
from apex._bench.check import mean_excess, worst_excess
from apex._bench.recorded import DIRECTORIES

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.skipif(not DIRECTORIES[1].is_dir(), reason="not a source tree")
def test_gpu_cases_cover_the_recorded_ones() -> None:
    rows = json.loads(Path(DIRECTORIES[1], "nvidia_h200.json").read_text())
    recorded = {row["case"] for row in rows if row["case"].startswith(("dense_", "mlp ", "wgrad_"))}
    assert len(recorded) == 5
    assert recorded <= {case.name for _, case in selection.select(["dense"], GPU)}


def test_quick_has_fewer_cases_on_a_gpu() -> None:
    assert 0 < len(dense.cases(GPU, quick=True)) < len(dense.cases(GPU, quick=False))


@pytest.mark.parametrize("case", dense.cases(CPU, quick=True), ids=lambda case: case.name)
def test_implementations_agree_with_the_expectation(case: registry.Case) -> None:
    prepared = case.make(CPU)
    assert set(prepared.implementations) == {"ours", "torch"}
    for make in prepared.implementations.values():
        call = make()
        for _ in range(2):
            assert worst_excess(call(), prepared.expected) <= 1
    for make in (prepared.timed or {}).values():
        assert all(result.isfinite().all() for result in make()())


def test_half_precision_and_weights_of_zero() -> None:
    for direction in ("fwd", "bwd"):
        for zero in (True, False):
            prepared = dense._prepare_gelu(torch.float16, 96, 64, 256, zero, direction, CPU)
            assert mean_excess(prepared.implementations["ours"]()(), prepared.expected) <= 1
        prepared = dense._prepare_mlp(torch.float16, 96, [64] * 3, direction, CPU)
        assert mean_excess(prepared.implementations["ours"]()(), prepared.expected) <= 1
    prepared = dense._prepare_accumulation(torch.bfloat16, 96, 64, 32, CPU)
    assert worst_excess(prepared.implementations["ours"]()(), prepared.expected) <= 1
