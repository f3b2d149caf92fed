"""Families, the choice of cases and the norm cases themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from apex._bench import registry, selection
from apex._bench.cases import norm
from apex._bench.recorded import DIRECTORIES

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def names(device, **options):
    return [case.name for _, case in selection.select([], device, **options)]


def test_unknown_family_names_the_known_ones():
    with pytest.raises(selection.UnknownFamilyError, match=r"unknown benchmark family nrom; known: .*norm"):
        selection.select(["nrom"], CPU)


def test_a_family_is_registered_once():
    family = selection.known_families()["norm"]
    assert registry.register(family) is family
    with pytest.raises(ValueError, match="registered twice"):
        registry.register(registry.Family("norm", "", norm.cases))


def test_filter_keeps_names_with_every_word():
    chosen = names(CPU, words="RMS_norm bwd")
    assert chosen
    assert all("rms_norm" in name and "bwd" in name for name in chosen)
    assert names(CPU, words="no such case") == []


def test_quick_has_fewer_cases():
    for device in (CPU, GPU):
        assert 0 < len(names(device, quick=True)) < len(names(device))


def test_names_are_unique():
    for device in (CPU, GPU):
        assert len(set(names(device))) == len(names(device))


@pytest.mark.skipif(not DIRECTORIES[1].is_dir(), reason="not a source tree")
def test_gpu_norm_cases_cover_the_recorded_ones():
    rows = json.loads(Path(DIRECTORIES[1], "nvidia_h200.json").read_text())
    recorded = {row["case"] for row in rows if row["case"].startswith(("layer_norm", "rms_norm"))}
    assert len(recorded) == 32
    assert recorded <= set(names(GPU))


def test_bytes_moved():
    moved = {case.name: case.bytes_moved for _, case in selection.select(["norm"], GPU)}
    one = 16384 * 1024 * 2
    assert moved["layer_norm bfloat16 16384x1024 fwd"] == 2 * one
    assert moved["layer_norm bfloat16 16384x1024 bwd"] == 3 * one
    assert moved["layer_norm float32 128x1024 step"] == 5 * 128 * 1024 * 4
