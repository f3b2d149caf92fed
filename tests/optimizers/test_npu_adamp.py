"""NpuFusedAdamP against the paper's algorithm in float64."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from apex.ops import implementation
from apex.optimizers import NpuFusedAdamP
from tests.optimizers import helpers
from tests.optimizers.helpers import Reference, relative_error, set_gradients
from tests.support.harness import Route, assert_equal_bits, routes

# Rows of two blocks of the interpreter, rows of a part of one, and what has no rows of its own.
SHAPES = ((2, 70), (4, 3, 2), (5,), (2, 0), (1,))
LR = 0.01


class AdamP(Reference):
    """The paper's Algorithm 2, with the cosine test by channel and then for the whole layer."""

    def __init__(self, params: Any, **options: Any) -> None:
        defaults = {
            "lr": LR,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0.0,
            "delta": 0.1,
            "wd_ratio": 0.1,
            "nesterov": False,
        }
        self.taken: Counter[str] = Counter()
        super().__init__(params, **{**defaults, **options})

    def update(self, p, g, state, group) -> None:
        beta1, beta2 = group["betas"]
        step = state["step"] = state.get("step", 0) + 1
        m = state.setdefault("exp_avg", torch.zeros_like(p)).mul_(beta1).add_(g, alpha=1 - beta1)
        v = state.setdefault("exp_avg_sq", torch.zeros_like(p)).mul_(beta2).addcmul_(g, g, value=1 - beta2)
        denominator = (v / (1 - beta2**step)).sqrt() + group["eps"]
        ahead = beta1 * m + (1 - beta1) * g if group["nesterov"] else m
        direction, ratio = self.project(p, g, ahead / denominator, group) if p.ndim > 1 else (ahead / denominator, 1)
        p.mul_(1 - group["lr"] * group["weight_decay"] * ratio)
        p.sub_(group["lr"] / (1 - beta1**step) * direction)

    def project(self, p: Tensor, g: Tensor, direction: Tensor, group: dict[str, Any]) -> tuple[Tensor, float]:
        if not p.numel():
            return direction, 1
        for name, shape in (("channel", (p.shape[0], -1)), ("layer", (1, -1))):
            weights, gradients, step = (t.reshape(shape) for t in (p, g, direction))
            cosines = torch.nn.functional.cosine_similarity(weights, gradients, dim=1, eps=group["eps"]).abs()
            if cosines.max() < group["delta"] / weights.shape[1] ** 0.5:
                self.taken[name] += 1
                unit = weights / (weights.norm(dim=1, keepdim=True) + group["eps"])
                return (step - unit * (unit * step).sum(1, keepdim=True)).reshape(p.shape), group["wd_ratio"]
        self.taken["neither"] += 1
        return direction, 1


def ours(lr: Any = LR, **options: Any) -> helpers.Factory:
    return lambda params: NpuFusedAdamP(params, lr, **options)


FLAGS: dict[str, dict[str, Any]] = {
    "default": {},
    "decay": {"weight_decay": 0.1, "delta": 1.0},
    "nesterov": {"nesterov": True, "weight_decay": 0.1, "delta": 0.6, "wd_ratio": 0.5},
    "betas": {"betas": (0.5, 0.9), "eps": 1e-3, "delta": 1.0},
    "always": {"delta": 1000.0, "weight_decay": 0.1},
}


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_matches_the_paper(flags: dict[str, Any], route: Route) -> None:
    steps = 4 if route == Route("cpu", "triton") else None
    helpers.check_training(ours(**flags), lambda params: AdamP(params, **flags), route, shapes=SHAPES, steps=steps)


def test_the_cases_take_every_branch() -> None:
    references = []

    def reference(params: Any) -> AdamP:
        references.append(AdamP(params, delta=1.0))
        return references[-1]

    helpers.check_training(ours(delta=1.0), reference, Route("cpu", "torch"), shapes=SHAPES, steps=helpers.STEPS)
    assert references[0].taken.keys() == {"channel", "layer", "neither"}


@pytest.mark.parametrize("route", routes())
def test_layouts(route: Route) -> None:
    """channels_last keeps rows together in memory, a transposed matrix does not."""

    def laid_out(dtype: torch.dtype, device: str) -> list[torch.nn.Parameter]:
        generator = torch.Generator().manual_seed(3)
        image = torch.randn(3, 4, 2, 5, generator=generator).to(device, dtype)
        matrix = torch.randn(6, 5, generator=generator).to(device, dtype)
        tensors = (image.contiguous(memory_format=torch.channels_last), matrix.t(), matrix[1:4] + 1)
        return [torch.nn.Parameter(tensor) for tensor in tensors]

    flags = {"delta": 1.0, "weight_decay": 0.1}
    params, exact = laid_out(torch.float32, route.device), laid_out(torch.float64, "cpu")
    strides = [p.stride() for p in params]
    reference = AdamP(exact, **flags)
    with implementation(route.implementation):
        optimizer = NpuFusedAdamP(params, LR, **flags)
        for step in range(10):
            for each, tensors in ((optimizer, params), (reference, exact)):
                set_gradients(tensors, step)
                each.step()
    assert relative_error(params, exact) <= helpers.LIMIT
    assert [p.stride() for p in params] == strides


def test_rows_of_many_sizes() -> None:
    flags = {"delta": 0.9, "weight_decay": 0.1, "nesterov": True}
    shapes = ((3, 70), (9, 5), (4, 16), (2, 1), (3,), (2,), (40,), (0, 4))
    helpers.check_training(ours(**flags), lambda params: AdamP(params, **flags), Route("cpu", "torch"), shapes=shapes)


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_groups_and_late_gradients(route: Route) -> None:
    groups = [{"lr": 0.02, "delta": 100.0}, {"weight_decay": 0.3}]
    absent = lambda step: (0,) if step < 3 else (1,) if step % 4 == 0 else ()  # noqa: E731
    helpers.check_training(ours(), AdamP, route, groups=groups, absent=absent, shapes=SHAPES, steps=8)


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_float64(route: Route) -> None:
    if route.implementation == "triton":
        pytest.skip("the kernels do not take float64")
    params = helpers.parameters(route.device, torch.float64, SHAPES)
    exact = helpers.exact_copy(params)
    with implementation(route.implementation):
        for make, tensors in ((ours(delta=1.0), params), (lambda p: AdamP(p, delta=1.0), exact)):
            optimizer = make(tensors)
            for step in range(20):
                set_gradients(tensors, step)
                optimizer.step()
    assert relative_error(params, exact) <= 1e-8  # norms are handed on in float32


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_master_weights(route: Route) -> None:
    flags = {"delta": 1.0, "weight_decay": 0.1}
    helpers.check_master_weights(
        ours(**flags, master_weights=True), lambda params: AdamP(params, **flags), route, steps=8
    )


def test_stochastic_rounding_is_the_same_by_both_routes() -> None:
    pytest.importorskip("triton")
    results = []
    for route in (Route("cpu", "torch"), Route("cpu", "triton")):
        params = helpers.parameters(dtype=torch.bfloat16, shapes=((3, 70), (7,)))
        with implementation(route.implementation):
            optimizer = NpuFusedAdamP(params, LR, delta=100.0, stochastic_rounding=True)
            set_gradients(params, 0)
            optimizer.step()
        results.append(torch.cat([p.detach().float().flatten() for p in params]))
    # A sum in another order may change the last bit of a float32, and with it one rounding in 65536.
    assert (results[0] != results[1]).sum() <= 1


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"nesterov": True, "weight_decay": 0.1, "delta": 1.0}, torch.float32),
        ({"capturable": True}, torch.float32),
        ({"master_weights": True}, torch.bfloat16),
        ({"stochastic_rounding": True}, torch.bfloat16),
    ],
    ids=str,
)
def test_resume(options: dict[str, Any], dtype: torch.dtype, route: Route) -> None:
    helpers.check_resume(ours(**options), route, dtype=dtype, steps=2)


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("capturable", [False, True])
def test_loss_scaling(capturable: bool, route: Route) -> None:
    helpers.check_scaler(ours(weight_decay=0.1, delta=1.0, capturable=capturable), route)


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_two_runs_have_equal_bits(route: Route) -> None:
    runs = []
    with implementation(route.implementation):
        for _ in range(2):
            params = helpers.parameters(route.device, shapes=SHAPES)
            optimizer = NpuFusedAdamP(params, LR, delta=1.0)
            for step in range(3):
                set_gradients(params, step)
                optimizer.step()
            runs.append(params)
    assert_equal_bits(*runs)


def test_defaults_and_bad_options() -> None:
    optimizer = NpuFusedAdamP(helpers.parameters())
    assert optimizer.defaults == {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0,
        "delta": 0.1,
        "wd_ratio": 0.1,
        "nesterov": False,
    }
    for options in ({"lr": -1.0}, {"eps": -1.0}, {"weight_decay": -1.0}, {"delta": -1.0}, {"wd_ratio": -1.0}):
        with pytest.raises(ValueError, match="is negative"):
            NpuFusedAdamP(helpers.parameters(), **options)
    with pytest.raises(ValueError, match=r"betas\[1\]"):
        NpuFusedAdamP(helpers.parameters(), betas=(0.9, 1.0))


@pytest.mark.gpu
def test_no_wait_for_the_gpu() -> None:
    params = helpers.parameters("cuda", shapes=SHAPES)
    optimizer = NpuFusedAdamP(params, LR, weight_decay=0.1)
    for step in range(3):
        set_gradients(params, step)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_cuda_graph() -> None:
    helpers.check_graph(ours(weight_decay=0.1, delta=1.0, capturable=True))
