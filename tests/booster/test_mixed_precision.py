"""The five precisions: dtypes of weights, activations, gradients and state on one device."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import apex
from apex import amp
from apex.booster import Booster, mixed_precision
from apex.booster._whole_state import whole_model, whole_optimizer
from apex.booster.mixed_precision import (
    BF16MixedPrecision,
    FP8MixedPrecision,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    MixedPrecision,
    mixed_precision_factory,
)
from apex.optimizers import FusedAdam
from apex.transformer.amp import HysteresisScaler

from .problem import OPTIMIZERS, assert_as_plain, assert_equal, net, plain, train
from .problem import booster as make

NAMES = ("fp16", "fp16_apex", "bf16", "fp8", "fp16_naive")
KINDS = (
    FP16TorchMixedPrecision,
    FP16ApexMixedPrecision,
    BF16MixedPrecision,
    FP8MixedPrecision,
    FP16NaiveMixedPrecision,
)
# Relative to the change of the weights. Gradients have errors of 2^-11 in float16 and 2^-8 in bfloat16 per layer.
TOLERANCE = {"fp16": 0.005, "fp16_apex": 0.005, "fp16_naive": 0.005, "bf16": 0.03, "fp8": 0.2}


@pytest.fixture(autouse=True)
def no_amp() -> Iterator[None]:
    yield
    amp.shutdown()


# The layers of this small model stay in bfloat16.
pytestmark = pytest.mark.filterwarnings("ignore:fp8. no layer of the model")


def quiet(name: str) -> Any:
    return FP16ApexMixedPrecision(verbosity=0) if name == "fp16_apex" else name


def boosted(precision: Any, optimizer: str = "adam") -> tuple[Booster, tuple[Any, ...]]:
    booster = make(precision)
    model = net()
    return booster, booster.boost(model, OPTIMIZERS[optimizer](model), nn.CrossEntropyLoss())


def test_factory() -> None:
    assert [type(mixed_precision_factory(name)) for name in NAMES] == list(KINDS)
    with pytest.raises(ValueError, match=r"'fp4' is not known; use one of fp16, fp16_apex, bf16, fp8, fp16_naive"):
        mixed_precision_factory("fp4")
    assert apex.mixed_precision.FP8MixedPrecision is mixed_precision.FP8MixedPrecision


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_training_is_plain_pytorch_s(name: str, optimizer: str) -> None:
    plain(optimizer)
    booster, parts = boosted(quiet(name), optimizer)
    train(booster, parts)
    assert_as_plain(dict(parts[0].state_dict()), optimizer, TOLERANCE[name])


def kinds(precision: Any) -> dict[str, Any]:
    """Return the dtypes of weights, activations, outputs, gradients and the optimizer's parameters."""
    booster, (model, optimizer, criterion, _, _) = boosted(precision)
    inner: nn.Module = model.unwrap()
    seen: dict[str, Any] = {}
    inner.blocks[0].register_forward_hook(lambda module, args, output: seen.update(activation=output.dtype))
    inner.blocks[0].weight.register_hook(lambda grad: seen.update(gradient=grad.dtype))
    output = model(torch.randn(8, 16))
    seen.update(weight=inner.blocks[0].weight.dtype, output=output.dtype)
    booster.backward(criterion(output, torch.zeros(8, dtype=torch.long)), optimizer)
    optimizer.step()
    seen["state"] = {value.dtype for state in optimizer.state.values() for value in state.values()}
    seen["updated"] = {param.dtype for param in optimizer.parameters}
    return seen


HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("precision", "weight", "activation", "output"),
    [
        ("fp16", FULL, HALF, HALF),
        ("fp16_apex", FULL, HALF, FULL),
        ("bf16", FULL, BRAIN, BRAIN),
        ("fp8", FULL, BRAIN, BRAIN),
        ("fp16_naive", HALF, HALF, FULL),
        (BF16MixedPrecision("O5"), BRAIN, BRAIN, FULL),
        (FP16ApexMixedPrecision("O0", verbosity=0), FULL, FULL, FULL),
        (FP16ApexMixedPrecision("O2", verbosity=0), HALF, HALF, FULL),
        (FP16ApexMixedPrecision("O3", verbosity=0), HALF, HALF, FULL),
        (FP16ApexMixedPrecision("O4", verbosity=0), FULL, BRAIN, FULL),
        (FP16ApexMixedPrecision("O4", verbosity=0, cast_model_outputs=BRAIN), FULL, BRAIN, BRAIN),
        (FP16ApexMixedPrecision("O5", verbosity=0, cast_model_outputs=BRAIN), BRAIN, BRAIN, BRAIN),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_types(precision: Any, weight: torch.dtype, activation: torch.dtype, output: torch.dtype) -> None:
    found = kinds(quiet(precision) if isinstance(precision, str) else precision)
    assert (found["weight"], found["activation"], found["output"]) == (weight, activation, output)
    assert found["gradient"] == weight
    pure = isinstance(precision, FP16ApexMixedPrecision) and precision.options["opt_level"] == "O3"
    assert found["updated"] == {HALF if pure else FULL}
    assert found["state"] <= ({HALF, FULL} if pure else {FULL})


def test_criterion_runs_under_autocast_as_a_function_too() -> None:
    seen: list[bool] = []

    def criterion(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(torch.is_autocast_enabled(outputs.device.type))
        return nn.functional.cross_entropy(outputs, targets)

    booster = make("fp16")
    _, _, cast, _, _ = booster.boost(net(), None, criterion)
    cast(torch.randn(2, 4), torch.zeros(2, dtype=torch.long))
    assert seen == [True]
    assert cast.__name__ == "criterion"


@pytest.mark.parametrize("name", ["fp16", "fp16_apex", "fp16_naive"])
def test_overflow_skips_the_step_and_lowers_the_scale(name: str) -> None:
    options: dict[str, Any] = {"fp16_naive": FP16NaiveMixedPrecision(hysteresis=1)}
    booster, (model, optimizer, criterion, _, _) = boosted(options.get(name, quiet(name)))
    before = copy.deepcopy(list(model.parameters()))
    output = model(torch.randn(8, 16))
    booster.backward(criterion(output, torch.zeros(8, dtype=torch.long)) * torch.inf, optimizer)
    optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    state = optimizer.state_dict()["scaler"]
    scale = state["amp"]["loss_scaler0"]["loss_scale"] if name == "fp16_apex" else state["scale"]
    assert scale == 2.0**15


def test_clipping_sees_unscaled_gradients_and_returns_the_norm() -> None:
    """The original returns None under fp16."""
    norms = {}
    for name in (None, *NAMES):
        booster, (model, optimizer, criterion, _, _) = boosted(quiet(name) if name else None)
        torch.manual_seed(0)
        booster.backward(criterion(model(torch.randn(8, 16)), torch.zeros(8, dtype=torch.long)), optimizer)
        norms[name] = optimizer.clip_grad_by_norm(0.5).item()
        assert optimizer.clip_grad_by_norm(0.5).item() == pytest.approx(0.5, rel=1e-3)
        optimizer.clip_grad_by_value(1e-3)
        assert max(param.grad.abs().max() for param in optimizer.parameters if param.grad is not None) <= 1e-3
        optimizer.step()
        amp.shutdown()
    assert norms[None] > 0.5
    assert all(norm == pytest.approx(norms[None], rel=2e-2) for norm in norms.values())


def test_gradients_of_several_passes_add_up() -> None:
    for name in NAMES:
        grads = []
        for count in (1, 2):
            booster, (model, optimizer, criterion, _, _) = boosted(quiet(name))
            torch.manual_seed(0)
            inputs, targets = torch.randn(8, 16), torch.randint(0, 4, (8,))
            for part in range(count):
                rows = slice(part * 8 // count, (part + 1) * 8 // count)
                booster.backward(criterion(model(inputs[rows]), targets[rows]) / count, optimizer)
            optimizer.unscale_grad()
            grads.append([param.grad.clone() for param in optimizer.parameters])
            amp.shutdown()
        torch.testing.assert_close(*grads, rtol=0, atol=2e-2 if name in ("bf16", "fp8") else 2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_clipped_gradients_may_be_dropped(name: str) -> None:
    """Gradients of `zero_grad` without a step leave nothing behind: no unscaled state, no overflow."""
    booster, (model, optimizer, criterion, _, _) = boosted(quiet(name))
    before = copy.deepcopy(list(model.parameters()))
    inputs, targets, norms = torch.randn(8, 16), torch.zeros(8, dtype=torch.long), []
    # After an overflow amp skips the next step whatever becomes of the gradients, as upstream does.
    for factor in (1.0 if name == "fp16_apex" else torch.inf, 1.0, 1.0):
        optimizer.zero_grad()
        booster.backward(criterion(model(inputs), targets) * factor, optimizer)
        norms.append(float(optimizer.clip_grad_by_norm(0.5)))
    assert norms[1] == pytest.approx(norms[2], rel=2**-8)
    assert norms[1] < torch.inf
    optimizer.step()
    assert not any(map(torch.equal, model.parameters(), before))


def scales(scaler: HysteresisScaler, overflows: str) -> list[float]:
    """Return the scale after each step that overflows ("x") or does not (".")."""
    param = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=0.0)
    found = []
    for each in overflows:
        scaler.scale(param.sum()).backward()
        param.grad.fill_(torch.inf if each == "x" else 1.0)
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    return found


def test_hysteresis() -> None:
    """Overflows are counted until the scale grows. The second and later ones lower it; clean steps reset nothing."""
    scaler = HysteresisScaler(8.0, 2.0, 0.5, growth_interval=3, hysteresis=2, min_scale=1.0, max_scale=16.0)
    assert scales(scaler, "x.x.x...x") == [8, 8, 4, 4, 2, 2, 2, 4, 4]
    assert scales(scaler, "xxxx") == [2, 1, 1, 1]  # not below min_scale
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()  # without a step
    assert scales(scaler, "." * 18) == [1, 1, 2, 2, 2, 4, 4, 4, 8, 8, 8, 16, 16, 16, 16, 16, 16, 16]


def test_hysteresis_keeps_its_bounds_and_its_count() -> None:
    for first, expected in ((2.0, 4.0), (64.0, 16.0)):
        assert HysteresisScaler(first, min_scale=4.0, max_scale=16.0).state_dict()["scale"] == expected
    with pytest.raises(ValueError, match="init_scale must be a positive number"):
        HysteresisScaler(-1.0)
    scaler = HysteresisScaler(8.0, hysteresis=3)
    scales(scaler, "x")
    before = scaler.state_dict()
    with pytest.raises(RuntimeError, match="empty"):
        scaler.load_state_dict({"overflows": 2})
    assert scaler.state_dict() == before


@pytest.mark.parametrize("cut", [1, 4, 7])
def test_the_whole_state_of_the_scaler_is_saved(cut: int) -> None:
    """The original saves neither counter."""
    pattern, options = "x..x...xx...x", dict(growth_interval=3, hysteresis=2)
    whole = scales(HysteresisScaler(8.0, **options), pattern)
    first, second = HysteresisScaler(8.0, **options), HysteresisScaler(8.0, **options)
    scales(first, pattern[:cut])
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert scales(second, pattern[cut:]) == whole[cut:]


def test_arguments_of_naive(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="hysteresis must be an integer of at least 1, got 0"):
        FP16NaiveMixedPrecision(hysteresis=0)
    with pytest.raises(ValueError, match="min_scale=4"):
        FP16NaiveMixedPrecision(max_scale=2.0, min_scale=4.0)
    with pytest.raises(ValueError, match="opt_level='O6' is not known"):
        FP16ApexMixedPrecision("O6")
    with pytest.raises(ValueError, match="opt_level='O1' is not known; use 'O4'"):
        BF16MixedPrecision("O1")
    booster, (model, optimizer, criterion, _, _) = boosted(FP16NaiveMixedPrecision(True, hysteresis=1, verbose=True))
    with caplog.at_level(logging.INFO):
        booster.backward(criterion(model(torch.zeros(8, 16)), torch.zeros(8, dtype=torch.long)), optimizer)
        optimizer.step()
        assert "elements of gradients are zero" in caplog.text
        optimizer.zero_grad()
        output = model(torch.zeros(8, 16))
        booster.backward(criterion(output, torch.zeros(8, dtype=torch.long)) * torch.nan, optimizer)
        optimizer.step()
    assert "the step was skipped, the loss scale is 32768.0" in caplog.text


def test_the_scale_of_sharded_models_has_the_arguments_of_amp() -> None:
    options = dict(dynamic_init_scale=8.0, scale_growth_factor=4.0, scale_backoff_factor=0.25, scale_window=2)
    assert scales(FP16ApexMixedPrecision("O1", **options).scaler(), "..x") == [8, 32, 8]
    assert scales(FP16ApexMixedPrecision("O1").scaler(), "x.") == [2**15, 2**15]


def test_batch_norms_stay_in_float32_where_weights_do_not() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8))
    boosted_model, *_ = make("fp16_naive").boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert boosted_model(torch.randn(4, 16)).dtype == torch.float32
    assert {name: value.dtype for name, value in model.state_dict().items()} == {
        "0.weight": HALF,
        "0.bias": HALF,
        "1.weight": FULL,
        "1.bias": FULL,
        "1.running_mean": FULL,
        "1.running_var": FULL,
        "1.num_batches_tracked": torch.int64,
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_batch_norms_become_float32_beside_float16_weights(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8)).to(dtype)
    boosted_model, *_ = make("fp16_naive").boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert boosted_model(torch.randn(4, 16)).dtype == torch.float32
    assert {value.dtype for value in model[1].state_dict().values()} == {FULL, torch.int64}


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp16", HALF), ("fp16", torch.bfloat16), ("bf16", HALF), ("fp8", HALF)]
)
def test_half_precision_weights_under_autocast_are_refused(precision: str, dtype: torch.dtype) -> None:
    """Their gradients cannot be unscaled, or they meet activations of another half precision."""
    model = nn.Linear(16, 16).to(dtype)
    with pytest.raises(TypeError, match=rf"weight is {dtype}; .* call model.float\(\) before the optimizer is made"):
        make(precision).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    make(precision).boost(model)
    model.requires_grad_(False)
    make(precision).boost(model, torch.optim.SGD([model.weight, nn.Parameter(torch.ones(2))], lr=0.1))


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_bfloat16_weights_without_float32_values_bring_a_warning(precision: str) -> None:
    def messages(cls: Any = FusedAdam, first: int = 0, **options: Any) -> list[str]:
        model = nn.Sequential(nn.Linear(16, 16).bfloat16(), nn.Linear(16, 16))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make(precision).boost(model, cls(model[first:].parameters(), **options))
        return [str(warning.message) for warning in caught if "updates of less than" in str(warning.message)]

    [message] = messages()
    assert "2 trained parameters are bfloat16 (0.weight is the first), and FusedAdam keeps no float32" in message
    assert not messages(master_weights=True)
    assert not messages(stochastic_rounding=True)
    assert not messages(master_bits=32)
    assert not messages(first=1)  # an adapter, say

    class Exact(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            """Update as nobody knows."""

    assert messages(torch.optim.SGD, lr=0.1)
    assert not messages(Exact, lr=0.1)


class Doubled(MixedPrecision):
    """A user's own precision."""

    def configure(self, model: nn.Module, optimizer: Any = None, criterion: Any = None) -> tuple[Any, Any, Any]:
        return model.double(), apex.booster.OptimizerWrapper(optimizer), criterion


def test_a_precision_of_one_s_own() -> None:
    booster, (model, optimizer, criterion, _, _) = boosted(Doubled())
    booster.backward(criterion(model(torch.randn(8, 16).double()), torch.zeros(8, dtype=torch.long)), optimizer)
    optimizer.step()
    assert next(model.parameters()).dtype == torch.float64


@pytest.mark.parametrize("precision", ["fp16_naive", BF16MixedPrecision("O5"), "fp16"])
def test_layers_that_are_trained_later(precision: Any, tmp_path: Path) -> None:
    """A group that is added after boosting has float32 masters too, learns, and is saved."""
    booster, model = make(precision), net()
    optimizer = torch.optim.SGD(model.last.parameters(), lr=0.1, momentum=0.9)
    boosted, optimizer, criterion, *_ = booster.boost(model, optimizer, nn.CrossEntropyLoss())
    train(booster, (boosted, optimizer, criterion), range(1))
    before = whole_model(boosted, copies=True)
    optimizer.add_param_group({"params": list(model.first.parameters()), "lr": 1e-4})
    train(booster, (boosted, optimizer, criterion), range(1, 3))
    moved = {name for name, value in whole_model(boosted).items() if not torch.equal(value, before[name])}
    assert moved == {"last.weight", "last.bias", "first.weight", "first.bias"}
    assert {param.dtype for param in optimizer.parameters} == {torch.float32}
    booster.save_optimizer(optimizer, tmp_path / "optimizer")
    expected = whole_optimizer(optimizer, copies=True)
    train(booster, (boosted, optimizer, criterion), range(3, 4))
    booster.load_optimizer(optimizer, tmp_path / "optimizer")
    assert_equal(whole_optimizer(optimizer), expected)
