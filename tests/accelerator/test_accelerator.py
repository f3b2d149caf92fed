"""The accelerator object on this machine's device."""

from __future__ import annotations

import pytest
import torch

from apex.accelerator import get_accelerator, set_accelerator
from apex.utils import get_current_device


def test_every_function_that_scripts_call_works_here() -> None:
    accelerator = get_accelerator()
    assert accelerator.is_available()
    assert accelerator.get_current_device() == get_current_device()
    assert accelerator.name == get_current_device().type
    assert accelerator.device_count() >= 1
    assert accelerator.current_device() >= 0
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        assert getattr(accelerator, name)() >= 0
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        getattr(accelerator, name)()
    layer = torch.nn.Linear(2, 2)
    assert accelerator.set_to_device([layer]) is layer
    assert layer.weight.device.type == accelerator.name
    accelerator.manual_seed(3)
    drawn = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(2), drawn)
    with accelerator.autocast(dtype=torch.bfloat16):
        assert torch.is_autocast_enabled(accelerator.name)
    assert accelerator.communication_backend in ("gloo", "nccl", "hccl", "xccl")


def test_counters_of_memory_are_zero_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    accelerator = get_accelerator()
    assert accelerator.name == "cpu"
    assert accelerator.is_synchronous
    assert accelerator.max_memory_allocated() == 0
    assert accelerator.get_rng_state().dtype == torch.uint8
    with pytest.raises(AttributeError, match="the device cpu has no function no_such"):
        _ = accelerator.no_such
    set_accelerator("cpu")
    with pytest.raises(ValueError, match="accelerator='cuda' is not the device of this process, which is 'cpu'"):
        set_accelerator("cuda")
