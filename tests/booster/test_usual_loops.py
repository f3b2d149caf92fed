"""Loops as users write them train the numbers of plain PyTorch, or raise: nothing has no effect in silence."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import apex
from apex.booster import Booster
from apex.booster.mixed_precision import BF16MixedPrecision, FP16TorchMixedPrecision
from apex.optimizers import FusedAdam, FusedSGD

from .problem import adam, batch, net

PRECISIONS: dict[str, Any] = {"bf16 O5": BF16MixedPrecision("O5"), "fp16_naive": "fp16_naive", "fp32": None}
O5 = BF16MixedPrecision("O5")


class Branches(nn.Module):
    """Two layers of which a call uses one, so that the other gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.even, self.odd = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, inputs: Tensor, number: int) -> Tensor:
        return (self.odd if number % 2 else self.even)(inputs)


def by_model(model: Any, optimizer: Any, number: int) -> None:
    model.zero_grad()


def by_parameter(model: Any, optimizer: Any, number: int) -> None:
    for param in model.parameters():
        param.grad = None


def to_zero(model: Any, optimizer: Any, number: int) -> None:
    optimizer.zero_grad(set_to_none=False)


def every_second_time(model: Any, optimizer: Any, number: int) -> None:
    if number % 2 == 0:
        optimizer.zero_grad()


def trained(precision: Any, zero: Callable[[Any, Any, int], None]) -> list[Tensor]:
    """Return the changes of the weights in six steps; `precision` is "plain" for PyTorch without a Booster."""
    model: Any = Branches()
    before = [param.detach().clone() for param in model.parameters()]
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    if precision != "plain":
        model, optimizer, *_ = Booster("cpu", precision).boost(model, optimizer)
    for number in range(6):
        zero(model, optimizer, number)
        inputs, targets = batch(number)
        loss = nn.functional.cross_entropy(model(inputs, number), targets)
        loss.backward() if precision == "plain" else optimizer.backward(loss)
        optimizer.step()
    return [value - start for value, start in zip(model.state_dict().values(), before, strict=True)]


@pytest.mark.parametrize("zero", [by_model, by_parameter, to_zero, every_second_time])
@pytest.mark.parametrize("name", PRECISIONS)
def test_gradients_are_zeroed_in_every_way_of_pytorch(name: str, zero: Any) -> None:
    """A layer without a gradient must not be updated by the gradient of an earlier step."""
    expected = trained("plain", zero)
    for change, wanted in zip(trained(PRECISIONS[name], zero), expected, strict=True):
        assert (change - wanted).norm() <= 0.05 * wanted.norm()


@pytest.mark.parametrize("change", ["clip", "backward", "zero_grad"])
def test_gradients_that_change_after_clipping_are_refused(change: str) -> None:
    """Float32 copies have been made by then, and the step would ignore the change."""
    inner = net()
    model, optimizer, *_ = Booster("cpu", O5).boost(inner, adam(inner))
    inputs, targets = batch(0)
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.unscale_grad()
    if change == "clip":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    elif change == "backward":
        nn.functional.cross_entropy(model(inputs), targets).backward()
    else:
        model.zero_grad()
    with pytest.raises(RuntimeError, match=r"changed since they were clipped.*optimizer\.clip_grad_by_norm"):
        optimizer.step()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()


def test_steps_of_the_given_optimizer_are_refused() -> None:
    """They would update nothing, because masters have no gradients."""
    inner = net()
    given = adam(inner)
    model, optimizer, *_ = Booster("cpu", O5).boost(inner, given)
    inputs, targets = batch(0)
    nn.functional.cross_entropy(model(inputs), targets).backward()
    with pytest.raises(RuntimeError, match=r"call step\(\) of the optimizer that boost returned"):
        given.step()
    optimizer.step()
    given.zero_grad()
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("fused", [False, True])
def test_weights_initialised_after_boost_are_trained(fused: bool) -> None:
    inner = net()
    make: Any = (lambda model: FusedAdam(model.parameters(), lr=1e-3, master_weights=True)) if fused else adam
    model, optimizer, *_ = Booster("cpu", O5).boost(inner, make(inner))
    kept = model.state_dict()["last.bias"].clone()
    assert not torch.equal(kept, kept.bfloat16().float())
    inner.first.weight.data.fill_(0.5)
    with torch.no_grad():
        inner.last.bias[0] = 2.0
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    inputs, targets = batch(0)
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    assert torch.equal(inner.first.weight, torch.full_like(inner.first.weight, 0.5))
    state = model.state_dict()
    assert torch.equal(state["first.weight"], torch.full_like(state["first.weight"], 0.5))
    assert torch.equal(state["last.bias"][1:], kept[1:])  # elements that nobody changed keep all their digits
    assert state["last.bias"][0] == 2.0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_the_state_dict_of_a_copy_has_the_weights_of_the_copy(way: Any, fused: bool) -> None:
    """An average of weights is such a copy."""
    inner = net()
    make: Any = (lambda model: FusedAdam(model.parameters(), lr=1e-3, master_weights=True)) if fused else adam
    model, _optimizer, *_ = Booster("cpu", O5).boost(inner, make(inner))
    with pytest.warns(UserWarning, match=r"without the float32 masters.*average model.state_dict\(\)"):
        average = way(model)
    with torch.no_grad():
        for param in average.parameters():
            param.fill_(3.0)
    assert all(bool((value == 3.0).all()) for value in average.state_dict().values())
    assert not any(bool((value == 3.0).any()) for value in model.state_dict().values())


class Pretrained(nn.Linear):
    """A model that writes its files as those of transformers do."""

    def save_pretrained(self, folder: Path) -> None:
        torch.save((next(self.parameters()).dtype, self.state_dict()), folder / "model")

    def push_to_hub(self, folder: Path) -> None:
        self.save_pretrained(folder)


@pytest.mark.parametrize("method", ["save_pretrained", "push_to_hub"])
@pytest.mark.parametrize("options", [{}, {"master_weights": True}, {"master_bits": 32}])
def test_save_pretrained_writes_the_exact_weights(options: Any, method: str, tmp_path: Path) -> None:
    inner = Pretrained(8, 8)
    model, _optimizer, *_ = Booster("cpu", O5).boost(inner, FusedAdam(inner.parameters(), **options))
    getattr(model, method)(tmp_path)
    assert "save_pretrained" not in vars(inner)
    dtype, state = torch.load(tmp_path / "model", weights_only=False)
    assert (inner.weight.dtype, dtype) == (torch.bfloat16, torch.float32)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert not torch.equal(state["weight"], inner.weight)
    assert inner.state_dict()["weight"].dtype == torch.bfloat16
    assert not hasattr(Booster("cpu", O5).boost(nn.Linear(8, 8))[0], "save_pretrained")


def test_exact_weights_outlive_a_fused_optimizer() -> None:
    """A function that trains returns the model, whose state dict is saved later."""

    def train() -> tuple[Any, Tensor]:
        inner = net()
        optimizer = FusedAdam(inner.parameters(), lr=1e-3, master_weights=True)
        model, boosted, *_ = Booster("cpu", O5).boost(inner, optimizer)
        return model, boosted.unwrap().state[inner.first.weight]["master_param"].clone()

    model, exact = train()
    gc.collect()
    assert torch.equal(model.state_dict()["first.weight"], exact)


def test_boosted_optimizers_are_not_copied() -> None:
    inner = net()
    _model, optimizer, *_ = Booster("cpu", O5).boost(inner, adam(inner))
    for way in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"a boosted optimizer is not copied or pickled.*state_dict\(\)"):
            way(optimizer)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_second_optimizer_with_masters_is_refused(wrapped: bool) -> None:
    """A state dict would have the masters of one optimizer only, and loading would set only these."""
    inner = net()
    booster = Booster("cpu", O5)
    first, second = torch.optim.SGD(inner.first.parameters(), lr=0.1), torch.optim.SGD(inner.last.parameters(), lr=0.1)
    model, optimizer, *_ = booster.boost(inner, first)
    with pytest.raises(ValueError, match=r"boosted already, with another optimizer.*parameter groups"):
        booster.boost(model if wrapped else inner, second)
    exact = model.state_dict()["first.weight"].clone()
    gone = weakref.ref(optimizer)
    del optimizer
    assert gone() is None
    later, *_ = booster.boost(model if wrapped else inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    if wrapped:  # training goes on with another optimizer, from the exact weights
        assert torch.equal(later.state_dict()["first.weight"], exact)
    float32 = Booster("cpu")
    inner = net()
    for part in (inner.first, inner.last):
        float32.boost(inner, torch.optim.SGD(part.parameters(), lr=0.1))


def test_an_optimizer_of_two_models_is_refused() -> None:
    """Its second boosted form would not see the gradients of the first model."""
    one, two = net(0), net(1)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    booster = Booster("cpu", O5)
    _kept = booster.boost(one, optimizer)
    with pytest.raises(ValueError, match=r"has been boosted already, with another model.*nn\.ModuleList"):
        booster.boost(two, optimizer)


def test_lazy_modules_and_losses_that_are_numbers_are_refused() -> None:
    lazy = nn.Sequential(nn.LayerNorm(16), nn.LazyLinear(4))
    with pytest.raises(ValueError, match=r"1.weight has no shape yet.*call the model once"):
        apex.boost(lazy, torch.optim.SGD(lazy.parameters(), lr=0.1))
    assert lazy[0].weight.dtype == torch.float32
    for precision in ("bf16", None, "fp16_naive"):
        model = net()
        _, optimizer, _ = apex.boost(model, adam(model), precision)
        with pytest.raises(TypeError, match="loss"):
            optimizer.backward(3.0)


def test_models_without_values_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"weight is on the meta device and has no values: call model\.to_empty"):
        apex.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16_naive", BF16MixedPrecision("O4"), None])
def test_outputs_are_float32_for_a_loss_outside_of_the_model(precision: Any) -> None:
    inner = net()
    model, optimizer, _ = apex.boost(inner, adam(inner), precision)
    inputs, targets = batch(0)
    outputs = model(inputs)
    assert outputs.dtype == torch.float32
    optimizer.backward(nn.functional.cross_entropy(outputs, targets))  # in float16 this scaled loss would overflow
    assert all(bool(param.grad.isfinite().all()) for param in model.parameters())


def test_find_fastest_puts_the_loss_scale_back() -> None:
    inner = net()
    booster = Booster("cpu", FP16TorchMixedPrecision(init_scale=8.0, growth_interval=3))
    model, optimizer, criterion, *_ = booster.boost(inner, adam(inner), nn.CrossEntropyLoss())

    @booster.step
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        optimizer.backward(loss)
        optimizer.step()
        return loss

    step(*batch(0))
    before = optimizer.scaler_state()
    booster.find_fastest(step, batch(1))
    assert optimizer.scaler_state() == before


def test_find_fastest_needs_a_boosted_model() -> None:
    with pytest.raises(RuntimeError, match=r"find_fastest comes after boost"):
        Booster("cpu").find_fastest(lambda inputs: inputs.sum(), torch.ones(2))


def test_compiled_steps_call_each_other_and_leave_a_compiled_model_compiled() -> None:
    inner = net()
    inner.compile(backend="eager")
    own = inner._compiled_call_impl
    booster = Booster("cpu", compile={"backend": "eager"})
    model, optimizer, *_ = booster.boost(inner, adam(inner))

    @booster.step
    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.backward(loss)
        return loss

    @booster.step
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(inputs, targets)
        optimizer.step()
        return loss

    for number in range(2):
        step(*batch(number))
    assert inner._compiled_call_impl is own


def test_optimizers_of_sparse_gradients_are_not_fused() -> None:
    model = nn.EmbeddingBag(8, 4, sparse=True)
    booster = Booster("cpu", fuse=True)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.weight.detach().clone()
    optimizer.backward(boosted(torch.tensor([[1, 2]])).sum())
    optimizer.step()
    assert not torch.equal(model.weight, before)
    [row] = [row for row in booster.report() if row.stage == "fuse optimizer"]
    assert row.text == "EmbeddingBag has sparse gradients, which fused optimizers do not take"


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3, fused=True),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.1),
}


def boosted(precision: Any) -> Any:
    model = net()
    return apex.boost(model, adam(model), precision, device="cpu")


@pytest.mark.parametrize("unscales", [False, True], ids=["", "unscale_"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_grad_scaler_of_the_user_scales_and_unscales(kind: str, unscales: bool) -> None:
    """A GradScaler tells an optimizer that divides gradients itself the scale: the inner optimizer must not miss it."""
    results = []
    for is_boosted in (False, True):
        model: Any = net()
        optimizer: Any = OPTIMIZERS[kind](model.parameters())
        if is_boosted:
            model, optimizer, _ = apex.boost(model, optimizer, None, device="cpu")
        scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
        for number in range(4):
            inputs, targets = batch(number)
            optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(model(inputs), targets)).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        results.append([param.detach() for param in model.parameters()])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("precision", [pytest.param(O5, id="O5"), "fp16", "fp16_naive"])
def test_a_grad_scaler_that_would_see_no_gradients_is_refused(precision: Any) -> None:
    model, optimizer, _ = boosted(precision)
    scaler = torch.amp.GradScaler("cpu")
    inputs, targets = batch(0)
    scaler.scale(nn.functional.cross_entropy(model(inputs), targets)).backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"remove the GradScaler and call optimizer.backward"):
        scaler.step(optimizer)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["fp16", "fp16_naive"])
def test_clipping_scaled_gradients_warns(precision: str) -> None:
    """As with torch.amp, clipping by PyTorch before unscaling leaves nothing of the gradients."""
    model, optimizer, _ = boosted(precision)

    def step(clip: Callable[[], Any]) -> None:
        inputs, targets = batch(0)
        optimizer.zero_grad()
        optimizer.backward(nn.functional.cross_entropy(model(inputs), targets))
        clip()
        optimizer.step()

    def by_pytorch() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(lambda: None)
        step(lambda: optimizer.clip_grad_by_norm(0.1))
        if precision == "fp16":
            step(lambda: (optimizer.unscale_grad(), by_pytorch()))
    with pytest.warns(UserWarning, match="multiplied by the loss scale") as found:
        step(by_pytorch)
    assert [warning.filename for warning in found] == [__file__]


@pytest.mark.parametrize("cast", [nn.Module.float, nn.Module.double, lambda model: model.to(torch.float32)])
@pytest.mark.parametrize("precision", [pytest.param(O5, id="O5"), "fp16_naive"])
def test_weights_with_masters_are_not_cast(precision: Any, cast: Any) -> None:
    model, *_ = boosted(precision)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match=r"model.state_dict\(\) has the float32 values"):
        cast(model)
    torch.testing.assert_close([param.detach() for param in model.parameters()], before, rtol=0, atol=0)
    assert model.to("cpu") is model
    cast(boosted("fp16")[0])  # has float32 weights


def test_layers_of_a_boosted_sequence_have_indices() -> None:
    layers = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    model, *_ = apex.boost(layers, torch.optim.SGD(layers.parameters(), lr=0.1), device="cpu")
    assert model[-1] is layers[-1]
    with pytest.raises(TypeError, match="'Net' object is not subscriptable"):
        boosted("bf16")[0][0]


@pytest.mark.parametrize("front", ["boost", "Booster"])
def test_the_warning_of_float8_names_the_line_of_the_user(front: str) -> None:
    model = net()
    boost: Any = apex.boost if front == "boost" else Booster("cpu", "fp8").boost
    arguments: Any = ("fp8",) if front == "boost" else ()
    with pytest.warns(UserWarning, match="no layer of the model multiplies in float8") as found:
        boost(model, adam(model), *arguments)
    assert [warning.filename for warning in found] == [__file__]


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_weights_in_torchs_ddp_are_not_cast(one_process: None) -> None:
    """DistributedDataParallel exchanges no gradients of weights that were cast: each process would train for itself."""
    for precision in (O5, "fp16_naive"):
        model = DistributedDataParallel(net())
        optimizer = adam(model)
        with pytest.raises(ValueError, match="boost the bare model first and wrap the returned one"):
            apex.boost(model, optimizer, precision, device="cpu")
        assert all(param.dtype == torch.float32 for param in model.parameters())
    for precision in (None, "bf16", "fp16", "fp8"):
        model = DistributedDataParallel(net())
        apex.boost(model, adam(model), precision, device="cpu")


def test_weights_in_fsdp_are_not_cast(one_process: None) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    model = net()
    fsdp.fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match="use TorchFSDPPlugin with the bare model"):
        apex.boost(model, adam(model), O5, device="cpu")
    assert all(param.dtype == torch.float32 for param in model.parameters())
