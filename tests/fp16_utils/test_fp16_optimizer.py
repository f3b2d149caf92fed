"""FP16_Optimizer: masters, scaling, skipped steps, closures, checkpoints."""

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex.amp.scaler import LossScaler as AmpScaler
from apex.fp16_utils import DynamicLossScaler, FP16_Optimizer, LossScaler
from apex.optimizers import FusedAdam, FusedLAMB, FusedSGD
from tests.support.harness import assert_equal_bits

HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
DYNAMIC = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**10, "scale_window": 4}}
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "FusedSGD": lambda p: FusedSGD(p, lr=0.05, momentum=0.9),
    "FusedAdam": lambda p: FusedAdam(p, lr=0.01),
    "FusedLAMB": lambda p: FusedLAMB(p, lr=0.01),
}


class Mixed(nn.Module):
    """Half-precision layers around a float32 layer, a frozen layer, and a layer without a gradient."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(4, 8).to(dtype)
        self.norm = nn.LayerNorm(8)
        self.second = nn.Linear(8, 2).to(dtype)
        self.frozen = nn.Linear(2, 2).to(dtype).requires_grad_(False)
        self.unused = nn.Linear(1, 1).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.first.weight.dtype
        hidden = self.norm(self.first(x.to(dtype)).float()).to(dtype)
        return self.frozen(torch.relu(self.second(hidden)) + 1).float()


def batch(step: int, device: str = "cpu") -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).to(device)


def loss_of(model: nn.Module, step: int, device: str = "cpu") -> Tensor:
    return (model(batch(step, device)) - 1).square().mean()


def make(dtype: torch.dtype, factory: Callable[..., Any], device: str = "cpu", **options: Any) -> tuple[Mixed, Any]:
    model = Mixed(dtype).to(device)
    groups = [{"params": [*model.first.parameters(), *model.norm.parameters()]}]
    others = [*model.second.parameters(), *model.frozen.parameters(), *model.unused.parameters()]
    optimizer = factory([*groups, {"params": others}])
    return model, FP16_Optimizer(optimizer, verbose=False, **options)


def train(
    model: Mixed, optimizer: FP16_Optimizer, steps: range, device: str = "cpu", overflow_at: int = -1
) -> list[float]:
    scales = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step, device)
        optimizer.backward(loss * math.inf if step == overflow_at else loss)
        optimizer.step()
        scales.append(optimizer.loss_scale)
    return scales


@DEVICES
@HALVES
@pytest.mark.parametrize("options", [{}, {"static_loss_scale": 128.0}, DYNAMIC], ids=["1", "128", "dynamic"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trains_masters_like_a_float32_optimizer(
    name: str, options: dict[str, Any], dtype: torch.dtype, device: str
) -> None:
    """The same optimizer on float32 parameters gets the gradients unscaled by hand."""
    model, optimizer = make(dtype, OPTIMIZERS[name], device, **options)
    plain = [nn.Parameter(p.detach().clone()) for group in optimizer.param_groups for p in group["params"]]
    for param, other in zip(plain, (p for group in optimizer.param_groups for p in group["params"]), strict=True):
        param.requires_grad_(other.requires_grad)
    peer = OPTIMIZERS[name]([{"params": plain[:4]}, {"params": plain[4:]}])
    for step in range(5):
        optimizer.zero_grad(set_grads_to_None=True)
        optimizer.backward(loss_of(model, step, device))
        grads = [grad for group in optimizer.inspect_master_grad_data() for grad in group]
        for param, grad in zip(plain, grads, strict=True):
            param.grad = None if grad is None else grad.clone()
        optimizer.step()
        peer.step()
        masters = [p for group in optimizer.param_groups for p in group["params"]]
        for param, master in zip(plain, masters, strict=True):
            if param.requires_grad:
                torch.testing.assert_close(param, master, rtol=1e-6, atol=1e-7)
    for param, master in zip(optimizer.all_fp16_params, optimizer.all_fp32_from_fp16_params, strict=True):
        assert master.dtype == torch.float32
        assert torch.equal(param, master.to(dtype))


@HALVES
def test_gradients_do_not_depend_on_the_scale(dtype: torch.dtype) -> None:
    found = []
    for scale in (1.0, 64.0):
        model, optimizer = make(dtype, OPTIMIZERS["SGD"], static_loss_scale=scale)
        optimizer.backward(loss_of(model, 0))
        found.append([grad for group in optimizer.inspect_master_grad_data() for grad in group if grad is not None])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_groups_and_attributes() -> None:
    model, optimizer = make(torch.float16, OPTIMIZERS["SGD"])
    assert [len(group) for group in optimizer.fp16_groups] == [2, 4]
    assert [len(group) for group in optimizer.fp32_from_fp32_groups] == [2, 0]
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 6]
    assert optimizer.param_groups[0]["params"][2] is model.norm.weight
    assert optimizer.param_groups[1]["params"][2] is model.frozen.weight
    assert optimizer.state is optimizer.optimizer.state
    optimizer.param_groups[0]["lr"] = 7.0
    assert optimizer.optimizer.param_groups[0]["lr"] == 7.0
    optimizer.loss_scale = 32.0
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="loss_scale must be a positive number"):
            optimizer.loss_scale = wrong
    assert optimizer.loss_scale == 32.0
    with pytest.raises(RuntimeError, match="state_dict"):
        optimizer.__getstate__()
    with pytest.raises(RuntimeError, match="load_state_dict"):
        optimizer.__setstate__({})


def test_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    FP16_Optimizer(torch.optim.SGD(nn.Linear(1, 1).half().parameters(), lr=1))
    assert "2 parameters with a float32 master" in capsys.readouterr().out
    optimizer = FP16_Optimizer(torch.optim.SGD(nn.Linear(1, 1).half().parameters(), lr=1), verbose=False)
    optimizer.maybe_print("nothing")
    assert not capsys.readouterr().out


def test_state_from_before_is_kept_in_float32() -> None:
    model = nn.Linear(3, 2).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3).half()).float().sum().backward()
    optimizer.step()
    wrapped = FP16_Optimizer(optimizer, verbose=False)
    masters = wrapped.all_fp32_from_fp16_params
    assert set(wrapped.state) == set(masters)
    assert all(wrapped.state[master]["momentum_buffer"].dtype == torch.float32 for master in masters)


def test_other_types_are_refused_before_anything_changes() -> None:
    half, odd = nn.Parameter(torch.ones(1).half()), nn.Parameter(torch.ones(1, dtype=torch.complex64))
    optimizer = torch.optim.SGD([half, odd], lr=0.1)
    with pytest.raises(TypeError, match=r"parameter 1 of group 0 is torch\.complex64"):
        FP16_Optimizer(optimizer)
    assert optimizer.param_groups[0]["params"][0] is half


@DEVICES
@pytest.mark.parametrize("name", ["Adam", "FusedAdam"])
def test_an_overflow_skips_the_step_and_halves_the_scale(
    name: str, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = make(torch.float16, OPTIMIZERS[name], device, **DYNAMIC)
    train(model, optimizer, range(2), device)
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, 2, device) * math.nan)
    assert optimizer.overflow
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None
    assert optimizer.step() is None
    assert "Skipping step, reducing loss scale to 512.0" in capsys.readouterr().out
    assert_equal_bits(before, list(model.parameters()))
    train(model, optimizer, range(3, 4), device)
    assert not optimizer.overflow
    assert not torch.equal(before[0], model.first.weight)


def test_the_scale_grows_after_a_window() -> None:
    model, optimizer = make(torch.float16, OPTIMIZERS["SGD"], **DYNAMIC)
    scales = train(model, optimizer, range(10), overflow_at=5)
    assert scales == [1024.0] * 3 + [2048.0] * 2 + [1024.0] * 4 + [2048.0]


def test_the_scaler_has_amp_defaults() -> None:
    _, optimizer = make(torch.float16, OPTIMIZERS["SGD"], dynamic_loss_scale=True)
    assert optimizer.loss_scale == 2.0**16
    with pytest.raises(TypeError, match="no_such"):
        make(torch.float16, OPTIMIZERS["SGD"], dynamic_loss_scale=True, dynamic_loss_args={"no_such": 1})


def test_overflow_in_float32_parameters_counts() -> None:
    model, optimizer = make(torch.float16, OPTIMIZERS["SGD"], **DYNAMIC)
    optimizer.backward((model.norm.weight * math.inf).sum())
    assert optimizer.overflow


def gradients(optimizer: FP16_Optimizer) -> list[Tensor]:
    return [grad.clone() for group in optimizer.inspect_master_grad_data() for grad in group if grad is not None]


@pytest.mark.parametrize("change", [None, 512.0])
@pytest.mark.parametrize("delayed", [True, False])
def test_gradients_of_several_losses_add_up(delayed: bool, change: float | None) -> None:
    """This includes float32 parameters, whose gradients were already unscaled in place, and a change of the scale."""
    model, optimizer = make(torch.bfloat16, OPTIMIZERS["SGD"], static_loss_scale=128.0)
    loss = loss_of(model, 0)
    optimizer.backward(loss, update_master_grads=not delayed, retain_graph=True)
    if change:
        optimizer.loss_scale = change
    optimizer.backward(loss, update_master_grads=not delayed)
    if delayed:
        optimizer.update_master_grads()
    twice = gradients(optimizer)
    optimizer.zero_grad()
    optimizer.backward(2 * loss_of(model, 0))
    for found, expected in zip(twice, gradients(optimizer), strict=True):
        assert torch.equal(found, expected)


def test_a_second_update_changes_nothing() -> None:
    model, optimizer = make(torch.float16, OPTIMIZERS["SGD"], static_loss_scale=128.0)
    optimizer.backward(loss_of(model, 0))
    once = gradients(optimizer)
    optimizer.update_master_grads()
    assert_equal_bits(once, gradients(optimizer))


@pytest.mark.parametrize("norm_type", [2, 1, "inf"])
def test_clipping_is_that_of_torch(norm_type: Any) -> None:
    model, optimizer = make(torch.float16, OPTIMIZERS["SGD"], static_loss_scale=64.0)
    optimizer.backward(loss_of(model, 0))
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in gradients(optimizer)]
    for param, grad in zip(params, gradients(optimizer), strict=True):
        param.grad = grad
    expected = nn.utils.clip_grad_norm_(params, 0.01, norm_type)
    assert torch.equal(optimizer.clip_master_grads(0.01, norm_type), expected)
    for param, grad in zip(params, gradients(optimizer), strict=True):
        assert torch.equal(param.grad, grad)


def test_zero_grad() -> None:
    model, optimizer = make(torch.float16, OPTIMIZERS["SGD"])
    every = [*model.parameters(), *optimizer.all_fp32_from_fp16_params]
    optimizer.backward(loss_of(model, 0))
    optimizer.zero_grad()
    present = [p.grad for p in every if p.grad is not None]
    assert len(present) == 10
    assert not any(grad.any() for grad in present)
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in every)


def test_a_parameter_that_gets_no_gradient_any_more_is_left_alone() -> None:
    model, optimizer = make(torch.float16, lambda p: torch.optim.SGD(p, lr=0.1))
    train(model, optimizer, range(1))
    model.zero_grad()  # the model's: masters still have gradients
    optimizer.backward(model.first(batch(1).half()).float().sum())
    before = model.second.weight.detach().clone()
    optimizer.step()
    assert torch.equal(before, model.second.weight)


@pytest.mark.parametrize("options", [{"static_loss_scale": 16.0}, DYNAMIC], ids=["static", "dynamic"])
def test_lbfgs_calls_the_closure_with_a_fresh_model(options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    model = nn.Linear(4, 1).half()
    data, target = torch.randn(32, 4), torch.randn(32, 1)
    optimizer = FP16_Optimizer(torch.optim.LBFGS(model.parameters(), max_iter=6), verbose=False, **options)
    seen = []

    def closure() -> Tensor:
        for param, master in zip(optimizer.all_fp16_params, optimizer.all_fp32_from_fp16_params, strict=True):
            assert torch.equal(param, master.half())
        optimizer.zero_grad()
        loss = (model(data.half()).float() - target).square().mean()
        optimizer.backward(loss)
        seen.append(loss.item())
        return loss

    first = optimizer.step(closure)
    assert first.item() == seen[0]
    assert len(seen) > 1
    optimizer.step(closure)
    exact = (data @ torch.linalg.lstsq(data, target).solution - target).square().mean().item()
    assert seen[-1] < 1.1 * exact
    assert optimizer.first_closure_call_this_step


@pytest.mark.parametrize("name", ["SGD", "FusedAdam"])
def test_an_overflow_in_a_closure_repeats_it(name: str) -> None:
    model, optimizer = make(torch.float16, OPTIMIZERS[name], **DYNAMIC)
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        optimizer.backward(loss * math.inf if len(calls) < 2 else loss)
        calls.append(optimizer.loss_scale)
        return loss

    before = model.first.weight.detach().clone()
    assert optimizer.step(closure).isfinite()
    assert calls == [512.0, 256.0, 256.0]
    assert not torch.equal(before, model.first.weight)


@pytest.mark.parametrize("floor", [None, 128.0])
def test_a_hopeless_closure_raises(floor: float | None) -> None:
    args = {"init_scale": 256.0, "min_loss_scale": floor}
    model, optimizer = make(torch.float16, OPTIMIZERS["SGD"], dynamic_loss_scale=True, dynamic_loss_args=args)
    before = [param.detach().clone() for param in model.parameters()]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        optimizer.backward(loss * math.nan)
        return loss if floor else loss * math.nan

    with pytest.raises(RuntimeError, match=r"still overflow with loss scale.*\(the loss is"):
        optimizer.step(closure)
    assert_equal_bits(before, list(model.parameters()))
    assert optimizer.first_closure_call_this_step


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@DEVICES
@HALVES
@pytest.mark.parametrize(
    ("options", "overflow_at"),
    [({"static_loss_scale": 64.0}, -1), (DYNAMIC, -1), (DYNAMIC, 3), (DYNAMIC, 5)],
    ids=["static", "dynamic", "overflow before", "overflow after"],
)
@pytest.mark.parametrize("name", ["SGD", "Adam", "FusedAdam"])
def test_resumes_bit_for_bit(
    name: str, options: dict[str, Any], overflow_at: int, dtype: torch.dtype, device: str
) -> None:
    model, optimizer = make(dtype, OPTIMIZERS[name], device, **options)
    train(model, optimizer, range(4), device, overflow_at)
    checkpoint = saved_and_loaded({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    scales = train(model, optimizer, range(4, 9), device, overflow_at)

    resumed, other = make(dtype, OPTIMIZERS[name], device, **options)
    with torch.no_grad():
        for param in resumed.parameters():
            param.add_(1)
    resumed.load_state_dict(checkpoint["model"])
    other.load_state_dict(checkpoint["optimizer"])
    assert train(resumed, other, range(4, 9), device, overflow_at) == scales
    assert_equal_bits(list(model.state_dict().values()), list(resumed.state_dict().values()))
    assert_equal_bits(optimizer.all_fp32_from_fp16_params, other.all_fp32_from_fp16_params)


def test_the_layout_of_a_state_dict() -> None:
    _, optimizer = make(torch.float16, OPTIMIZERS["SGD"], **DYNAMIC)
    state = optimizer.state_dict()
    assert set(state) == {
        "loss_scaler",
        "dynamic_loss_scale",
        "overflow",
        "first_closure_call_this_step",
        "optimizer_state_dict",
        "fp32_from_fp16",
    }
    assert [len(group) for group in state["fp32_from_fp16"]] == [2, 4]


def test_masters_reach_the_model_when_loaded() -> None:
    model, optimizer = make(torch.float16, OPTIMIZERS["SGD"])
    train(model, optimizer, range(2))
    other, fresh = make(torch.float16, OPTIMIZERS["SGD"])
    fresh.load_state_dict(optimizer.state_dict())
    assert torch.equal(other.first.weight, model.first.weight)


def test_a_checkpoint_of_another_model_changes_nothing() -> None:
    model, optimizer = make(torch.float16, OPTIMIZERS["SGD"], **DYNAMIC)
    state = optimizer.state_dict()
    state["fp32_from_fp16"] = state["fp32_from_fp16"][:1]
    optimizer.loss_scale = 8.0
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(ValueError, match="masters of shapes"):
        optimizer.load_state_dict(state)
    assert optimizer.loss_scale == 8.0
    assert_equal_bits(before, list(model.parameters()))


def upstream_scaler() -> AmpScaler:
    """Return our class as unpickling upstream's scaler makes it: with its attributes, without a constructor call."""
    scaler = AmpScaler.__new__(AmpScaler)
    vars(scaler).update(dynamic=True, _loss_scale=4096.0, _unskipped=3, _scale_seq_len=4, _max_loss_scale=2.0**24)
    vars(scaler).update(_min_loss_scale=None, _has_overflow=False)
    return scaler


def older_scaler() -> DynamicLossScaler:
    scaler = DynamicLossScaler(init_scale=4096.0, scale_window=4)
    for _ in range(3):
        scaler.update_scale(False)
    return scaler


@pytest.mark.parametrize("scaler", [upstream_scaler, older_scaler])
def test_checkpoints_of_the_original_are_read(scaler: Callable[[], Any]) -> None:
    model, optimizer = make(torch.float16, OPTIMIZERS["SGD"], **DYNAMIC)
    state = optimizer.state_dict()
    state["loss_scaler"] = scaler()
    optimizer.load_state_dict(state)
    assert optimizer.loss_scale == 4096.0
    assert train(model, optimizer, range(5)) == [8192.0] * 4 + [16384.0]


def test_a_static_scaler_of_the_original_is_read() -> None:
    _, optimizer = make(torch.float16, OPTIMIZERS["SGD"])
    state = optimizer.state_dict()
    state["loss_scaler"] = LossScaler(32.0)
    optimizer.load_state_dict(state)
    assert optimizer.loss_scale == 32.0


@pytest.mark.parametrize("options", [DYNAMIC, {"static_loss_scale": 1.0}])
def test_a_step_refuses_gradients_that_no_master_has(options: dict[str, Any]) -> None:
    """Float32 layers beside half-precision ones have gradients anyway: a step trained them alone, with scaled ones."""
    for backward in (lambda loss, optimizer: loss.backward(), lambda loss, optimizer: optimizer.backward(loss, False)):
        model, optimizer = make(torch.float16, OPTIMIZERS["SGD"], **options)
        before = [param.detach().clone() for param in model.parameters()]
        backward(loss_of(model, 0), optimizer)
        with pytest.raises(RuntimeError, match=r"call optimizer.backward\(loss\) instead of loss.backward"):
            optimizer.step()
        assert_equal_bits(list(model.parameters()), before)
        optimizer.update_master_grads()
        optimizer.step()
        assert not torch.equal(model.norm.weight, before[2])
