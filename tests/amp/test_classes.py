"""A model's class under amp does not change, so that registries and type checks work as before."""

import abc
import copy
import gc
import inspect
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from apex import amp
from tests.amp.common import HALF, LEVELS, quiet

levels = pytest.mark.parametrize("level", LEVELS)
registry: list[str] = []


class Registered(nn.Linear):
    """A class that registers its subclasses, which must give a name."""

    def __init_subclass__(cls, called: str) -> None:
        registry.append(called)


class Named(Registered, called="named"):
    pass


class Meta(abc.ABCMeta):
    """Notes classes as they are made."""

    def __new__(mcs, name: str, bases: tuple, namespace: dict) -> Any:
        registry.append(name)
        return super().__new__(mcs, name, bases, namespace)


class Noted(nn.Linear, metaclass=Meta):
    pass


class Final(nn.Linear):
    def __init_subclass__(cls) -> None:
        raise TypeError("nobody derives from this class")


@levels
@pytest.mark.parametrize("kind", [Named, Noted, Final])
def test_the_class_is_left_alone(kind: Any, level: str) -> None:
    before = list(registry), kind.__subclasses__(), kind.forward
    model = quiet(kind(2, 2), opt_level=level)
    copies = [copy.deepcopy(model), model._replicate_for_data_parallel()]
    assert model(torch.ones(1, 2)).dtype == (HALF[level] if level in ("O1", "O4") else torch.float32)
    assert type(model) is model.__class__ is kind
    assert [type(each) for each in copies] == [kind, kind]
    amp.shutdown()
    assert (list(registry), kind.__subclasses__(), kind.forward) == before
    assert not {"forward", "_replicate_for_data_parallel"} & vars(model).keys()


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_class_that_changes_while_amp_is_on(level: str) -> None:
    """Lazy modules change theirs in the first forward pass, parametrizations at any time."""

    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    model = quiet(nn.LazyLinear(3), opt_level=level)
    assert model(torch.ones(1, 2)).dtype == model(torch.ones(1, 2)).dtype == HALF[level]
    assert type(model) is nn.Linear
    before = model(torch.ones(1, 2)) - model.bias
    parametrize.register_parametrization(model, "weight", Doubled())
    changed = type(model)
    torch.testing.assert_close(model(torch.ones(1, 2)) - model.bias, 2 * before, rtol=1e-2, atol=1e-2)
    amp.shutdown()
    assert type(model) is changed
    assert model(torch.ones(1, 2)).dtype == torch.float32


def test_a_forward_pass_that_was_wrapped_since() -> None:
    """Check that shutdown keeps the user's wrapper, and that the wrapped forward no longer casts."""
    model = quiet(nn.Linear(2, 2), opt_level="O2")
    inner = model.forward
    model.forward = lambda x: inner(x) + 1
    amp.shutdown()
    model.bias.data.zero_()
    x = torch.ones(1, 2)
    assert torch.equal(model(x), nn.functional.linear(x, model.weight) + 1)


def test_the_forward_pass_knows_its_signature_and_keeps_no_model() -> None:
    model = quiet(nn.Linear(2, 2), opt_level="O2")
    assert inspect.signature(model.forward) == inspect.signature(nn.Linear(2, 2).forward)
    assert model.forward.__name__ == "forward"
    gc.disable()
    try:
        forward, gone = model.forward, weakref.ref(model)
        del model
        assert gone() is None
    finally:
        gc.enable()
    with pytest.raises(ReferenceError, match="keep the model"):
        forward(torch.ones(1, 2))
