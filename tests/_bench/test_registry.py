"""Families, the choice of cases, the names and the bytes of cases."""

from __future__ import annotations

import functools

import pytest
import torch

from apex._bench import registry, selection

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@functools.cache
def names(device, **options):
    return [case.name for _, case in selection.select([], device, **options)]


def test_unknown_family_names_the_known_ones():
    with pytest.raises(selection.UnknownFamilyError, match=r"unknown benchmark family nrom; known: .*norm"):
        selection.select(["nrom"], CPU)


def test_a_family_is_registered_once():
    family = selection.known_families()["optimizers"]
    assert registry.register(family) is family
    with pytest.raises(ValueError, match="registered twice"):
        registry.register(registry.Family("optimizers", "", family.cases))


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


def test_bytes_moved():
    moved = {case.name: case.bytes_moved for _, case in selection.select([], GPU)}
    one = 16384 * 1024 * 2
    assert moved["layer_norm bfloat16 16384x1024 fwd"] == 2 * one
    assert moved["layer_norm bfloat16 16384x1024 bwd"] == 3 * one
    assert moved["layer_norm float32 128x1024 step"] == 5 * 128 * 1024 * 4
    assert moved["bias_swiglu bf16 16384x22016 fwd"] == 3 * 16384 * 11008 * 2
    assert moved["bias_swiglu bf16 16384x22016 bwd"] == 5 * 16384 * 11008 * 2
    assert moved["index_mul_2d fp32 800000x256 fwd"] == 3 * 800000 * 256 * 4
    assert moved["index_mul_2d fp32 800000x256 of 100000 rows bwd"] == 2600000 * 256 * 4
    assert moved["focal_loss bfloat16 8x76725x80 bwd"] == 8 * 76725 * (2 * 160 + 8)
    tensor = 64 * 2048 * 2048 * 2
    assert moved["causal_softmax bf16 64x2048x2048 fwd"] == 1.5 * tensor
    assert moved["causal_softmax bf16 64x2048x2048 bwd"] == 2 * tensor
    assert moved["masked_softmax bf16 8x16x2048x2048 fwd"] == 2 * 2 * tensor + 8 * 2048 * 2048
