"""NpuFusedBertAdam, Lamb, NpuFusedLamb and NpuFusedRMSpropTF against their formulas in float64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from apex.ops import implementation
from apex.optimizers import Lamb, NpuFusedBertAdam, NpuFusedLamb, NpuFusedRMSpropTF
from apex.optimizers.npu_fused_bert_adam import warmup_constant, warmup_cosine, warmup_linear, warmup_poly
from tests.optimizers import helpers
from tests.optimizers.helpers import Reference, parameters, set_gradients
from tests.support.harness import Route, routes


def norm_of(gradients: list[torch.Tensor]) -> float:
    return torch.cat([g.flatten() for g in gradients]).norm().item()


class BertAdam(Reference):
    """Adam without bias correction, decay beside it, the norm over all gradients limited, a schedule."""

    def __init__(self, params: Any, **options: Any) -> None:
        defaults = {"lr": 0.01, "warmup": -1, "t_total": -1, "schedule": "warmup_linear", "b1": 0.9, "b2": 0.99}
        defaults |= {"e": 1e-6, "weight_decay": 0.01, "max_grad_norm": -1}
        super().__init__(params, **{**defaults, **options})

    def prepare(self, gradients) -> None:
        self.norm = norm_of(gradients)

    def update(self, p, g, state, group) -> None:
        if 0 < group["max_grad_norm"] < self.norm:
            g = g * group["max_grad_norm"] / self.norm
        m = state.setdefault("m", torch.zeros_like(p)).mul_(group["b1"]).add_(g, alpha=1 - group["b1"])
        v = state.setdefault("v", torch.zeros_like(p)).mul_(group["b2"]).add_(g * g, alpha=1 - group["b2"])
        lr, done = group["lr"], state.get("done", 0)
        state["done"] = done + 1
        if group["t_total"] != -1:
            lr *= self.schedule(group["schedule"], done / group["t_total"], group["warmup"])
        p.sub_(lr * (m / (v.sqrt() + group["e"]) + group["weight_decay"] * p))

    @staticmethod
    def schedule(name: str, x: float, warmup: float) -> float:
        if x < warmup:
            return x / warmup
        start = max(warmup, 0.0)
        return {
            "warmup_cosine": 0.5 * (1 + math.cos(math.pi * x)),
            "warmup_constant": 1.0,
            "warmup_linear": max((1 - x) / (1 - start), 0.0),
            "warmup_poly": max(1 - x, 0.0) ** 0.5,
        }[name]


class PlainLamb(Reference):
    def __init__(self, params: Any, **options: Any) -> None:
        defaults = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0}
        self.adam = options.pop("adam", False)
        self.clips = options.pop("use_global_grad_norm", False)
        super().__init__(params, **{**defaults, **options})

    def prepare(self, gradients) -> None:
        self.divisor = max(1.0, norm_of(gradients)) if self.clips else 1.0

    def update(self, p, g, state, group) -> None:
        g = g / self.divisor
        beta1, beta2 = group["betas"]
        m = state.setdefault("m", torch.zeros_like(p)).mul_(beta1).add_(g, alpha=1 - beta1)
        v = state.setdefault("v", torch.zeros_like(p)).mul_(beta2).add_(g * g, alpha=1 - beta2)
        update = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p
        weight, length = p.norm().clamp(max=10.0).item(), update.norm().item()
        ratio = weight / length if weight > 0 and length > 0 and not self.adam else 1.0
        p.sub_(group["lr"] * ratio * update)


class RMSpropTF(Reference):
    def __init__(self, params: Any, **options: Any) -> None:
        defaults = {"lr": 0.01, "alpha": 0.9, "eps": 1e-10, "weight_decay": 0.0, "momentum": 0.0, "centered": False}
        defaults |= {"decoupled_decay": False, "lr_in_momentum": True}
        super().__init__(params, **{**defaults, **options})

    def update(self, p, g, state, group) -> None:
        lr, decay = group["lr"], group["weight_decay"]
        if group["decoupled_decay"]:
            p.mul_(1 - lr * decay)
        else:
            g = g + decay * p
        square = state.setdefault("square_avg", torch.ones_like(p)).lerp_(g * g, 1 - group["alpha"])
        spread = square
        if group["centered"]:
            spread = square - state.setdefault("grad_avg", torch.zeros_like(p)).lerp_(g, 1 - group["alpha"]) ** 2
        update = g / (spread + group["eps"]).sqrt()
        if not group["momentum"]:
            p.sub_(lr * update)
            return
        buffer = state.setdefault("momentum_buffer", torch.zeros_like(p)).mul_(group["momentum"])
        if group["lr_in_momentum"]:
            p.sub_(buffer.add_(lr * update))
        else:
            p.sub_(lr * buffer.add_(update))


KINDS: dict[str, tuple[Callable[..., torch.optim.Optimizer], Callable[..., Reference]]] = {
    "BertAdam": (NpuFusedBertAdam, BertAdam),
    "Lamb": (Lamb, PlainLamb),
    "FusedLamb": (NpuFusedLamb, PlainLamb),
    "RMSpropTF": (NpuFusedRMSpropTF, RMSpropTF),
}
LONG = {"t_total": 90, "warmup": 0.1}  # the training goes on after its end
CASES: list[tuple[str, dict[str, Any]]] = [
    ("BertAdam", {}),
    ("BertAdam", {"weight_decay": 0.0, "b1": 0.5, "b2": 0.9, "e": 1e-3}),
    ("BertAdam", {"max_grad_norm": 1.0}),
    ("BertAdam", {"max_grad_norm": 1e4}),
    ("BertAdam", {"t_total": 90}),
    *(("BertAdam", {**LONG, "schedule": f"warmup_{name}"}) for name in ("linear", "cosine", "constant", "poly")),
    ("Lamb", {}),
    ("Lamb", {"weight_decay": 0.1, "betas": (0.5, 0.9), "eps": 1e-3}),
    ("Lamb", {"weight_decay": 0.1, "adam": True}),
    ("FusedLamb", {"weight_decay": 0.1}),
    ("FusedLamb", {"use_global_grad_norm": True, "weight_decay": 0.1}),
    ("FusedLamb", {"use_global_grad_norm": True, "adam": True}),
    ("RMSpropTF", {}),
    ("RMSpropTF", {"weight_decay": 0.1, "momentum": 0.9}),
    ("RMSpropTF", {"momentum": 0.9, "lr_in_momentum": False, "centered": True}),
    ("RMSpropTF", {"momentum": 0.9, "decoupled_decay": True, "weight_decay": 0.1}),
    ("RMSpropTF", {"centered": True, "eps": 1e-3, "alpha": 0.5}),
    ("RMSpropTF", {"centered": True, "momentum": 0.5, "decoupled_decay": True, "weight_decay": 0.1}),
]
ONE_OF_EACH = [CASES[2], CASES[5], CASES[10], CASES[13], CASES[17]]
all_cases = pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
one_of_each = pytest.mark.parametrize(("kind", "options"), ONE_OF_EACH, ids=str)


def ours(kind: str, **options: Any) -> helpers.Factory:
    return lambda params: KINDS[kind][0](params, **{"lr": 0.01, **options})


def truth(kind: str, **options: Any) -> helpers.Factory:
    return lambda params: KINDS[kind][1](params, **options)


@pytest.mark.parametrize("route", routes())
@all_cases
def test_matches_the_formula(kind: str, options: dict[str, Any], route: Route) -> None:
    # Schedules have an end to go beyond, which is the host's affair: interpreted kernels need not get there.
    steps = helpers.STEPS if "t_total" in options and route != Route("cpu", "triton") else None
    helpers.check_training(ours(kind, **options), truth(kind, **options), route, steps=steps)


@pytest.mark.parametrize("kind", KINDS)
def test_hundred_steps(kind: str) -> None:
    helpers.check_training(ours(kind), truth(kind), Route("cpu", "torch"), steps=helpers.STEPS)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("kind", ["Lamb", "FusedLamb"])
def test_the_norm_of_weights_is_clamped(kind: str, route: Route) -> None:
    """32 by 32 random weights are about 32 long; none at all and no gradient give a ratio of one."""
    shapes = ((32, 32), (3,))

    def zero_some(optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 0:
            optimizer.param_groups[0]["params"][1].data.zero_()

    helpers.check_training(ours(kind), truth(kind), route, shapes=shapes, before_step=zero_some, steps=4)


@pytest.mark.parametrize("route", routes(interpreter=False))
@one_of_each
def test_groups_and_late_gradients(kind: str, options: dict[str, Any], route: Route) -> None:
    groups = [{"lr": 0.02}, {"weight_decay": 0.2}]
    absent = lambda step: (0, 2) if step < 3 else (1,) if step % 4 == 0 else ()  # noqa: E731
    helpers.check_training(ours(kind, **options), truth(kind, **options), route, groups=groups, absent=absent, steps=12)


@pytest.mark.parametrize("route", routes(interpreter=False))
@one_of_each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights(dtype: torch.dtype, kind: str, options: dict[str, Any], route: Route) -> None:
    helpers.check_master_weights(
        ours(kind, **options, master_weights=True), truth(kind, **options), route, dtype=dtype, steps=10
    )


@pytest.mark.parametrize("route", routes(interpreter=False))
@all_cases
def test_resume(kind: str, options: dict[str, Any], route: Route) -> None:
    helpers.check_resume(ours(kind, **options), route, steps=2)


@pytest.mark.parametrize("route", routes())
@one_of_each
@pytest.mark.parametrize(
    ("more", "dtype"),
    [
        ({"capturable": True}, torch.float32),
        ({"master_weights": True}, torch.bfloat16),
        ({"stochastic_rounding": True}, torch.bfloat16),
    ],
    ids=str,
)
def test_resume_with_options(
    more: dict[str, Any], dtype: torch.dtype, kind: str, options: dict[str, Any], route: Route
) -> None:
    helpers.check_resume(ours(kind, **options, **more), route, dtype=dtype, steps=2)


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("capturable", [False, True])
@one_of_each
def test_loss_scaling(kind: str, options: dict[str, Any], capturable: bool, route: Route) -> None:
    helpers.check_scaler(ours(kind, **options, capturable=capturable), route)


@pytest.mark.gpu
@one_of_each
def test_cuda_graph(kind: str, options: dict[str, Any]) -> None:
    helpers.check_graph(ours(kind, **options, capturable=True))


@pytest.mark.parametrize("schedule", [warmup_cosine, warmup_constant, warmup_linear, warmup_poly])
def test_schedules(schedule: Callable[..., Any]) -> None:
    """Numbers and tensors give the same; a warm-up of -1 is none; nothing strange happens after the end."""
    for x in (0.0, 0.0005, 0.002, 0.05, 0.5, 1.0, 1.5):
        for warmup in (0.002, 0.1, -1, 0):
            expected = BertAdam.schedule(schedule.__name__, x, warmup)
            assert schedule(x, warmup) == pytest.approx(expected, abs=1e-12)
            on_device = schedule(torch.tensor(x, dtype=torch.float64), warmup)
            assert float(on_device) == pytest.approx(expected, abs=1e-12)
        assert schedule(x) == schedule(x, 0.002)
    assert warmup_poly(0.75, degree=2.0) == pytest.approx(0.0625)


@pytest.mark.parametrize("route", routes())
def test_the_norm_of_all_gradients(route: Route) -> None:
    params = parameters(route.device)
    set_gradients(params, 0)
    optimizer = NpuFusedBertAdam(params, 0.1, max_grad_norm=1.0)
    expected = torch.tensor([norm_of([p.grad.double() for p in params])])
    torch.testing.assert_close(optimizer.get_global_grad_norm().cpu(), expected)
    with implementation(route.implementation):
        optimizer.step()
    torch.testing.assert_close(optimizer.global_grad_norm.cpu(), expected)


def test_defaults() -> None:
    params = parameters()
    assert NpuFusedBertAdam(params, 0.1).defaults == {
        "lr": 0.1,
        "schedule": "warmup_linear",
        "warmup": -1,
        "t_total": -1,
        "b1": 0.9,
        "b2": 0.99,
        "e": 1e-6,
        "weight_decay": 0.01,
        "max_grad_norm": -1,
    }
    assert Lamb(params).defaults == {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0}
    assert NpuFusedLamb(params).defaults == Lamb(params).defaults
    assert NpuFusedRMSpropTF(params).defaults == {
        "lr": 1e-2,
        "alpha": 0.9,
        "eps": 1e-10,
        "weight_decay": 0,
        "momentum": 0.0,
        "centered": False,
        "decoupled_decay": False,
        "lr_in_momentum": True,
    }


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: NpuFusedBertAdam(p), "lr"),
        (lambda p: NpuFusedBertAdam(p, -1.0), "lr=-1.0"),
        (lambda p: NpuFusedBertAdam(p, 0.1, warmup=1.0), "warmup=1.0"),
        (lambda p: NpuFusedBertAdam(p, 0.1, warmup=-0.5), "warmup=-0.5"),
        (lambda p: NpuFusedBertAdam(p, 0.1, schedule="linear"), "schedule='linear'"),
        (lambda p: NpuFusedBertAdam(p, 0.1, b1=1.0), "b1=1.0"),
        (lambda p: NpuFusedBertAdam(p, 0.1, b2=-0.1), "b2=-0.1"),
        (lambda p: NpuFusedBertAdam(p, 0.1, e=-1.0), "e=-1.0"),
        (lambda p: Lamb(p, betas=(1.0, 0.9)), r"betas\[0\]"),
        (lambda p: NpuFusedLamb(p, eps=-1.0), "eps=-1.0"),
        (lambda p: NpuFusedRMSpropTF(p, momentum=-1.0), "momentum=-1.0"),
    ],
)
def test_bad_options(make: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(parameters())
