"""The recorded times of NVIDIA apex appear where device and case match, and nowhere else."""

from __future__ import annotations

import json

import pytest
import torch

from apex._bench import selection
from apex._bench.environment import device_stem
from apex._bench.recorded import DIRECTORIES, recorded_measurements


@pytest.fixture
def directory(tmp_path):
    rows = [
        {"case": "a fwd", "impl": "apex", "ms": 0.25, "gbs": 1.0},
        {"case": "a fwd", "impl": "apex_fast", "ms": 0.125},
        {"case": "a fwd", "impl": "torch", "ms": 0.01, "gbs": 9.0},
        {"case": "b fwd", "impl": "apex", "err": "RuntimeError('no')"},
        {"case": "a fwd host", "impl": "apex", "ms": 0.5},
    ]
    (tmp_path / "nvidia_h200.json").write_text(json.dumps(rows))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "stem"),
    [("NVIDIA H200", "nvidia_h200"), ("AMD Instinct MI300X (OAM)", "amd_instinct_mi300x_oam"), ("cpu", "cpu")],
)
def test_device_stem(name, stem):
    assert device_stem(name) == stem


def test_only_nvidia_apex_is_taken(directory):
    found = recorded_measurements("nvidia_h200", (directory / "absent", directory))
    assert set(found["a fwd"]) == {"nvidia apex", "nvidia apex_fast"}
    assert found["a fwd"]["nvidia apex"].microseconds == 250
    assert found["a fwd"]["nvidia apex"].status == "recorded"


def test_the_time_of_the_host_belongs_to_its_case(directory):
    found = recorded_measurements("nvidia_h200", (directory,))
    assert set(found) == {"a fwd", "b fwd"}
    assert found["a fwd"]["nvidia apex"].host_microseconds == 500
    assert found["a fwd"]["nvidia apex_fast"].host_microseconds is None


def test_a_recorded_error_is_a_failure(directory):
    measurement = recorded_measurements("nvidia_h200", (directory,))["b fwd"]["nvidia apex"]
    assert (measurement.status, measurement.microseconds, measurement.error) == ("failed", None, "RuntimeError('no')")


def test_another_device_has_none(directory):
    assert recorded_measurements("nvidia_h100", (directory,)) == {}


@pytest.mark.skipif(not any(d.is_dir() for d in DIRECTORIES), reason="no recordings are installed")
def test_the_shipped_recording_is_found():
    assert "nvidia apex_fast" in recorded_measurements("nvidia_h200")["layer_norm bfloat16 16384x1024 fwd"]


@pytest.mark.skipif(not any(d.is_dir() for d in DIRECTORIES), reason="no recordings are installed")
def test_every_recorded_time_has_a_case():
    names = {case.name for _, case in selection.select([], torch.device("cuda"))}
    timed = {
        name
        for name, found in recorded_measurements("nvidia_h200").items()
        if any(m.microseconds for m in found.values())
    }
    assert len(timed) > 60
    assert timed <= names
