"""The benchmark cases of the transducer, on small shapes."""

import json
from pathlib import Path

import pytest
import torch

from apex._bench import selection
from apex._bench.cases import transducer
from apex._bench.check import worst_excess
from apex._bench.recorded import DIRECTORIES

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("prepare", [transducer._joint, transducer._loss])
def test_ours_and_the_peer_give_what_is_expected(prepare, direction: str) -> None:
    prepared = prepare(torch.float32, (2, 5, 4, 8), direction, CPU)
    assert list(prepared.implementations)[:2] == ["ours", "torch"]
    for name in ("ours", "torch"):
        assert worst_excess(prepared.implementations[name]()(), prepared.expected) <= 1


@pytest.mark.skipif(not DIRECTORIES[1].is_dir(), reason="not a source tree")
def test_gpu_cases_are_the_recorded_ones() -> None:
    rows = json.loads(Path(DIRECTORIES[1], "nvidia_h200.json").read_text())
    recorded = {row["case"] for row in rows if row["case"].startswith("transducer")}
    assert recorded == {case.name for _, case in selection.select(["transducer"], GPU)}


def test_bytes_moved() -> None:
    moved = {case.name: case.bytes_moved for _, case in selection.select(["transducer"], GPU)}
    assert moved["transducer_joint half 16x300x60x512 fwd"] == 16 * (300 * 60 + 360) * 1024
    assert moved["transducer_loss half 16x300x60x1024 bwd"] == 2 * 16 * 300 * 60 * 2048
