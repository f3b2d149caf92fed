"""Listing and choosing devices, on a pretended machine with GPUs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from apex._cli import devices
from apex._cli.devices import Device, list_devices, pick_device
from apex._cli.doctor import dispatch
from apex._cli.doctor.report import _device_facts
from apex.ops import _library


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the machine has one working GPU, and one that raises for every question."""

    def properties(index: int) -> SimpleNamespace:
        if index == 1:
            raise RuntimeError("the GPU has fallen off the bus")
        return SimpleNamespace(name="Fast GPU", total_memory=80 * 2**30, multi_processor_count=108)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))


@pytest.mark.usefixtures("two_gpus")
def test_gpus_are_listed_with_their_facts_or_their_problem() -> None:
    cpu, working, lost = list_devices()
    assert cpu.device == "cpu"
    assert working == Device("cuda:0", "Fast GPU", memory=80 * 2**30, multiprocessors=108)
    assert _device_facts(working) == "80.0 GiB, 108 multiprocessors"
    assert [_device_facts(Device("cpu", "CPU", threads=number)) for number in (1, 2)] == ["1 thread", "2 threads"]
    assert lost.device == "cuda:1"
    assert "fallen off the bus" in str(lost.problem)


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_is_the_default_and_one_that_does_not_work_cannot_be_picked() -> None:
    assert pick_device(None) == pick_device("cuda") == torch.device("cuda:0")
    assert pick_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="no device 'cuda:1'; available here: cpu, cuda:0"):
        pick_device("cuda:1")


def test_other_accelerators_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert [device.device for device in list_devices()] == ["cpu", "mps:0"]
    assert pick_device(None) == torch.device("mps:0")


def test_a_machine_without_gpus_takes_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "list_devices", lambda: [Device("cpu", "CPU", threads=2)])
    assert pick_device(None) == torch.device("cpu")


def test_a_cpu_that_cannot_run_triton_is_no_defect_beside_a_gpu_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def explain(family: _library.OpFamily, device: torch.device, dtype: torch.dtype) -> _library.Choice:
        if device.type == "cpu" or dtype == torch.float64:
            raise RuntimeError("APEX_IMPL=triton was asked for")
        return _library.Choice("triton", "APEX_IMPL=triton")

    family = _library.OpFamily("pretended", "", lambda device: 0.5)
    monkeypatch.setattr(dispatch, "all_families", lambda: {"pretended": family})
    monkeypatch.setattr(_library, "explain", explain)
    choices, checks, findings = dispatch.examine(["cpu", "cuda:0"])
    assert [choice.implementation for choice in choices] == [None] * 4 + ["triton"] * 3 + [None]
    assert [(check.device, check.error) for check in checks] == [("cuda:0", 0.5)]
    assert [(finding.severity, finding.subject) for finding in findings] == [("warning", "pretended on cpu")]
