"""The benchmark on a real GPU: every live peer of one case, and the memory that a step takes."""

from __future__ import annotations

import gc
import json

import pytest
import torch

from apex._bench.cases import optimizers
from apex._bench.parameter_sets import resnet50
from apex._bench.problems import make_parameters
from apex._cli.bench.command import run_bench
from apex.normalization import FusedRMSNorm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("words", ["rms_norm bfloat16 16384x1024 bwd", "layer_norm bfloat16 128x1024 step"])
def test_every_implementation_is_measured(words, tmp_path):
    path = tmp_path / "r.json"
    assert run_bench(["norm"], output=path, quick=True, device="cuda", filter=words, list_only=False) == 0
    (case,) = json.loads(path.read_text())["cases"]
    measured = {row["implementation"]: row for row in case["implementations"] if row["status"] != "recorded"}
    assert {"ours", "torch"} <= set(measured)
    assert ("compile" in measured) == (not words.endswith("step"))
    for row in measured.values():
        assert row["status"] == "ok", row
        assert row["host_microseconds"] > 0
        assert row["gpu_microseconds"] > 0


def peak_bytes(step):
    """Return the most bytes that a step allocates at once beyond those that are allocated before it."""
    # Autograd's own thread frees a step's tensors at any time later, even during the next step.
    with torch.autograd.set_multithreading_enabled(False):
        step()  # workspaces and compiled kernels that stay are not part of a step
        torch.cuda.synchronize()
        gc.collect()  # garbage of other tests that is freed during a step would count as less
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - before


def test_memory_efficient_needs_less_memory():
    x = torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def peak(kind, **options):
        module = kind(4096, eps=1e-5, **options).to("cuda", torch.bfloat16)
        # The norm gets an intermediate that nobody else keeps.
        return peak_bytes(lambda: torch.autograd.grad(module(x + 1), [x, *module.parameters()], x.detach()))

    ours, theirs = peak(FusedRMSNorm), peak(torch.nn.RMSNorm)
    assert peak(FusedRMSNorm, memory_efficient=True) < ours <= theirs * 1.01


@pytest.mark.parametrize("words", ["fp32 resnet50", "bf16", "overflow resnet50", "norm resnet50"])
def test_every_optimizer_is_right_and_measured(words, tmp_path):
    path = tmp_path / "r.json"
    options = {"output": path, "quick": True, "device": "cuda", "filter": words, "list_only": False}
    assert run_bench(["optimizers"], **options) == 0
    cases = json.loads(path.read_text())["cases"]
    assert cases
    for case in cases:
        for row in case["implementations"]:
            assert row["status"] in ("ok", "recorded"), (case["case"], row)


def test_a_fused_step_needs_no_memory_of_the_size_of_the_parameters():
    for algorithm in optimizers.ALGORITHMS:
        if algorithm.name.startswith("muon"):
            continue  # its directions are as large as its matrices
        params = make_parameters(resnet50(), torch.device("cuda"), algorithm.dtype)
        # Sums of 26,560 rows, in the case of AdamP.
        assert peak_bytes(algorithm.ours(params).step) < 2**21, algorithm.name
