"""The softmax cases: those that were recorded, the bytes they move, and that ours is right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from apex._bench import registry
from apex._bench.cases import softmax
from apex._bench.check import worst_excess
from apex._bench.recorded import DIRECTORIES

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.skipif(not DIRECTORIES[1].is_dir(), reason="not a source tree")
def test_gpu_cases_cover_the_recorded_ones() -> None:
    rows = json.loads(Path(DIRECTORIES[1], "nvidia_h200.json").read_text())
    recorded = {row["case"] for row in rows if "softmax" in row["case"]}
    assert len(recorded) == 7
    assert recorded <= {case.name for case in softmax.cases(GPU, quick=False)}


def test_bytes_moved() -> None:
    moved = {case.name: case.bytes_moved for case in softmax.cases(GPU, quick=False)}
    tensor = 64 * 2048 * 2048 * 2
    assert moved["causal_softmax bf16 64x2048x2048 fwd"] == 1.5 * tensor
    assert moved["causal_softmax bf16 64x2048x2048 bwd"] == 2 * tensor
    assert moved["masked_softmax bf16 8x16x2048x2048 fwd"] == 2 * 2 * tensor + 8 * 2048 * 2048


@pytest.mark.parametrize("kind", ["causal_softmax", "masked_softmax", "scaled_softmax"])
@pytest.mark.parametrize("direction", ["fwd", "bwd", "step"])
def test_ours_and_the_peer_are_right(kind: str, direction: str) -> None:
    prepared = softmax._prepare(kind, torch.float32, (2, 3, 16, 16), direction, CPU)
    assert set(prepared.implementations) == {registry.OURS, "torch"}
    for make in prepared.implementations.values():
        assert worst_excess(make()(), prepared.expected) <= 1
