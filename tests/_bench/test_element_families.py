"""The benchmark cases of gated linear units, index_mul_2d and focal loss, on small shapes."""

import json
from pathlib import Path

import pytest
import torch

from apex._bench import selection
from apex._bench.cases import focal_loss, index_mul
from apex._bench.check import worst_excess
from apex._bench.recorded import DIRECTORIES

CPU, GPU = torch.device("cpu"), torch.device("cuda")

PREPARED = [
    *((index_mul._prepare, (index_mul.Shape(torch.float32, 5, 30, 8), way)) for way in ("fwd", "bwd", "force step")),
    *((focal_loss._prepare, (torch.float32, (2, 30, 8), way)) for way in ("fwd", "bwd")),
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


@pytest.mark.skipif(not DIRECTORIES[1].is_dir(), reason="not a source tree")
def test_gpu_cases_cover_the_recorded_ones() -> None:
    rows = json.loads(Path(DIRECTORIES[1], "nvidia_h200.json").read_text())
    recorded = {row["case"] for row in rows if "swiglu" in row["case"] or row["case"].startswith("index_mul")}
    assert len(recorded) == 6
    assert recorded <= {case.name for _, case in selection.select(["glu", "index_mul"], GPU)}


def test_bytes_moved() -> None:
    moved = {case.name: case.bytes_moved for _, case in selection.select(["glu", "index_mul", "focal_loss"], GPU)}
    assert moved["bias_swiglu bf16 16384x22016 fwd"] == 3 * 16384 * 11008 * 2
    assert moved["bias_swiglu bf16 16384x22016 bwd"] == 5 * 16384 * 11008 * 2
    assert moved["index_mul_2d fp32 800000x256 fwd"] == 3 * 800000 * 256 * 4
    assert moved["index_mul_2d fp32 800000x256 of 100000 rows bwd"] == 2600000 * 256 * 4
    assert moved["focal_loss bfloat16 8x76725x80 bwd"] == 8 * 76725 * (2 * 160 + 8)
