"""Optimizers with a loss scale: gradients that were not scaled, steps that are skipped, autocast that ends."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex import Booster, amp
from apex.booster.mixed_precision import (
    BF16MixedPrecision,
    FP8MixedPrecision,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
)
from apex.optimizers import FusedAdam

from .problem import adam, batch, net, train
from .problem import booster as make

SCALED = {"fp16": "fp16", "fp16_naive": FP16NaiveMixedPrecision(hysteresis=1)}


@pytest.fixture(autouse=True)
def no_amp() -> Iterator[None]:
    yield
    amp.shutdown()


def boosted(precision: Any) -> tuple[Any, tuple[Any, ...]]:
    booster, model = make(precision), net()
    return booster, booster.boost(model, adam(model), nn.CrossEntropyLoss())


def loss_of(parts: tuple[Any, ...], step: int = 0) -> Tensor:
    inputs, targets = batch(step)
    return parts[2](parts[0](inputs), targets)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("call", ["step", "clip_grad_by_norm", "unscale_grad"])
def test_gradients_of_a_plain_backward_pass_are_refused(name: str, call: str) -> None:
    booster, parts = boosted(SCALED[name])
    model, optimizer = parts[:2]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    loss_of(parts).backward()
    gradients = [param.grad.clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match=r"loss scale, 65536.0: call booster.backward\(loss, optimizer\)"):
        getattr(optimizer, call)(*([1.0] if call.startswith("clip") else []))
    assert all(torch.equal(param.grad, kept) for param, kept in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    optimizer.zero_grad()
    booster.backward(loss_of(parts), optimizer)
    optimizer.step()
    assert not torch.equal(model.state_dict()["last.weight"], before["last.weight"])
    if name == "fp16":  # the gradients still exist, unscaled
        with pytest.raises(RuntimeError, match="do not come from a scaled loss"):
            optimizer.step()


@pytest.mark.parametrize("name", SCALED)
def test_scaled_losses_and_gradients_are_taken_however_they_come(name: str) -> None:
    _, parts = boosted(SCALED[name])
    optimizer = parts[1]
    optimizer.step()  # without gradients there is nothing to refuse
    optimizer.scale_loss(loss_of(parts)).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = loss_of(parts)
    optimizer.backward_by_grad(loss, torch.full_like(loss, 2.0**16))
    optimizer.step()
    assert optimizer.get_grad_norm() is not None


@pytest.mark.parametrize("name", SCALED)
def test_skipped_steps_are_told_with_the_names_of_parameters(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    booster, parts = boosted(SCALED[name])
    model, optimizer = parts[:2]
    booster.backward(loss_of(parts), optimizer)
    optimizer.step()
    assert capsys.readouterr().out == ""
    for skipped in range(1, 5):
        optimizer.zero_grad()
        booster.backward(loss_of(parts), optimizer)
        model.unwrap().last.bias.grad[:2] = torch.tensor([torch.inf, torch.nan])
        model.unwrap().blocks[1].bias.grad[:] = -torch.inf
        if skipped == 2:
            optimizer.clip_grad_by_norm(1.0)  # by a norm that is not a number
        optimizer.step()
        lines = capsys.readouterr().out.splitlines()
        scale = 2.0 ** (16 - skipped)
        assert lines[0] == f"Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {scale}"
        assert lines[1] == "  2 of 10 gradients are not finite: blocks.1.bias (32 inf), last.bias (1 inf, 1 nan)"
        assert len(lines) == (3 if skipped == 4 else 2)
    assert "4 steps in a row were skipped" in lines[2]
    assert 'use Booster(mixed_precision="bf16")' in lines[2]


@pytest.mark.parametrize("name", SCALED)
def test_steps_that_can_only_be_skipped_are_an_error(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error comes after as many steps at the smallest scale as amp allows; training can continue after it."""
    booster, parts = boosted(SCALED[name])
    optimizer = parts[1]
    assert optimizer.overflow_patience == 100
    optimizer.overflow_patience = 3
    before = {key: value.clone() for key, value in parts[0].state_dict().items()}

    def skip() -> None:
        optimizer.zero_grad()
        booster.backward(loss_of(parts) * torch.nan, optimizer)
        optimizer.step()

    for _ in range(16 + 2 - 1):  # to 1, and twice more at or below it
        skip()
    with pytest.raises(FloatingPointError, match=r"in 3 steps in a row with loss scale .*optimizer.overflow_patience"):
        skip()
    assert optimizer.scaler.get_scale() > 0
    assert all(torch.equal(value, before[key]) for key, value in parts[0].state_dict().items())
    optimizer.zero_grad()
    booster.backward(loss_of(parts), optimizer)
    optimizer.step()
    assert any(not torch.equal(value, before[key]) for key, value in parts[0].state_dict().items())


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_autocast_of_fp16_apex_ends_with_the_boosted_model(level: str) -> None:
    plain = net()
    expected = plain(batch(0)[0])
    booster, parts = boosted(FP16ApexMixedPrecision(level, verbosity=0))
    half, seen = torch.float16 if level == "O1" else torch.bfloat16, []
    parts[0].unwrap().last.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    for _ in range(2):
        assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_cache_enabled()
        # Not by bits: some Arm processors leave oneDNN after their first bfloat16 product.
        torch.testing.assert_close(plain(batch(0)[0]), expected)
        assert parts[0](batch(0)[0]).dtype == torch.float32  # of half-precision products
        assert seen[-1] == half
        train(booster, parts, range(1))
    with torch.no_grad():
        assert parts[2](parts[0](batch(0)[0]), batch(0)[1]).dtype == torch.float32
    other = make()
    train(other, other.boost(plain, adam(plain), nn.CrossEntropyLoss()), range(1))
    assert plain(batch(0)[0]).dtype == torch.float32


def test_autocast_of_fp16_apex_ends_without_an_optimizer() -> None:
    precision = FP16ApexMixedPrecision("O1", verbosity=0, cast_model_outputs=torch.float16)
    model, optimizer, *_ = make(precision).boost(net())
    assert optimizer is None
    assert not torch.is_autocast_enabled("cpu")
    assert model(batch(0)[0]).dtype == torch.float16


@pytest.mark.parametrize("name", SCALED)
def test_an_optimizer_that_nobody_uses_is_gone_at_once(name: str) -> None:
    _, parts = boosted(SCALED[name])
    optimizer = weakref.ref(parts[1])
    model = parts[0]
    del parts
    assert optimizer() is model.optimizer is None


def test_fp8_without_a_float8_layer_is_told() -> None:
    message = r"trains in bfloat16: 3 of 4: fewer than 2,097,152 weights.*; 1 of 4: a size is no multiple of 16"
    with pytest.warns(UserWarning, match=message) as warned:
        make("fp8").boost(net())
    assert warned[0].filename == __file__
    with pytest.warns(UserWarning, match="trains in bfloat16: it has no linear layer"):
        make("fp8").boost(nn.Sequential(nn.Conv1d(2, 2, 1)))


def test_fp8_with_a_float8_layer_is_silent(recwarn: pytest.WarningsRecorder) -> None:
    make(FP8MixedPrecision(smallest_weight=0)).boost(net())
    assert not [each for each in recwarn if "fp8" in str(each.message)]


@pytest.mark.parametrize("name", ["fp16", "fp16_naive", "fp16_apex"])
def test_skipped_steps_name_the_module_where_they_begin(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    booster = Booster("cpu", name, trace_overflow=True)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        booster.backward(model(torch.ones(3, 6)).float().square().mean() * factor, optimizer)
        optimizer.step()
    printed = capsys.readouterr().out
    assert "first in the backward pass: the gradient of the output of 2 (Linear)" in printed


def test_overflows_are_traced_for_a_step_after_three_skipped_ones(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(6, 4)
    booster = Booster("cpu", "fp16", trace_overflow="auto")
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(5):
        optimizer.zero_grad()
        booster.backward(model(torch.ones(3, 6)).float().mean() * float("inf"), optimizer)
        optimizer.step()
        assert ("of (model) (Linear)" in capsys.readouterr().out) is (number == 3)


def test_overflow_traces_that_make_no_sense_are_refused_or_told() -> None:
    with pytest.raises(ValueError, match=r"trace_overflow must be True, False or 'auto', not 'always'"):
        Booster("cpu", "fp16", trace_overflow="always")
    with pytest.raises(ValueError, match=r"trace_overflow=True does not go with compile='auto'"):
        Booster("cpu", "fp16", trace_overflow=True, compile="auto")
    model = nn.Linear(6, 4)
    with pytest.warns(UserWarning, match=r"trace_overflow=True has no effect: .*needs a loss scale"):
        Booster("cpu", "bf16", trace_overflow=True).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_float32_parameters_become_the_masters() -> None:
    """Their memory is not freed among the smaller bfloat16 parameters, where it could not be released."""
    model = net()
    before = {name: (param.detach(), param.detach().clone()) for name, param in model.named_parameters()}
    optimizer = FusedAdam(model.parameters(), lr=0.01, master_weights=True)
    _, boosted_optimizer, *_ = make(BF16MixedPrecision("O5")).boost(model, optimizer)
    state = boosted_optimizer.unwrap().state
    for name, param in model.named_parameters():
        given, value = before[name]
        if param.dtype == torch.bfloat16:
            assert state[param]["master_param"].data_ptr() == given.data_ptr()
            assert torch.equal(state[param]["master_param"], value)
            assert torch.equal(param, value.bfloat16())
    assert any(param.dtype == torch.bfloat16 for param in model.parameters())


def test_masters_of_added_parameters_are_copies() -> None:
    model, added = net(), nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
    optimizer = FusedAdam(model.parameters(), lr=0.01, master_weights=True)
    _, boosted_optimizer, *_ = make(BF16MixedPrecision("O5")).boost(model, optimizer)
    boosted_optimizer.add_param_group({"params": [added]})
    master = boosted_optimizer.unwrap().state[added]["master_param"]
    assert master.dtype == torch.float32
    assert torch.equal(master, added.float())
