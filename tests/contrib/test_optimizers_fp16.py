"""FP16_Optimizer: masters, loss scaling and checkpoints."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import apex
from apex.contrib.optimizers import FP16_Optimizer, FusedAdam, FusedSGD
from apex.ops import implementation
from tests.contrib.test_optimizers_fused import EarlyAdam
from tests.optimizers.helpers import relative_error, through_a_file
from tests.support.harness import Route, assert_equal_bits, routes


def model(dtype: torch.dtype, device: str = "cpu") -> nn.Linear:
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(6, 4)
    with torch.no_grad():
        for p in linear.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return linear.to(device, dtype)


def loss_of(linear: nn.Linear, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(3, 6, generator=generator).to(linear.weight.device, linear.weight.dtype)
    return linear(x).float().square().mean()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "scaling",
    [{"static_loss_scale": 16.0}, {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 32.0}}, {}],
)
@pytest.mark.parametrize(
    ("make", "make_exact"),
    [
        (lambda p: FusedAdam(p, lr=0.01), lambda p: EarlyAdam(p, lr=0.01, betas=(0.9, 0.999))),
        (lambda p: FusedSGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    ],
)
def test_masters_follow_the_gradients(make, make_exact, scaling: dict, dtype: torch.dtype, route: Route) -> None:
    """The reference gets the gradients that were really computed, unscaled, in float64."""
    linear = model(dtype, route.device)
    with implementation(route.implementation):
        optimizer = FP16_Optimizer(make(linear.parameters()), **scaling)
        exact = [nn.Parameter(p.detach().double().cpu()) for p in linear.parameters()]
        reference = make_exact(exact)
        for step in range(5):
            optimizer.zero_grad()
            optimizer.backward(loss_of(linear, step))
            for p, copy in zip(linear.parameters(), exact, strict=True):
                copy.grad = p.grad.double().cpu() / optimizer.cur_scale
            optimizer.step()
            reference.step()
    masters = optimizer.fp32_groups[0]
    assert {master.dtype for master in masters} == {torch.float32}
    assert relative_error(masters, exact) <= 1e-6
    for p, master in zip(linear.parameters(), masters, strict=True):
        torch.testing.assert_close(p.detach(), master.to(dtype))


def overflow(optimizer: FP16_Optimizer, linear: nn.Linear, bad: bool) -> None:
    optimizer.zero_grad()
    optimizer.backward(loss_of(linear, 0))
    if bad:
        linear.weight.grad[0, 0] = float("inf")
    optimizer.step()


def test_dynamic_scale_goes_down_and_up() -> None:
    linear = model(torch.float32)
    arguments = {"init_scale": 64.0, "scale_factor": 4.0, "scale_window": 3}
    optimizer = FP16_Optimizer(FusedAdam(linear.parameters()), dynamic_loss_scale=True, dynamic_loss_args=arguments)
    scales = []
    for bad in (True, False, False, False, False, True, True, True, False):
        before = [p.detach().clone() for p in linear.parameters()]
        overflow(optimizer, linear, bad)
        scales.append(optimizer.cur_scale)
        after = [p.detach() for p in linear.parameters()]
        assert all(map(torch.equal, before, after)) == bad
    assert scales == [16.0, 16.0, 16.0, 64.0, 64.0, 16.0, 4.0, 1.0, 1.0]
    overflow(optimizer, linear, True)
    assert optimizer.cur_scale == 1  # and no less


def test_defaults_of_the_dynamic_scale() -> None:
    optimizer = FP16_Optimizer(FusedAdam(model(torch.float16).parameters()), dynamic_loss_scale=True)
    assert (optimizer.cur_scale, optimizer.scale_factor, optimizer.scale_window) == (2**16, 2, 1000)
    assert optimizer.last_overflow_iter == -1


def test_static_scale_stays_and_overflow_skips(caplog: pytest.LogCaptureFixture) -> None:
    linear = model(torch.float32)
    optimizer = FP16_Optimizer(FusedSGD(linear.parameters(), lr=0.1), static_loss_scale=4.0)
    before = [p.detach().clone() for p in linear.parameters()]
    with caplog.at_level("INFO", logger="apex.contrib.optimizers"):
        overflow(optimizer, linear, True)
    assert "overflowed in iteration 0" in caplog.text
    assert_equal_bits(list(linear.parameters()), before)
    assert optimizer.cur_scale == 4.0
    assert optimizer.cur_iter == 1


def test_parameters_without_gradient_stay() -> None:
    linear = model(torch.float16)
    linear.bias.requires_grad_(False)
    optimizer = FP16_Optimizer(FusedAdam(linear.parameters(), lr=0.1))
    bias = linear.bias.detach().clone()
    overflow(optimizer, linear, False)
    assert_equal_bits([linear.bias], [bias])
    optimizer.zero_grad()
    optimizer.step()


def test_zero_grad() -> None:
    linear = model(torch.float16)
    optimizer = FP16_Optimizer(FusedAdam(linear.parameters()))
    optimizer.backward(loss_of(linear, 0))
    optimizer.zero_grad(set_grads_to_None=False)
    assert all(p.grad is not None and not p.grad.any() for p in linear.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in linear.parameters())


def train(linear: nn.Linear, optimizer: FP16_Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        optimizer.backward(loss_of(linear, step))
        optimizer.step()


@pytest.mark.parametrize("options", [{"dynamic_loss_scale": True}, {"static_loss_scale": 8.0}])
@pytest.mark.parametrize("make", [lambda p: FusedAdam(p, lr=0.01), lambda p: FusedSGD(p, lr=0.1, momentum=0.9)])
def test_resuming_is_exact(make, options: dict[str, Any]) -> None:
    linear, twin = model(torch.float16), model(torch.float16)
    optimizer = FP16_Optimizer(make(linear.parameters()), **options)
    train(linear, optimizer, range(4))
    weights = through_a_file(linear.state_dict())
    saved = through_a_file(optimizer.state_dict())
    expected = {"dynamic_loss_scale", "cur_scale", "cur_iter", "optimizer_state_dict", "fp32_groups"}
    if options.get("dynamic_loss_scale"):
        expected |= {"last_overflow_iter", "scale_factor", "scale_window"}
    assert set(saved) == expected
    resumed = FP16_Optimizer(make(twin.parameters()), static_loss_scale=3.0)
    twin.load_state_dict(weights)
    resumed.load_state_dict(saved)
    assert resumed.cur_scale == optimizer.cur_scale
    assert resumed.cur_iter == 4
    for each, other in ((linear, optimizer), (twin, resumed)):
        train(each, other, range(4, 8))
    assert_equal_bits(list(linear.parameters()), list(twin.parameters()))
    assert_equal_bits(optimizer.fp32_groups[0], resumed.fp32_groups[0])


def test_groups_and_state_are_the_optimizers() -> None:
    linear = model(torch.float16)
    inner = FusedAdam([{"params": [linear.weight]}, {"params": [linear.bias], "lr": 0.5}], lr=0.1)
    optimizer = FP16_Optimizer(inner)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.param_groups[1]["params"] is optimizer.fp32_groups[1]
    assert optimizer.fp16_groups == [[linear.weight], [linear.bias]]
    optimizer.param_groups[0]["lr"] = 0.0
    before = linear.weight.detach().clone()
    overflow(optimizer, linear, False)
    assert_equal_bits([linear.weight], [before])
    groups, state = inner.param_groups, inner.state
    optimizer.param_groups, optimizer.state = groups, state
    assert inner.param_groups is groups


def test_max_grad_norm_sees_the_unscaled_norm() -> None:
    results = []
    for scale in (1.0, 256.0):
        linear = model(torch.float32)
        inner = FusedAdam(linear.parameters(), lr=0.1, max_grad_norm=0.1, eps=1e-2)
        optimizer = FP16_Optimizer(inner, static_loss_scale=scale)
        train(linear, optimizer, range(3))
        results.append([p.detach() for p in linear.parameters()])
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second)


def test_refusals() -> None:
    linear = model(torch.float16)
    with pytest.raises(TypeError, match="SGD, whose step takes no `grads`"):
        FP16_Optimizer(torch.optim.SGD(linear.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"dynamic_loss_args has \['window'\]"):
        FP16_Optimizer(FusedAdam(linear.parameters()), dynamic_loss_scale=True, dynamic_loss_args={"window": 3})
    optimizer = FP16_Optimizer(FusedAdam(linear.parameters()))
    with pytest.raises(ValueError, match="no closure"):
        optimizer.step(lambda: None)
    other = FP16_Optimizer(FusedAdam(nn.Linear(2, 2).parameters()))
    with pytest.raises(ValueError, match="fp32_groups"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.cur_iter == 0


def test_found_after_a_bare_import() -> None:
    from apex.contrib.optimizers.fp16_optimizer import FP16_Optimizer as same

    assert apex.contrib.optimizers.FP16_Optimizer is FP16_Optimizer is same
