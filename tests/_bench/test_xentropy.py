"""The cross-entropy cases: names as they were recorded, and expectations that are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from apex._bench import selection
from apex._bench.cases import xentropy
from apex._bench.recorded import DIRECTORIES

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.skipif(not DIRECTORIES[1].is_dir(), reason="not a source tree")
def test_gpu_cases_cover_the_recorded_ones() -> None:
    rows = json.loads(Path(DIRECTORIES[1], "nvidia_h200.json").read_text())
    recorded = {row["case"] for row in rows if row["case"].startswith("xentropy") and "ms" in row}
    assert len(recorded) == 18
    assert recorded <= {case.name for _, case in selection.select(["xentropy"], GPU)}


def test_bytes_moved() -> None:
    moved = {case.name: case.bytes_moved for _, case in selection.select(["xentropy"], GPU)}
    one = 8192 * 32000 * 2
    for way, tensors in (("fwd", 1), ("bwd", 2), ("fwd+grad(in place)", 3)):
        assert moved[f"xentropy bfloat16 8192x32000 ls0.1 {way}"] == tensors * one


def test_loss_and_gradient_together() -> None:
    prepared = xentropy._prepare(torch.float32, (4, 30), xentropy.TOGETHER, CPU)
    (gradient,) = prepared.implementations["ours"]()()
    torch.testing.assert_close(gradient.double(), prepared.expected[0].value)


@pytest.mark.parametrize("kind", xentropy.LINEAR)
def test_expectations_of_a_linear_layer(kind: str) -> None:
    shape = (1030, 4, 11)
    values, weight, labels = xentropy.make_linear(shape, CPU)
    wide = [t.detach().double().requires_grad_() for t in (values, weight)]
    z = functional.linear(*wide)
    z = xentropy.SOFTCAP * torch.tanh(z / xentropy.SOFTCAP) if "softcap" in kind else z
    loss = functional.cross_entropy(z, labels)
    if "entropy" in kind.split():
        log_p = z.log_softmax(-1)
        loss = -loss - 0.1 * (log_p.exp() * log_p).sum(-1).mean()
    wanted = (loss.detach(), *torch.autograd.grad(loss, wide))
    prepared = xentropy._prepare_linear(kind, shape, CPU)
    for expected, value in zip(prepared.expected, wanted, strict=True):
        torch.testing.assert_close(expected.value, value)
    for implementation in prepared.implementations.values():
        for actual, value in zip(implementation()(), wanted, strict=True):
            torch.testing.assert_close(actual.double(), value, rtol=1e-5, atol=1e-6)
