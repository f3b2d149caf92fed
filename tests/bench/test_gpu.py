"""The benchmark on a real GPU: every live peer of one case, and the memory table."""

from __future__ import annotations

import json

import pytest
import torch

from apex._bench import registry, runner
from apex._bench.command import run_bench

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("words", ["rms_norm bfloat16 16384x1024 bwd", "layer_norm float32 128x1024 step"])
def test_every_implementation_is_measured(words, tmp_path):
    path = tmp_path / "r.json"
    assert run_bench(["norm"], output=path, plot=False, quick=True, device="cuda", filter=words, list_only=False) == 0
    (case,) = json.loads(path.read_text())["cases"]
    measured = {row["implementation"]: row for row in case["implementations"] if row["status"] != "recorded"}
    assert {"ours", "torch"} <= set(measured)
    assert ("compile" in measured) == (not words.endswith("step"))
    for row in measured.values():
        assert row["status"] == "ok", row
        assert row["host_microseconds"] > 0
        assert row["gpu_microseconds"] > 0


def test_memory_efficient_needs_less_memory():
    device = torch.device("cuda")
    family, case = registry.select(["norm"], device, words="rms_norm bfloat16").memory[0]
    peak = runner.run_memory_case(case, family, device).peak_bytes
    assert peak["ours memory_efficient"] < peak["ours"] <= peak["torch"] * 1.01


@pytest.mark.parametrize("words", ["fp32 resnet50", "bf16+master resnet50", "overflow resnet50", "norm resnet50"])
def test_every_optimizer_is_right_and_measured(words, tmp_path):
    path = tmp_path / "r.json"
    options = {"output": path, "plot": False, "quick": True, "device": "cuda", "filter": words, "list_only": False}
    assert run_bench(["optimizers"], **options) == 0
    cases = json.loads(path.read_text())["cases"]
    assert cases
    for case in cases:
        for row in case["implementations"]:
            assert row["status"] in ("ok", "recorded"), (case["case"], row)


def test_a_fused_step_needs_no_memory_of_the_size_of_the_parameters():
    device = torch.device("cuda")
    for family, case in registry.select(["optimizers"], device, words="resnet50").memory:
        result = runner.run_memory_case(case, family, device)
        assert not result.errors
        assert result.peak_bytes["ours"] < 2**21, case.name  # sums of 26,560 rows, in the case of AdamP
