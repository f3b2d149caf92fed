"""Boosted models and optimizers have the same names, state dicts and norms in every precision."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex import amp
from apex.booster import ModelWrapper
from apex.booster.mixed_precision import BF16MixedPrecision, FP16ApexMixedPrecision
from apex.optimizers import FusedAdam

from .problem import OPTIMIZERS, adam, assert_equal, batch, net, train
from .problem import booster as make

# By name: precisions, as the Booster takes them.
PRECISIONS: dict[str, Any] = {
    "fp32": None,
    "fp16": "fp16",
    "fp16_apex O1": FP16ApexMixedPrecision("O1", verbosity=0),
    "fp16_apex O2": FP16ApexMixedPrecision("O2", verbosity=0),
    "bf16": "bf16",
    "bf16 O5": BF16MixedPrecision("O5"),
    "fp8": "fp8",
    "fp16_naive": "fp16_naive",
}
pytestmark = pytest.mark.filterwarnings("ignore:fp8. no layer of the model")


@pytest.fixture(autouse=True)
def no_amp() -> Iterator[None]:
    yield
    amp.shutdown()


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_boosted_model_is_a_wrapper_with_the_names_of_the_user_s(name: str) -> None:
    inner = net()
    keys, parameters = list(inner.state_dict()), [key for key, _ in inner.named_parameters()]
    inner.register_buffer("counts", torch.zeros(2))
    model, optimizer, *_ = make(PRECISIONS[name]).boost(inner, adam(inner))
    assert isinstance(model, ModelWrapper)
    assert model.unwrap() is inner
    assert model.optimizer is optimizer
    assert list(model.state_dict()) == ["counts", *keys]
    assert [key for key, _ in model.named_parameters()] == parameters
    assert [key for key, _ in model.named_buffers()] == ["counts"]
    assert list(map(id, model.parameters())) == list(map(id, inner.parameters()))
    assert {model.state_dict()[key].dtype for key in parameters} == {torch.float32}


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_state_dict_loads_into_every_precision(name: str) -> None:
    """The next step starts from the loaded weights, because masters have their exact values."""
    inner = net()
    model, optimizer, *_ = make().boost(inner, adam(inner))
    train(make(), (model, optimizer, nn.CrossEntropyLoss()))
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    other = net(seed=1)
    booster = make(PRECISIONS[name])
    loaded, optimizer, criterion, *_ = booster.boost(
        other, torch.optim.SGD(other.parameters(), lr=0.0), nn.CrossEntropyLoss()
    )
    train(booster, (loaded, optimizer, criterion), range(1))
    loaded.load_state_dict(saved)
    train(booster, (loaded, optimizer, criterion), range(1))
    assert_equal(dict(loaded.state_dict()), saved)
    with pytest.raises(
        RuntimeError, match=r"Error\(s\) in loading state_dict for Net:\s+Missing key.*\"first.weight\""
    ):
        loaded.load_state_dict({key: value for key, value in saved.items() if key != "first.weight"})


def test_a_wrapper_is_saved_and_loaded_as_a_part_of_another_module() -> None:
    inner, other = net(), net(seed=1)
    whole = nn.ModuleDict({"a": make("fp16_naive").boost(inner, adam(inner))[0], "b": nn.Linear(2, 2)})
    names = {f"a.{name}" for name in inner.state_dict()} | {"b.weight", "b.bias"}
    assert set(whole.state_dict()) == names
    loaded = nn.ModuleDict({"a": make("fp16_naive").boost(other, adam(other))[0], "b": nn.Linear(2, 2)})
    loaded.load_state_dict(whole.state_dict())
    assert_equal(dict(loaded.state_dict()), dict(whole.state_dict()))
    assert all(map(torch.equal, inner.parameters(), other.parameters()))


def test_a_boosted_model_is_pickled_without_its_optimizer() -> None:
    inner = net()
    model, optimizer, *_ = make().boost(inner, adam(inner))
    copy = pickle.loads(pickle.dumps(model))
    assert optimizer is model.optimizer
    assert copy.optimizer is None
    assert_equal(dict(copy.state_dict()), dict(model.state_dict()))


def norms_of(precision: Any, order: str, steps: int = 3) -> tuple[list[float | None], dict[str, Tensor], list[float]]:
    """Return the norms of `get_grad_norm`, the final weights, and the norms of `clip_grad_by_norm`."""
    booster, inner = make(precision), net()
    model, optimizer, criterion, *_ = booster.boost(inner, OPTIMIZERS["sgd"](inner), nn.CrossEntropyLoss())
    found: list[float | None] = []
    clipped: list[float] = []
    for step in range(steps):
        inputs, targets = batch(step)
        booster.backward(criterion(model(inputs), targets), optimizer)
        if order == "before":
            found.append(optimizer.get_grad_norm())
        if order == "clips":
            clipped.append(optimizer.clip_grad_by_norm(0.1).item())
        optimizer.step()
        if order in ("after", "clips"):
            found.append(optimizer.get_grad_norm())
        optimizer.zero_grad()
        if order == "last":
            found.append(optimizer.get_grad_norm())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    amp.shutdown()
    return found, weights, clipped


@pytest.mark.parametrize("name", PRECISIONS)
def test_get_grad_norm_is_that_of_the_last_step_and_changes_nothing(name: str) -> None:
    expected, _, _ = norms_of(None, "after")
    after, weights, _ = norms_of(PRECISIONS[name], "after")
    assert after == pytest.approx(expected, rel=0.03)  # gradients of bfloat16 products have errors of 2^-8
    last, weights_of_last, _ = norms_of(PRECISIONS[name], "last")
    before, weights_of_before, _ = norms_of(PRECISIONS[name], "before")
    _, weights_without, _ = norms_of(PRECISIONS[name], "never")
    assert last == after
    assert before == [None, *after[:2]]
    for found in (weights, weights_of_last, weights_of_before):
        assert_equal(found, weights_without)
    clips, _, returned = norms_of(PRECISIONS[name], "clips")
    assert clips == returned
    assert clips[0] == after[0]


def test_other_norms_are_not_kept() -> None:
    inner = net()
    _, optimizer, *_ = make().boost(inner, adam(inner))
    with pytest.raises(ValueError, match="norm_type=inf is not kept from step to step; 2 is"):
        optimizer.get_grad_norm(torch.inf)


def test_norms_of_gradients_that_stay_scaled_until_the_step() -> None:
    """A fused optimizer made with materialize_master_grads=False has no gradients on its masters."""
    moved = []
    for clips in (False, True):
        inner = net()
        booster = make(FP16ApexMixedPrecision("O2", verbosity=0))
        optimizer: Any = FusedAdam(inner.parameters(), lr=1.0, eps=1e3, materialize_master_grads=False)
        model, optimizer, criterion, *_ = booster.boost(inner, optimizer, nn.CrossEntropyLoss())
        before = {name: value.clone() for name, value in model.state_dict().items()}
        inputs, targets = batch(0)
        booster.backward(criterion(model(inputs), targets), optimizer)
        if clips:
            optimizer.clip_grad_by_norm(0.1)
        optimizer.step()
        assert optimizer.get_grad_norm() == pytest.approx(norms_of(None, "after", 1)[0][0], rel=0.01)
        state = model.state_dict()
        moved.append(sum(float((state[name] - value).square().sum()) for name, value in before.items()) ** 0.5)
        norm = optimizer.get_grad_norm()
        amp.shutdown()
    # With such an eps a step is as long as its gradients are.
    assert moved[1] / moved[0] == pytest.approx(0.1 / norm, rel=0.01)


def test_sparse_gradients_and_closures_have_norms() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    model, optimizer, *_ = make().boost(embedding, torch.optim.SGD(embedding.parameters(), lr=0.1))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.tensor([1, 1, 2])).sum()
        optimizer.backward(loss)
        return loss

    optimizer.step(closure)
    assert optimizer.get_grad_norm() == pytest.approx((2 * 2.0**2 + 2 * 1.0**2) ** 0.5)
    optimizer.max_norm = 0.1
    before = embedding.weight.detach().clone()
    optimizer.step(closure)
    assert (embedding.weight.detach() - before).norm().item() == pytest.approx(0.1 * 0.1, rel=1e-4)
