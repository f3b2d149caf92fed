"""Lion, AdEMAMix, NAdam, RAdam and Schedule-Free AdamW against their definitions in float64, over 20 steps."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex import graphs
from apex.ops import _graph_numbers, implementation
from apex.optimizers import FusedAdEMAMix, FusedLion, FusedNAdam, FusedRAdam, FusedScheduleFreeAdamW
from tests.support.harness import Route, routes

SHAPES = ((7,), (30, 20), (64,))
STEPS = 20


def make(dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]


def gradient(shape: Any, step: int, place: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + place), dtype=torch.float64)


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = STEPS, first: int = 0) -> None:
    for step in range(first, first + steps):
        for place, param in enumerate(params):
            param.grad = gradient(param.shape, step, place).to(param.device, param.dtype)
        optimizer.step()


def lion(p: Tensor, gradients: list[Tensor], cautious: bool = False) -> Tensor:
    m = torch.zeros_like(p)
    for g in gradients:
        u = m.lerp(g, 0.1).sign()
        decay = torch.where(u * p >= 0, 0.3 * p, 0.0) if cautious else 0.3 * p
        p = p - 0.01 * (u + decay)
        m = m.lerp(g, 0.01)
    return p


def cautious(size: float, update: Tensor, p: Tensor) -> Tensor:
    """Return the parameter after an update and a decay of 0.3 where it has the update's sign."""
    return p - size * (update + torch.where(update * p >= 0, 0.3 * p, 0.0))


def nadam(p: Tensor, gradients: list[Tensor]) -> Tensor:
    m, v, product = torch.zeros_like(p), torch.zeros_like(p), 1.0
    for t, g in enumerate(gradients, 1):
        factor, following = (0.9 * (1 - 0.5 * 0.96 ** (count * 0.004)) for count in (t, t + 1))
        product *= factor
        m, v = m.lerp(g, 0.1), v.lerp(g * g, 0.001)
        nesterov = (1 - factor) / (1 - product) * g + following / (1 - product * following) * m
        p = cautious(0.01, nesterov / ((v / (1 - 0.999**t)).sqrt() + 1e-8), p)
    return p


def radam(p: Tensor, gradients: list[Tensor]) -> Tensor:
    m, v, most = torch.zeros_like(p), torch.zeros_like(p), 2 / (1 - 0.999) - 1
    for t, g in enumerate(gradients, 1):
        m, v = m.lerp(g, 0.1), v.lerp(g * g, 0.001)
        update, power = m / (1 - 0.9**t), 0.999**t
        length = most - 2 * t * power / (1 - power)
        if length > 5:
            variance = (length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length)
            update = update * (variance * (1 - power)) ** 0.5 / (v.sqrt() + 1e-8)
        p = cautious(0.01, update, p)
    return p


def ademamix(p: Tensor, gradients: list[Tensor], warmup: int = 0) -> Tensor:
    fast, slow, v = (torch.zeros_like(p) for _ in range(3))
    half_life = lambda beta: math.log(0.5) / math.log(beta) - 1  # noqa: E731
    for t, g in enumerate(gradients, 1):
        alpha, beta3 = 2.0, 0.9999
        if warmup:
            share = min(t / warmup, 1.0)
            alpha *= share
            beta3 = 0.5 ** (1 / ((1 - share) * half_life(0.9) + share * half_life(0.9999) + 1))
        fast, slow, v = fast.lerp(g, 0.1), slow.lerp(g, 1 - beta3), v.lerp(g * g, 0.001)
        update = (fast / (1 - 0.9**t) + alpha * slow) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        p = p - 0.01 * (update + 0.3 * p)
    return p


def schedule_free(p: Tensor, gradients: list[Tensor], warmup: int = 0, evaluated: bool = False) -> Tensor:
    y, z, v, total, largest = p, p, torch.zeros_like(p), 0.0, 0.0
    for t, g in enumerate(gradients, 1):
        lr = 0.01 * (min(t / warmup, 1.0) if warmup else 1.0)
        largest = max(lr, largest)
        weight = t**0.5 * largest**2
        total += weight
        c = weight / total
        v = v.lerp(g * g, 0.001)
        d = g / ((v / (1 - 0.999**t)).sqrt() + 1e-8) + 0.3 * y
        y = y.lerp(z, c) + lr * (0.9 * (1 - c) - 1) * d
        z = z - lr * d
    return y.lerp(z, 1 - 1 / 0.9) if evaluated else y


Case = tuple[Callable[..., Any], dict[str, Any], Callable[[Tensor, list[Tensor]], Tensor]]
DECAY = {"lr": 0.01, "weight_decay": 0.3}
CAUTIOUS = DECAY | {"decoupled_weight_decay": True, "cautious_weight_decay": True}
CASES: dict[str, Case] = {
    "NAdam, cautious": (FusedNAdam, CAUTIOUS, nadam),
    "RAdam, cautious": (FusedRAdam, CAUTIOUS, radam),
    "Lion": (FusedLion, DECAY, lion),
    "Lion, cautious": (FusedLion, DECAY | {"cautious_weight_decay": True}, lambda p, g: lion(p, g, True)),
    "AdEMAMix": (FusedAdEMAMix, DECAY, ademamix),
    "AdEMAMix, warm-ups": (
        FusedAdEMAMix,
        DECAY | {"alpha_warmup": 12, "beta3_warmup": 12},
        lambda p, g: ademamix(p, g, 12),
    ),
    "Schedule-Free": (FusedScheduleFreeAdamW, DECAY | {"r": 0.5}, schedule_free),
    "Schedule-Free, warm-up": (
        FusedScheduleFreeAdamW,
        DECAY | {"r": 0.5, "warmup_steps": 9},
        lambda p, g: schedule_free(p, g, 9),
    ),
}
OF_TORCH: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "NAdam": (FusedNAdam, torch.optim.NAdam, DECAY),
    "NAdam, decoupled": (FusedNAdam, torch.optim.NAdam, DECAY | {"decoupled_weight_decay": True}),
    "RAdam": (FusedRAdam, torch.optim.RAdam, DECAY),
    "RAdam, decoupled": (FusedRAdam, torch.optim.RAdam, DECAY | {"decoupled_weight_decay": True}),
    "RAdam, never rectified": (FusedRAdam, torch.optim.RAdam, DECAY | {"betas": (0.9, 0.6)}),
}


def expected(name: str, steps: int = STEPS) -> list[Tensor]:
    if name in CASES:
        result = CASES[name][2]
        return [
            result(param.detach(), [gradient(param.shape, step, place) for step in range(steps)])
            for place, param in enumerate(make())
        ]
    params = make()
    train(OF_TORCH[name][1](params, **OF_TORCH[name][2]), params, steps)
    return [param.detach() for param in params]


def maker(name: str) -> Callable[..., Any]:
    cls, options = CASES[name][:2] if name in CASES else OF_TORCH[name][::2]
    return lambda params, **more: cls(params, **options, **more)


ALL = [*CASES, *OF_TORCH]


@pytest.mark.parametrize("name", ALL)
def test_float64(name: str) -> None:
    params = make()
    train(maker(name)(params), params)
    for param, truth in zip(params, expected(name), strict=True):
        torch.testing.assert_close(param.detach(), truth, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("name", [name for name in ALL if not name.startswith("Lion")])
def test_float32(name: str, route: Route) -> None:
    params = make(torch.float32, route.device)
    with implementation(route.implementation):
        train(maker(name)(params), params, 6)
    for param, truth in zip(params, expected(name, 6), strict=True):
        torch.testing.assert_close(param.detach().cpu().double(), truth, rtol=2e-5, atol=2e-6)


def test_nadam_goes_on_from_pytorchs_after_steps_of_its_own() -> None:
    params, other = make(), make()
    torchs, fused = torch.optim.NAdam(params, **DECAY), FusedNAdam(other, **DECAY)
    train(torchs, params, 3)
    train(fused, other, 7)
    with torch.no_grad():
        for one, another in zip(other, params, strict=True):
            one.copy_(another)
    fused.load_state_dict(copy.deepcopy(torchs.state_dict()))
    train(torchs, params, 3)
    train(fused, other, 3)
    for one, another in zip(other, params, strict=True):  # the product is saved in float32
        torch.testing.assert_close(one.detach(), another.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ALL)
def test_steps_whose_numbers_a_graph_would_read_again(name: str) -> None:
    """As in the calls before a capture: hyperparameters and counts are numbers that every replay reads."""
    params = make()
    optimizer = maker(name)(params)
    for step in range(STEPS):
        with _graph_numbers.active(_graph_numbers.CaptureContext(False, torch.device("cpu"))):
            train(optimizer, params, 1, first=step)
    for param, truth in zip(params, expected(name), strict=True):
        torch.testing.assert_close(param.detach(), truth, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", ALL)
def test_skipped_steps_do_not_count(name: str) -> None:
    """Neither momentum factors nor weights of steps that were skipped for an overflow take part."""
    params = make()
    optimizer = maker(name)(params)
    for step in range(STEPS):
        for overflows in (True, False) if step in (0, 3) else (False,):
            optimizer.grad_scale, optimizer.found_inf = torch.full((1,), 1.0), torch.full((1,), float(overflows))
            train(optimizer, params, 1, first=step)
            # The host reads a flag of its own at once.
            assert optimizer.param_groups[0]["step"] == step + (not overflows)
    for param, truth in zip(params, expected(name), strict=True):
        torch.testing.assert_close(param.detach(), truth, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", ALL)
def test_a_loaded_optimizer_goes_on_to_the_bit(name: str) -> None:
    params = make(torch.float32)
    optimizer = maker(name)(params)
    train(optimizer, params, 3)
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    other = maker(name)(twins)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, tensors in ((optimizer, params), (other, twins)):
        train(each, tensors, 3, first=3)
    assert all(map(torch.equal, params, twins))


@pytest.mark.parametrize("name", OF_TORCH)
def test_state_dicts_of_torch_both_ways(name: str) -> None:
    results = []
    for first, second in ((0, 1), (1, 0)):
        params = make()
        classes, options = OF_TORCH[name][:2], OF_TORCH[name][2]
        optimizer = classes[first](params, **options)
        train(optimizer, params, 7)
        other = classes[second](params, **options)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(other, params, STEPS - 7, first=7)
        results.append(params)
    for params in results:
        for param, truth in zip(params, expected(name), strict=True):
            torch.testing.assert_close(param.detach(), truth, rtol=1e-5, atol=1e-6)


def test_schedule_free_moves_to_the_average_and_back() -> None:
    for dtype, options in ((torch.float64, {}), (torch.bfloat16, {"master_weights": True})):
        params = make(dtype)
        optimizer = maker("Schedule-Free")(params, **options)
        train(optimizer, params)
        before = [param.detach().clone() for param in params]
        optimizer.eval()
        optimizer.eval()
        if dtype == torch.float64:
            for place, (param, start) in enumerate(zip(params, make(), strict=True)):
                gradients = [gradient(param.shape, step, place) for step in range(STEPS)]
                truth = schedule_free(start.detach(), gradients, evaluated=True)
                torch.testing.assert_close(param.detach(), truth, rtol=1e-7, atol=1e-8)
        with pytest.raises(RuntimeError, match=r"needs train\(\)"):
            train(optimizer, params, 1)
        assert not all(map(torch.equal, params, before))
        optimizer.train()
        for param, old in zip(params, before, strict=True):
            torch.testing.assert_close(param.detach(), old)


def test_a_step_refused_in_evaluation_changes_nothing() -> None:
    """One of two groups in evaluation: the other one was updated, and state was made, before the error."""
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = FusedScheduleFreeAdamW([{"params": [param]} for param in params])
    optimizer.param_groups[1]["train_mode"] = False
    for param in params:
        param.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"needs train\(\)"):
        optimizer.step()
    assert not optimizer.state
    assert "step" not in optimizer.param_groups[0]
    assert torch.equal(params[0], torch.ones(3))


@pytest.mark.parametrize("cls", [FusedLion, FusedAdEMAMix])
def test_state_in_8_bits(cls: Callable[..., Any]) -> None:
    params, exact = make(torch.bfloat16), make()
    optimizer = cls(params, lr=0.01, state_format="int8", master_bits=24)
    train(optimizer, params, 10)
    train(cls(exact, lr=0.01), exact, 10)
    for param, truth, start in zip(optimizer.master_parameters(), exact, make(), strict=True):
        assert (param.double() - truth).norm() < 0.2 * (truth - start).norm()


REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (FusedAdEMAMix, {"betas": (0.9, 0.99)}, "are not three numbers"),
    (FusedAdEMAMix, {"betas": (0.9, 0.99, 1.0)}, r"not in \[0, 1\)"),
    (FusedAdEMAMix, {"alpha_warmup": -1}, "alpha_warmup"),
    (FusedNAdam, {"momentum_decay": -1.0}, "momentum_decay"),
    (FusedScheduleFreeAdamW, {"betas": (0.0, 0.9)}, r"betas\[0\]"),
    (FusedScheduleFreeAdamW, {"warmup_steps": 1.5}, "warmup_steps"),
    (FusedRAdam, {"state_format": "int8"}, "FusedRAdam keeps float32 state"),
    (FusedLion, {"lr": -1.0}, "lr"),
    (FusedNAdam, {"cautious_weight_decay": True}, "needs decoupled_weight_decay=True"),
    (FusedRAdam, {"cautious_weight_decay": True}, "needs decoupled_weight_decay=True"),
]


@pytest.mark.parametrize(("cls", "options", "words"), REFUSED, ids=str)
def test_refusals(cls: Callable[..., Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cls(make(), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
def test_captured_steps_are_eager_steps(name: str) -> None:
    results = []
    for captured in (False, True):
        params = make(torch.float32, "cuda")
        optimizer = maker(name)(params)

        def step(scale: Tensor, params: Any = params, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            sum((param * scale).square().sum() for param in params).backward()
            optimizer.step()

        run = graphs.capture(step) if captured else step
        for index in range(10):
            run(torch.full((), 1.0 + index, device="cuda"))
        results.append([param.detach().clone() for param in params])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
