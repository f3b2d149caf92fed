"""docs/scaling.md has the numbers that its formulas give, and the formulas are those of the code."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from apex.contrib.optimizers._zero.layout import Layout
from apex.ops.batch_norm import rank_statistics
from apex.parallel._buckets import plan

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def scaling() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scaling", DOCS / "scaling.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scaling"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_the_page_has_what_the_formulas_give(scaling: ModuleType) -> None:
    page = (DOCS / "scaling.md").read_text()
    found = dict(re.findall(r"<!-- ([\w, ]+) -->\n\n((?:\|.*\n)+)", page))
    assert found == {name: text + "\n" for name, text in scaling.tables().items()}


def test_sums_in_the_text(scaling: ModuleType) -> None:
    ranks = 1024
    cost = scaling.ddp(scaling.PARAMETERS, ranks)
    latency = cost.seconds(ranks) - cost.sent / scaling.BANDWIDTH
    assert 0.18 < latency / cost.seconds(ranks) < 0.22  # "a fifth of the time"
    leaving = scaling.all_reduce(scaling.PARAMETERS * 2 / 8, ranks // 8)
    assert f"{leaving / 1e9:.1f}" == "3.5"
    assert f"{365 * 24 / ranks:.1f}" == "8.6"


def test_buckets_of_ddp(scaling: ModuleType) -> None:
    """The formula is what equal small tensors need, and never less than what others do."""
    sizes = [1_000_000] * 95 + [3_000_001] * 7 + [20_000_000]
    params = [torch.empty(size, device="meta") for size in sizes]
    count = len(plan(params, range(len(params)), 10_000_000, None))
    assert count <= scaling.ddp(sum(sizes), 2).messages
    equal = [torch.empty(1_000_000, device="meta") for _ in range(100)]
    assert len(plan(equal, range(100), 10_000_000, None)) == scaling.ddp(100_000_000, 2).messages == 12


@pytest.mark.parametrize(("ranks", "redundant"), [(2, 1), (8, 1), (64, 8), (1024, 1), (1024, 128)])
def test_shards_and_buckets_of_zero(scaling: ModuleType, ranks: int, redundant: int) -> None:
    sizes = [4096 * 4096] * 40 + [4096] * 40
    divided = ranks // redundant
    bucket = 100 * 2**20
    layout = Layout(sizes, divided, bucket // 2, 64)
    cost = scaling.zero(sum(sizes), ranks, redundant=redundant)
    assert cost.messages == len(layout.bucket_sizes) * (3 if redundant > 1 else 2)
    state = 14 * layout.shard_size
    assert cost.memory == pytest.approx(2 * sum(sizes) + state + 2 * bucket, rel=1e-3)


def test_rank_statistics_of_batch_norm(scaling: ModuleType) -> None:
    rank_stats = rank_statistics(torch.randn(4, 6, 2, 2), 1)
    assert rank_stats.dtype == torch.float32
    one = scaling.sync_batchnorm(1, 6, 2)
    assert one.memory == rank_stats.nbytes * 2
    assert one.sent == rank_stats.nbytes + rank_stats.nbytes  # to the other one, forward and backward


def test_pipelines_are_those_of_the_papers(scaling: ModuleType) -> None:
    """1F1B: (p - 1) of m + p - 1 passes, interleaved half of that idle time, ZB-H1 a third, ZB-V none."""
    ranks, microbatches = 8, 32
    for name, idle in (("1F1B", 21), ("interleaved", 10.5), ("ZB-H1", 7), ("ZB-V", 0)):
        expected = idle / (idle + 3 * microbatches)
        assert scaling.idle_share(name, ranks, microbatches) == pytest.approx(expected)
    assert [scaling.activations_held(name, ranks) for name in scaling.SCHEDULES] == [8.0, 11.5, 8.0, 8.0]


def test_sums_in_the_text_about_a_split_model(scaling: ModuleType) -> None:
    assert round(scaling.gpt_parameters() / 1e9) == 175
    split = scaling.Split.of(1024)
    assert (split.tensor, split.pipeline, split.replicas, split.microbatches) == (8, 16, 8, 192)
    by_layers = scaling.tensor_parallel_bytes(split)
    assert round(by_layers / scaling.BANDWIDTH) == 10
    assert scaling.tensor_parallel_bytes(split, sequence_parallel=False) == pytest.approx(0.8 * by_layers)
    assert by_layers / scaling.pipeline_bytes(split) > 200
