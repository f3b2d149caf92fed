"""The attention cases: what they are called, and that every implementation computes what is expected of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from apex._bench import selection
from apex._bench.cases import attention
from apex._bench.check import mean_excess, worst_excess

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_names_and_bytes() -> None:
    moved = {case.name: case.bytes_moved for _, case in selection.select(["attention"], GPU)}
    one, bias = 256 * 4 * 256 * 32, 4 * 256 * 256
    assert moved["openfold bfloat16 256x4x256x32 fwd"] == 2 * (4 * one + bias)
    assert moved["openfold bfloat16 256x4x256x32 bwd"] == 2 * (8 * one + 2 * bias)
    assert moved["fmha float16 56x512x16x64 dropout 0.1 fwd"] == 2 * 4 * 56 * 512 * 16 * 64
    assert "fmha float16 56x64-512x16x64 bwd" in moved
    assert len(selection.select(["attention"], CPU, quick=True)) == 4


@pytest.mark.parametrize("setting", attention.CPU_SETTINGS, ids=str)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_implementations_agree(setting: attention.Setting, direction: str) -> None:
    if isinstance(setting, attention.Openfold):
        small = dataclasses.replace(setting, batch=2, length=12)
    else:
        small = dataclasses.replace(setting, sequences=2, shortest=min(setting.shortest, 12), length=12)
    prepared = attention._prepare(small, direction, CPU)
    assert set(prepared.implementations) >= {"ours", "sdpa"}
    for make in prepared.implementations.values():
        assert worst_excess(make()(), prepared.expected) <= 1


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_peer_of_half_precision_is_held_against_rounded_inputs(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = attention.Packed.implementations
    with_peer = lambda self, *where: {**known(self, *where), "varlen": lambda: self.exact}  # noqa: E731
    monkeypatch.setattr(attention.Packed, "implementations", with_peer)
    prepared = attention._prepare(attention.Packed(2, 12, 12, 2, 16, torch.float16), direction, CPU)
    result = prepared.implementations["varlen"]()()
    assert [tensor.dtype for tensor in result] == [torch.float16]
    assert mean_excess(result, prepared.expected_of["varlen"]) <= 1 < mean_excess(result, prepared.expected)
