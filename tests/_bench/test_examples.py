"""Benchmark cases and random cases made of the examples of ops."""

from __future__ import annotations

import pytest
import torch

from apex._bench import examples
from apex._bench.check import worst_excess
from apex.ops._examples import Example, all_examples, by_name

CPU = torch.device("cpu")
LISTED = {name: example for name, example in by_name() if example.listed}


@pytest.mark.parametrize("example", LISTED.values(), ids=LISTED)
def test_ours_and_the_peer_give_what_is_expected(example: Example) -> None:
    for way in {way: None for row in example.listed for way in row.ways}:
        prepared = examples.prepare(example, example.small[0], torch.float32, way, CPU)
        assert list(prepared.implementations) == ["ours", "torch", *example.peers]
        for make in prepared.implementations.values():
            assert worst_excess(make()(), prepared.expected) <= 1


def test_a_quick_run_has_one_row_of_passes_and_one_of_steps() -> None:
    cases = examples.families()["glu"].cases(torch.device("cuda"), True)
    assert [case.name for case in cases if "bias_swiglu" in case.name] == [
        "bias_swiglu bf16 16384x22016 fwd",
        "bias_swiglu bf16 16384x22016 bwd",
        "bias_swiglu bf16 128x2048 step",
    ]
    assert [case.timing for case in cases][:3] == ["device", "device", "wall"]
    assert len(cases) == 7


def test_every_family_with_draws_has_sweeps() -> None:
    drawing = {name for name, found in all_examples().items() if any(example.draw for example in found)}
    assert set(examples.sweeps()) == drawing
