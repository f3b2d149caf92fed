"""Small functions with Colossal-AI's names."""

from __future__ import annotations

import contextlib

import pytest
import torch

from apex.utils import MultiTimer, Timer, conditional_context, set_seed


def test_conditional_context() -> None:
    with conditional_context(torch.no_grad(), enable=True):
        assert not torch.is_grad_enabled()
    with conditional_context(torch.no_grad(), enable=False):
        assert torch.is_grad_enabled()
    assert isinstance(conditional_context(None, False), contextlib.nullcontext)


def test_set_seed() -> None:
    set_seed(4)
    drawn = torch.rand(2)
    set_seed(4)
    assert torch.equal(torch.rand(2), drawn)


def test_timers_keep_what_they_are_asked_to() -> None:
    timer = Timer()
    with pytest.raises(AssertionError, match="measured nothing"):
        timer.get_elapsed_time()
    timer.start()
    measured = [timer.stop(keep_in_history=True) for _ in range(2)]
    assert 0 < measured[0] <= measured[1] <= timer.lap()
    assert timer.get_history_sum() == pytest.approx(sum(measured))
    assert timer.get_history_mean() == pytest.approx(sum(measured) / 2)
    timer.reset()
    assert not timer.has_history
    timers = MultiTimer()
    timers.start("step")
    assert timers.stop("step", keep_in_history=True) == timers.get_timer("step").get_elapsed_time()
    assert [name for name, _ in timers] == ["step"]
    timers.reset()
    timers.set_status(False)
    timers.start("other")
    assert timers.stop("other", keep_in_history=False) is None
