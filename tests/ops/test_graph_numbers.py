"""Numbers that a graph reads anew: arithmetic, meetings with tensors, and decisions that become guards."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from apex.ops import _graph_numbers
from apex.ops._graph_numbers import CaptureContext, Number
from apex.optimizers import FusedAdam

HOST = torch.device("cpu")


class Box:
    """A number that may change, and its `Number`."""

    def __init__(self, value: float, captures: bool = True) -> None:
        self.value = value
        self.capture = CaptureContext(captures, HOST)
        self.number: Any = Number(self.capture, "box", value, lambda: self.value)


OPERATORS = [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow]


@pytest.mark.parametrize("combine", OPERATORS)
def test_arithmetic_is_that_of_numbers_and_is_done_again(combine: Callable[[Any, Any], Any]) -> None:
    box = Box(3.0)
    left, right, both = combine(box.number, 2.0), combine(2.0, box.number), combine(box.number, box.number)
    for value in (3.0, 5.0):
        box.value = value
        assert left.read() == combine(value, 2.0)
        assert right.read() == combine(2.0, value)
        assert both.read() == combine(value, value)
    assert (left.value, right.value) == (combine(3.0, 2.0), combine(2.0, 3.0))


@pytest.mark.parametrize("combine", OPERATORS)
def test_with_a_tensor_it_is_memory_that_uploads_write_to(combine: Callable[[Any, Any], Any]) -> None:
    box, tensor = Box(3.0), torch.tensor([2.0, 4.0], dtype=torch.float64)
    place = box.number.on(HOST)
    assert place.dtype == torch.float64
    box.capture.upload()
    assert torch.equal(combine(box.number, tensor), combine(3.0, tensor))
    assert torch.equal(combine(tensor, box.number), combine(tensor, 3.0))
    box.value = 5.0
    box.capture.upload()
    assert float(place) == 5.0
    assert torch.equal(combine(tensor, box.number), combine(tensor, 5.0))


def test_decisions_are_guarded() -> None:
    box = Box(3.0)
    assert box.number > 2.0
    assert box.number != 0
    assert bool(box.number)
    assert not (box.number < 1.0)
    assert box.number == box.number
    guards = box.capture.guards
    assert len(guards) == 5
    assert all(guard.now == guard.decision for guard in guards)
    box.value = 4.0
    assert all(guard.now == guard.decision for guard in guards)
    box.value = 0.0
    assert [guard.now == guard.decision for guard in guards] == [False, False, False, False, True]


def test_a_number_that_becomes_a_float_must_stay_the_same() -> None:
    box = Box(3.0)
    assert (float(box.number), int(box.number * 2)) == (3.0, 6)
    box.value = 3.25
    assert [guard.now == guard.decision for guard in box.capture.guards] == [False, True]
    compared = box.number > torch.tensor([1.0, 5.0])
    assert isinstance(compared, Tensor)


def test_a_rehearsal_has_the_values_at_once() -> None:
    box = Box(3.0, captures=False)
    assert float(box.number * torch.ones(())) == 3.0


def test_groups_have_numbers_in_place_of_numbers() -> None:
    optimizer = FusedAdam([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    capture = CaptureContext(True, HOST)
    group = capture.group(optimizer, 0)
    assert group["params"] is optimizer.param_groups[0]["params"]
    rate, (_, beta) = group["lr"], group["betas"]
    optimizer.param_groups[0].update(lr=0.25, betas=(0.1, 0.2))
    assert (rate.value, rate.read(), beta.read()) == (0.5, 0.25, 0.2)
    assert not capture.guards
    assert group["bias_correction"] is True  # no number, and so frozen
    followed = {name for _, _, name in capture.followed}
    assert {"lr", "betas", "eps"} <= followed
    assert "bias_correction" not in followed


def test_steps_are_counted_after_they_are_read() -> None:
    optimizer = FusedAdam([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    group = optimizer.param_groups[0]
    capture = CaptureContext(True, HOST)
    group["step"] = 7
    first = capture.counted(optimizer, 0)
    group["step"] = 8
    second = capture.counted(optimizer, 0)
    assert (first.value, second.value) == (7, 8)
    assert (first.read(), second.read()) == (9, 10)
    for action in capture.after:
        action()
    assert group["step"] == 10


def test_a_rehearsal_is_no_capture() -> None:
    assert _graph_numbers.capturing() is None
    with _graph_numbers.active(CaptureContext(False, HOST)):
        assert _graph_numbers.capturing() is None
        capture = CaptureContext(True, HOST)
        with _graph_numbers.active(capture):
            assert _graph_numbers.capturing() is capture
        assert _graph_numbers.capturing() is None


def test_memory_of_a_graph_is_apart_and_filled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = CaptureContext(True, HOST)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert capture.memory(1, torch.int32) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert CaptureContext(False, HOST).memory(1, torch.int32) is None
    number = Number(capture, "a number", 1.0, lambda: 5.0)
    place = number.on(HOST)
    tickets, table = capture.memory(5, torch.int32), capture.memory(3, torch.int64)
    assert (tickets.tolist(), table.tolist()) == ([0] * 5, [0] * 3)
    assert table.data_ptr() % 16 == 0
    filled = []
    capture.once.append(lambda: filled.append(table.copy_(torch.tensor([7, 8, 9]))))
    tickets.fill_(-1)
    for _ in range(2):
        capture.upload()
    assert (float(place), tickets.tolist(), table.tolist(), len(filled)) == (5.0, [-1] * 5, [7, 8, 9], 1)
    assert capture.memory(1 << 17, torch.float64) is None  # more than there is, and still some for those who ask less
    assert capture.memory(4, torch.float32) is not None
