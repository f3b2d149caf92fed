"""The Booster without processes: its arguments, its wrappers, and the traps of the original."""

from __future__ import annotations

import contextlib
import copy
import pickle
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import apex
from apex import amp
from apex.booster import Booster, ModelWrapper, OptimizerWrapper, plugin
from apex.booster._zero import zero_optimizer
from apex.booster.mixed_precision import BF16MixedPrecision, FP16ApexMixedPrecision
from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
from apex.nn.lr_scheduler import LinearWarmupLR
from apex.optimizers import (
    FusedAdam,
    FusedLion,
    FusedNAdam,
    FusedScheduleFreeAdamW,
    FusedSGD,
    OffloadedOptimizer,
)

from .problem import adam, batch, net, plain, train
from .problem import booster as make


@pytest.fixture(autouse=True)
def no_amp() -> Iterator[None]:
    yield
    amp.shutdown()


class Controlling(plugin.Plugin):
    """A plugin with a device and a precision of its own, in the original's manner."""

    def control_device(self) -> bool:
        return True

    def control_precision(self) -> bool:
        return True

    def configure(self, model: Any, optimizer: Any = None, criterion: Any = None, *others: Any) -> Any:
        return ModelWrapper(model), OptimizerWrapper(optimizer), criterion, *others


def test_names_of_the_package() -> None:
    assert apex.Booster is apex.booster.Booster is Booster
    assert {"Booster", "launch", "booster", "logging", "nn"} <= set(dir(apex))
    assert sys.modules["logging"] is not apex.logging


def test_arguments_are_checked() -> None:
    with pytest.raises(AssertionError, match="plugin must be a Plugin"):
        Booster(plugin="ddp")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'fp4' is not known"):
        Booster(mixed_precision="fp4")
    with pytest.raises(ValueError, match="mixed_precision must be a name or a MixedPrecision"):
        Booster(mixed_precision=16)  # type: ignore[arg-type]
    precision = BF16MixedPrecision()
    assert Booster(mixed_precision=precision).mixed_precision is precision
    for name in ("TorchDDPPlugin", "TorchFSDPPlugin", "LowLevelZeroPlugin", "GeminiPlugin", "HybridParallelPlugin"):
        with pytest.raises(AssertionError, match=f"{name} needs torch.distributed, which is not initialised"):
            getattr(plugin, name)()


def test_arguments_of_boost_and_backward_are_checked() -> None:
    model = net()
    optimizer = adam(model)
    booster = make()
    with pytest.raises(TypeError, match=r"model is a AdamW and optimizer a Net: .* call boost\(model, optimizer"):
        booster.boost(optimizer, model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, not None"):
        booster.boost(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, not a list"):
        booster.boost([model], optimizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer or None, not a CrossEntropyLoss"):
        booster.boost(model, nn.CrossEntropyLoss())  # type: ignore[arg-type]
    loss = model(batch(0)[0]).square().mean()
    with pytest.raises(TypeError, match=r"optimizer must be the one that booster.boost.* returned, not a AdamW"):
        booster.backward(loss, optimizer)
    with pytest.raises(TypeError, match=r"optimizer must be the one that booster.boost.* returned, not None"):
        booster.backward(loss, None)
    boosted = booster.boost(model, optimizer)[1]
    with pytest.raises(TypeError, match="loss must be a tensor, not float"):
        booster.backward(1.0, boosted)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, not a OptimizerWrapper"):
        booster.save_model(boosted, "nowhere")
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, not None"):
        booster.load_model(None, "nowhere")
    with pytest.raises(AssertionError, match=r"optimizer must be the one that booster.boost returned, not a AdamW"):
        booster.save_optimizer(optimizer, "nowhere")


@pytest.mark.parametrize("precision", [None, "fp16", "fp16_apex", "bf16", "fp8", "fp16_naive"])
def test_an_optimizer_of_another_model_is_refused(precision: str | None) -> None:
    model, other = net(), net()
    before = [param.dtype for param in model.parameters()]
    message = r"none of the parameters of the optimizer \(AdamW\) belongs to the model \(Net\)"
    with pytest.raises(ValueError, match=message):
        make(precision).boost(model, adam(other))
    assert [param.dtype for param in model.parameters()] == before


def test_an_optimizer_may_update_more_or_less_than_the_model() -> None:
    model = net()
    centers = nn.Parameter(torch.zeros(2))
    booster = make()
    booster.boost(model, torch.optim.SGD([centers, *model.last.parameters()], lr=0.1))
    booster.boost(nn.ReLU(), torch.optim.SGD([centers], lr=0.1))  # a model without parameters


def test_arguments_that_a_plugin_controls_are_ignored_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="decides on the device: device='meta' is ignored"):
        booster = Booster(device="meta", plugin=Controlling())
    assert booster.device != torch.device("meta")
    with pytest.warns(UserWarning, match="precision of its own: mixed_precision='fp16' is ignored"):
        booster = Booster(mixed_precision="fp16", plugin=Controlling())
    assert booster.mixed_precision is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        booster = Booster(plugin=Controlling())
    inner = net()
    model, optimizer, *_ = booster.boost(inner, adam(inner))
    assert isinstance(model, ModelWrapper)
    assert isinstance(optimizer, OptimizerWrapper)
    assert not next(model.parameters()).is_meta


def test_without_a_plugin_the_model_and_state_are_moved() -> None:
    """The original leaves the model where it is."""
    model = net()
    optimizer = adam(model)
    train(make(), make().boost(model, optimizer, nn.CrossEntropyLoss()), range(1))
    for state in optimizer.state.values():
        state.update(step=torch.tensor(1.0), seen=3)
    Booster(device="meta").boost(model, optimizer)
    assert all(param.is_meta for param in model.parameters())
    for state in optimizer.state.values():
        assert state["exp_avg"].is_meta
        assert not state["step"].is_meta  # PyTorch's optimizers keep step counts on the host
        assert state["seen"] == 3


def test_boost_returns_five_and_trains_as_pytorch() -> None:
    booster = make()
    model, criterion = net(), nn.CrossEntropyLoss()
    alone = booster.boost(model)
    assert (alone[0].unwrap(), *alone[1:]) == (model, None, None, None, None)
    parts = booster.boost(model, adam(model), criterion, "dataloader", "lr_scheduler")
    assert (parts[0].unwrap(), *parts[2:]) == (model, criterion, "dataloader", "lr_scheduler")
    losses = train(booster, parts)
    weights, expected = plain()
    assert losses == expected
    torch.testing.assert_close(dict(model.state_dict()), dict(weights))
    with pytest.raises(ValueError, match="has been boosted already"):
        booster.boost(model, parts[1])


@pytest.mark.filterwarnings("ignore:fp8. no layer of the model")
@pytest.mark.parametrize("precision", [None, "fp16", "fp16_apex", "bf16", "fp8", "fp16_naive"])
def test_an_existing_scheduler_keeps_working_without_warnings(precision: str | None, capsys: Any) -> None:
    """The scheduler is made on the raw optimizer, with 2 steps and 50 steps of warm-up; the first step overflows."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = LinearWarmupLR(optimizer, 2, 50)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 51)
    booster = make(precision)
    model, optimizer, criterion, _, scheduler = booster.boost(model, optimizer, nn.CrossEntropyLoss(), None, scheduler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            optimizer.zero_grad()
            loss = criterion(model(torch.randn(8, 16)), torch.zeros(8, dtype=torch.long))
            booster.backward(loss * (torch.inf if step == 0 and "fp16" in str(precision) else 1), optimizer)
            optimizer.step()
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 4 / 51)
    made_after = LinearWarmupLR(optimizer, 10, 4)
    assert made_after.optimizer is optimizer


def test_no_sync_and_pipelines_need_a_plugin() -> None:
    with pytest.raises(AssertionError, match="no_sync needs a plugin"):
        Booster().no_sync(net())
    with pytest.raises(NotImplementedError, match="Controlling has no no_sync with these arguments"):
        Booster(plugin=Controlling()).no_sync(net())
    with pytest.raises(AssertionError, match="needs a plugin with pipelines"):
        Booster().execute_pipeline(iter([]), net(), nn.CrossEntropyLoss())
    with pytest.raises(AssertionError, match="LoRA needs a plugin"):
        Booster().enable_lora(net())
    with pytest.raises(NotImplementedError, match="quantize must be False"):
        Booster(plugin=Controlling()).enable_lora(net(), quantize=True)


def test_lora_needs_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    class Adapting(Controlling):
        def support_lora(self) -> bool:
            return True

    booster = Booster(plugin=Adapting())
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match="pip install peft"):
        booster.enable_lora(net())

    class Peft:
        @staticmethod
        def get_peft_model(model: Any, config: Any) -> Any:
            return "adapted", config

    monkeypatch.setitem(sys.modules, "peft", Peft)
    assert booster.enable_lora(net(), lora_config=1) == ("adapted", 1)
    with pytest.raises(ValueError, match="enable_lora needs lora_config"):
        booster.enable_lora(net())


@pytest.mark.parametrize("after", [False, True])
def test_a_divided_sgd_decays_weights_as_the_one_it_was_made_from(after: bool) -> None:
    params = [nn.Parameter(torch.linspace(-1, 1, 20)) for _ in range(2)]
    whole, inner = (
        FusedSGD([param], lr=0.1, momentum=0.9, weight_decay=0.5, wd_after_momentum=after) for param in params
    )
    divided, _ = zero_optimizer(inner)
    for step in range(3):
        for param, optimizer in zip(params, (whole, divided), strict=True):
            param.grad = torch.linspace(step, 1, 20)
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(params[1], params[0])


def test_an_optimizer_with_a_step_of_its_own_is_not_divided() -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise NotImplementedError

    with pytest.raises(ValueError, match="the optimizer is a Own, whose state cannot be divided"):
        zero_optimizer(Own([nn.Parameter(torch.ones(3))], lr=0.1))


@pytest.mark.parametrize(
    ("cls", "options", "zero", "message"),
    [
        (FusedSGD, {"momentum": 0.9, "master_bits": 32}, {}, "master_bits=32 is not supported"),
        (FusedAdam, {"master_weights": True}, {"store_params": False}, "contradict each other"),
        (OffloadedOptimizer, {}, {}, "give the plugin cpu_offload=True"),
        (FusedLion, {}, {}, "the optimizer is a FusedLion, whose state cannot be divided"),
        (FusedNAdam, {}, {}, "the optimizer is a FusedNAdam, whose state cannot be divided"),
    ],
)
def test_no_option_of_a_divided_optimizer_is_ignored(cls: Any, options: Any, zero: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zero_optimizer(cls([nn.Parameter(torch.ones(3, dtype=torch.bfloat16))], lr=0.1, **options), **zero)


def test_groups_of_a_divided_optimizer_agree_on_its_rule() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(3))], "amsgrad": flag} for flag in (False, True)]
    with pytest.raises(ValueError, match="amsgrad differs between parameter groups"):
        zero_optimizer(torch.optim.AdamW(groups))
    with pytest.raises(ValueError, match="amsgrad=True and cautious_weight_decay=True"):
        DistributedFusedAdam([{**groups[0], "cautious_weight_decay": True}], amsgrad=True)


def test_a_divided_adam_decays_cautiously_and_counts_on_the_device() -> None:
    params = [nn.Parameter(torch.linspace(-1, 1, 20)) for _ in range(2)]
    options: Any = {"lr": 0.1, "weight_decay": 0.5, "cautious_weight_decay": True, "capturable": True}
    whole, inner = (FusedAdam([param], **options) for param in params)
    divided, _ = zero_optimizer(inner)
    for step in range(3):
        for param, optimizer in zip(params, (whole, divided), strict=True):
            param.grad = torch.linspace(-step, 1, 20)
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(params[1], params[0])
    assert isinstance(divided.state["step"], torch.Tensor)


def test_wrappers_are_transparent() -> None:
    booster = make("fp16")
    inner = net()
    model, optimizer, *_ = booster.boost(inner, adam(inner))
    assert model.unwrap() is inner
    assert model.first is inner.first
    assert model.optimizer is optimizer
    with pytest.raises(AttributeError, match="no_such"):
        _ = model.no_such
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.defaults["lr"] == 1e-3
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.01]
    optimizer.param_groups[0]["lr"] = 5.0
    assert optimizer.unwrap().param_groups[0]["lr"] == 5.0
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert len(optimizer.parameters) == len(list(inner.parameters())) + 1
    assert "AdamW" in repr(optimizer)
    optimizer.unwrap().note = "of the optimizer inside"
    assert optimizer.note == "of the optimizer inside"
    with pytest.raises(AttributeError, match="optim"):  # and no endless recursion
        _ = type(optimizer).__new__(type(optimizer)).note
    assert len(pickle.loads(pickle.dumps(optimizer.unwrap())).param_groups) == 3
    assert copy.deepcopy(model).unwrap() is not inner


@pytest.mark.parametrize("precision", ["fp16", BF16MixedPrecision("O5")])
def test_a_step_takes_no_closure_where_gradients_are_changed_before_it(precision: Any) -> None:
    model = net()
    _, optimizer, *_ = make(precision).boost(model, adam(model))
    with pytest.raises(ValueError, match="step takes no closure"):
        optimizer.step(lambda: None)


def test_zero_takes_gradients_only_after_finalize(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO must not take the gradients of a split model before they are finalized, by any kind of backward pass."""
    model = net()
    _, optimizer, *_ = make().boost(model, adam(model))
    held: list[str] = []
    monkeypatch.setattr(optimizer, "no_sync", lambda: contextlib.nullcontext(held.append("held")))
    loss = model(batch(0)[0]).square().mean()
    optimizer.backward(loss, retain_graph=True)
    assert held == []
    optimizer.finalize = lambda: None
    optimizer.backward(loss, retain_graph=True)
    optimizer.backward_by_grad(loss, torch.ones_like(loss))
    assert held == ["held", "held"]


@pytest.mark.parametrize("precision", ["fp16", "fp16_naive", BF16MixedPrecision("O5")])
def test_no_backward_pass_after_gradients_were_unscaled(precision: Any) -> None:
    """Its gradients would be added with their scale, 65536, or would not reach the masters."""
    model = nn.Linear(4, 2)
    booster = Booster("cpu", precision)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    booster.backward(model(torch.ones(1, 4)).float().sum() * 1e-3, optimizer)
    optimizer.clip_grad_by_norm(1.0)
    with pytest.raises(RuntimeError, match="clip after the last backward pass"):
        booster.backward(model(torch.ones(1, 4)).float().sum() * 1e-3, optimizer)
    before = model.state_dict()["bias"].clone()
    optimizer.step()
    torch.testing.assert_close(before - model.state_dict()["bias"], torch.full((2,), 1e-3), rtol=0.01, atol=0)
    booster.backward(model(torch.ones(1, 4)).float().sum() * 1e-3, optimizer)  # of the next step


@pytest.mark.parametrize("limit", [-1.0, float("nan")])
def test_clipping_to_no_norm_is_refused(limit: float) -> None:
    model = nn.Linear(4, 2)
    booster = Booster("cpu")
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    booster.backward(model(torch.ones(1, 4)).sum(), optimizer)
    with pytest.raises(ValueError, match="max_norm must be a number of at least 0"):
        optimizer.clip_grad_by_norm(limit)
    assert torch.equal(next(model.parameters()).grad, torch.ones(2, 4))


@pytest.mark.parametrize(
    "precision",
    [None, "bf16", "fp16_naive", BF16MixedPrecision("O5"), FP16ApexMixedPrecision("O2", verbosity=0)],
    ids=lambda value: getattr(value, "__class__", type(None)).__name__,
)
def test_schedule_free_evaluation_reaches_the_weights_of_the_model(precision: Any) -> None:
    model = nn.Linear(4, 4)
    booster = Booster("cpu", precision)
    model, optimizer, *_ = booster.boost(model, FusedScheduleFreeAdamW(model.parameters(), lr=0.1))
    for number in range(4):
        optimizer.zero_grad()
        booster.backward((model(torch.ones(2, 4) + number).float() - 1).square().mean() * 1e-2, optimizer)
        optimizer.step()
    trained = model.state_dict()["weight"].clone()
    optimizer.eval()
    average, weight = model.state_dict()["weight"].clone(), model.unwrap().weight
    assert (average - trained).abs().max() > 1e-3
    assert torch.equal(weight, average.to(weight.dtype))  # the model computes with the average
    optimizer.train()
    torch.testing.assert_close(model.state_dict()["weight"], trained, rtol=0, atol=1e-6)
