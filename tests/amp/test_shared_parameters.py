"""Parameters of several optimizers, of several groups, and of groups that are added."""

from typing import Any

import pytest
import torch
from torch import nn

from apex import amp
from tests.amp.common import assert_same, batch, loss_of, quiet, small_model, train, values

levels = pytest.mark.parametrize("level", ["O1", "O2", "O3"])
SCALED: dict[str, Any] = {"loss_scale": 64.0}


def sgd(params: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


@pytest.mark.parametrize("later", [False, True])
@levels
def test_two_optimizers_of_one_layer(level: str, later: bool) -> None:
    """One `scale_loss` for both unscales the gradients of the layer once; both steps change the layer."""
    found = []
    for under_amp in (True, False):
        model = small_model()
        optimizers = [sgd(model.parameters()), sgd([model[1].bias] if later else model[3].parameters())]
        if under_amp:
            model, optimizers = quiet(model, optimizers, opt_level=level, **SCALED)
        if later:
            optimizers[1].add_param_group({"params": model[3].parameters()})
        for step in range(4):
            loss = loss_of(model, step)
            if under_amp:
                with amp.scale_loss(loss, optimizers) as scaled:
                    scaled.backward()
            else:
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        found.append([param.detach().float() for param in model.parameters()])
    torch.testing.assert_close(*found, atol=5e-3, rtol=5e-3)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@levels
def test_a_parameter_twice_in_a_group(level: str) -> None:
    """PyTorch updates it twice, with the same gradient."""
    found = []
    for under_amp in (True, False):
        model = small_model()
        optimizer = torch.optim.SGD([model[3].weight, model[3].weight, model[3].bias], lr=0.05)
        if under_amp:
            model, optimizer = quiet(model, optimizer, opt_level=level, **SCALED)
            train(model, optimizer, 3)
        else:
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
        found.append([param.detach().float() for param in model[3].parameters()])
    torch.testing.assert_close(*found, atol=5e-3, rtol=5e-3)


@levels
def test_groups_that_cannot_be_added(level: str) -> None:
    def run(refused: bool) -> list[torch.Tensor]:
        model, other = small_model(), small_model(1)
        (model, other), optimizer = quiet([model, other], sgd(model.parameters()), opt_level=level, **SCALED)
        groups: list[tuple[type[Exception], list[Any]]] = [
            (ValueError, [model[0].weight]),
            (ValueError, [other[0].weight, model[3].bias]),
            (ValueError, [other[0].weight, other[0].weight]),
            (ValueError, [other[0].weight * 2]),
            (TypeError, [other[0].weight, 3]),
        ]
        for kind, params in groups if refused else ():
            with pytest.raises(kind, match=r"more than one parameter group|non-leaf|can only optimize Tensors"):
                optimizer.add_param_group({"params": params})
            assert len(optimizer.param_groups) == 1
        train(model, optimizer, 2)
        return values([*model.parameters(), *amp.master_params(optimizer)])

    assert_same(run(True), run(False))


@levels
def test_gradients_from_before_a_group_is_added_are_dropped(level: str) -> None:
    """`scale_loss` did not know the parameters, so that their gradients are scaled."""
    model, head = small_model(), nn.Linear(4, 4)
    (model, head), optimizer = quiet([model, head], sgd(model.parameters()), opt_level=level, **SCALED)
    with amp.scale_loss(head(model(batch(0)[0])).square().mean(), optimizer) as scaled:
        scaled.backward()
    before = values(head.parameters())
    optimizer.add_param_group({"params": head.parameters()})
    optimizer.step()
    assert_same(before, values(head.parameters()))


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_loading_with_assign_is_refused(level: str) -> None:
    model = small_model()
    model, optimizer = quiet(model, sgd(model.parameters()), opt_level=level)
    with pytest.raises(RuntimeError, match=r"load_state_dict\(assign=True\) would replace the half-precision param"):
        model.load_state_dict(small_model(1).state_dict(), assign=True)
    train(model, optimizer, 2)
