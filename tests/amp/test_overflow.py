"""Messages about skipped steps, and the error when the scale cannot be lowered any further."""

from typing import Any

import pytest
import torch
from torch import nn

from apex import amp
from apex.optimizers import FusedSGD
from tests.amp.common import loss_of, overflow_at, small_model, train

KINDS = pytest.mark.parametrize("kind", [torch.optim.SGD, FusedSGD], ids=["waits", "does not wait"])


def prepared(kind: Any = FusedSGD, level: str = "O2", **options: Any) -> tuple[nn.Module, Any]:
    model = small_model()
    model, optimizer = amp.initialize(model, kind(model.parameters(), lr=0.01), opt_level=level, **options)
    return model, optimizer


@KINDS
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("combine", [False, True])
def test_message_names_the_nonfinite_gradients(
    level: str, kind: Any, combine: bool, capsys: pytest.CaptureFixture
) -> None:
    model, optimizer = prepared(kind, level, combine_grad=combine)
    capsys.readouterr()
    with amp.scale_loss(loss_of(model, 0), optimizer) as scaled:
        scaled.backward()
        model[3].bias.grad[1] = float("nan")
        model[0].weight.grad[0, :2] = float("inf")
        model[1].weight.grad[0] = -float("inf")
    optimizer.step()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0"
    assert "3 of 5 gradients are not finite" in lines[1]
    for part in ("0.weight (2 inf)", "1.weight (1 inf)", "3.bias (1 nan)"):
        assert part in lines[1]


def test_models_are_told_apart(capsys: pytest.CaptureFixture) -> None:
    first, second = small_model(), small_model(1)
    optimizer = FusedSGD([*first.parameters(), *second.parameters()], lr=0.1)
    [first, second], optimizer = amp.initialize([first, second], optimizer, opt_level="O2")
    capsys.readouterr()
    with amp.scale_loss(loss_of(first, 0) + loss_of(second, 0), optimizer) as scaled:
        scaled.backward()
        second[3].bias.grad.fill_(float("inf"))
    assert "1 of 10 gradients are not finite: models[1].3.bias (4 inf)" in capsys.readouterr().out


def test_a_hint_after_several_in_a_row(capsys: pytest.CaptureFixture) -> None:
    model, optimizer = prepared()
    train(model, optimizer, 8, overflow_at(0, 1, 2, 4, 5, 6, 7))
    printed = capsys.readouterr().out
    assert printed.count("Skipping step") == 7
    assert printed.count("4 steps in a row were skipped") == 1
    assert "bfloat16" in printed


def test_nothing_is_said_without_overflow_or_verbosity(capsys: pytest.CaptureFixture) -> None:
    model, optimizer = prepared(verbosity=0)
    train(model, optimizer, 6, overflow_at(0, 1, 2, 3))
    assert capsys.readouterr().out == ""
    amp.shutdown()
    model, optimizer = prepared()
    capsys.readouterr()
    train(model, optimizer, 3)
    assert capsys.readouterr().out == ""


@KINDS
def test_a_scale_at_its_floor_gives_up(kind: Any) -> None:
    model, optimizer = prepared(
        kind, verbosity=0, min_loss_scale=2.0**14, overflow_patience=3, dynamic_init_scale=2.0**16
    )
    bad = overflow_at(*range(20))
    train(model, optimizer, 3, bad)  # down to the floor, and once more
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**14
    with pytest.raises(FloatingPointError, match=r"3 steps in a row with loss scale 16384\.0.*overflow_patience"):
        train(model, optimizer, 3, bad)
    # Patience starts anew for those who want to go on.
    train(model, optimizer, [7])


def test_a_scale_without_floor_gives_up_below_one() -> None:
    model, optimizer = prepared(verbosity=0, dynamic_init_scale=4.0, overflow_patience=2)
    train(model, optimizer, 2, overflow_at(0, 1))
    with pytest.raises(FloatingPointError, match="cannot be lowered"):
        train(model, optimizer, 2, overflow_at(0, 1))


def test_a_good_step_restores_patience() -> None:
    model, optimizer = prepared(verbosity=0, min_loss_scale=2.0**16, overflow_patience=2)
    for _ in range(4):
        train(model, optimizer, 2, overflow_at(0))


def test_overflow_of_one_of_several_losses_skips_the_step() -> None:
    """Use two losses with a scale each and one optimizer."""
    for kind in (torch.optim.SGD, FusedSGD):
        model, optimizer = prepared(kind, num_losses=2, verbosity=0)
        before = model[0].weight.detach().clone()
        for loss_id, factor in ((0, float("inf")), (1, 1.0)):
            with amp.scale_loss(loss_of(model, 0, factor), optimizer, loss_id) as scaled:
                scaled.backward()
        optimizer.step()
        assert torch.equal(before, model[0].weight)
        scales = [each["loss_scale"] for each in amp.state_dict().values()]
        assert scales == [2.0**15, 2.0**16]
        optimizer.zero_grad()
        train(model, optimizer, 1)
        assert not torch.equal(before, model[0].weight)
        amp.shutdown()


def test_delay_overflow_check() -> None:
    """The scale does not change and the step happens: the caller checks for overflow."""
    model, optimizer = prepared(verbosity=0)
    with amp.scale_loss(loss_of(model, 0, float("inf")), optimizer, delay_overflow_check=True) as scaled:
        scaled.backward()
    scaler = amp._amp_state.loss_scalers[0]
    assert scaler.loss_scale() == 2.0**16
    assert scaler._has_overflow
    assert scaler.update_scale() is True
    assert scaler.loss_scale() == 2.0**15


def test_an_error_in_backward_loses_no_gradient() -> None:
    model, optimizer = prepared(level="O1", verbosity=0)
    with amp.scale_loss(loss_of(model, 0), optimizer) as scaled:
        scaled.backward()
    before = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(ZeroDivisionError), amp.scale_loss(loss_of(model, 1), optimizer) as scaled:
        scaled.backward(torch.ones(()) * (1 // 0))
    for param, gradient in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.grad, gradient)
    assert torch.is_autocast_enabled("cpu")
    optimizer.step()
