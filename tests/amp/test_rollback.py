"""An `initialize` that fails half-way: models, optimizers and the session are as they were before it."""

from typing import Any

import pytest
import torch
from torch import nn

from apex import amp
from apex.amp._amp_state import _amp_state as state
from apex.optimizers import FusedAdam
from tests.amp.common import LEVELS, assert_same, quiet, small_model, train, values
from tests.amp.test_shutdown import picture


class Stubborn(nn.LSTM):
    """A module that breaks while it is cast."""

    def flatten_parameters(self) -> None:
        if self.weight_ih_l0.dtype != torch.float32:
            raise RuntimeError("not me")


class Breaks(torch.optim.SGD):
    """An optimizer whose groups cannot be changed, found out when all models are cast."""

    def __getattribute__(self, name: str) -> Any:
        if name == "add_param_group" and vars(self).get("armed"):
            raise RuntimeError("not me")
        return super().__getattribute__(name)


def armed(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = Breaks(model.parameters(), lr=0.1)
    vars(optimizer)["armed"] = True
    return optimizer


def with_gradients(model: nn.Module) -> nn.Module:
    for param in model.parameters():
        param.grad = torch.rand_like(param)
    return model


def tensors(model: nn.Module) -> list[Any]:
    return values([*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)])


@pytest.mark.parametrize("level", LEVELS)
def test_the_first_initialize(level: str) -> None:
    first, second = with_gradients(small_model()), small_model(seed=1)
    optimizer = FusedAdam(first.parameters(), lr=0.01)
    hook = first.register_state_dict_post_hook(lambda *_: None)
    before = picture(first, optimizer), tensors(first), [id(p) for p in first.parameters()], dict(vars(state))
    with pytest.raises(RuntimeError, match="not me"):
        quiet([first, second], [optimizer, armed(second)], opt_level=level)
    after = picture(first, optimizer), tensors(first), [id(p) for p in first.parameters()], dict(vars(state))
    assert before[0] == after[0]
    assert_same(before[1], after[1])
    assert before[2:] == after[2:]
    hook.remove()
    assert not first._state_dict_hooks
    train(*quiet(first, optimizer, opt_level=level), 1)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_module_that_cannot_be_cast(level: str) -> None:
    first, second = with_gradients(small_model()), Stubborn(2, 2)
    before = tensors(first)
    with pytest.raises(RuntimeError, match="not me"):
        quiet([first, second], FusedAdam(first.parameters()), opt_level=level)
    assert_same(before, tensors(first))
    assert {p.dtype for p in second.parameters()} == {torch.float32}


@pytest.mark.parametrize("first", ["O1", "O2", "O3"])
@pytest.mark.parametrize("second", ["O1", "O2", "O5"])
def test_a_second_initialize(first: str, second: str) -> None:
    """The first session continues bit for bit."""
    runs = []
    for fails in (False, True):
        model = small_model()
        model, optimizer = quiet(model, FusedAdam(model.parameters(), lr=0.01), opt_level=first)
        losses = train(model, optimizer, 2)
        if fails:
            other = small_model(seed=1)
            with pytest.raises(RuntimeError, match="not me"):
                quiet([model, other], [optimizer, armed(other)], opt_level=second, num_losses=3)
            assert state.opt_properties.opt_level == first
        losses += train(model, optimizer, 2)
        amp.shutdown()
        runs.append((losses, values(model.parameters())))
    assert runs[0][0] == runs[1][0]
    assert_same(runs[0][1], runs[1][1])


def test_functions_that_users_registered() -> None:
    einsum = torch.einsum
    amp.register_half_function(torch, "einsum")
    amp.register_float_function(int, "bit_length")  # a built-in type cannot be changed
    registered = list(amp._registered)
    with pytest.raises(TypeError, match="immutable"):
        quiet(small_model(), opt_level="O1")
    assert torch.einsum is einsum
    assert amp._registered == registered
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    amp._registered.pop()
    quiet(small_model(), opt_level="O1")
    assert torch.einsum is not einsum


def test_attributes_that_are_called_like_hooks_but_are_none() -> None:
    model = small_model()
    model._require_grads_hooks = [object()]  # as transformers has it with gradient checkpointing
    amp.initialize(model, opt_level="O2", verbosity=0)
    amp.shutdown()
    assert len(model._require_grads_hooks) == 1
