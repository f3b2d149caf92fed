"""FusedLARS against LARS written out in float64."""

from typing import Any

import pytest
import torch

from apex.optimizers import FusedLARS
from tests.optimizers import helpers
from tests.optimizers.helpers import parameters
from tests.optimizers.references import Lars
from tests.support.harness import Route, routes

FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "eps": 0.1},
    "dampening": {"momentum": 0.8, "weight_decay": 0.1, "dampening": 0.3},
    "after": {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "wd_after_momentum": True},
}


def ours(**options: Any) -> helpers.Factory:
    return lambda params: FusedLARS(params, **{"lr": 0.1, "trust_coefficient": 0.05, **options})


def exact(**options: Any) -> helpers.Factory:
    return lambda params: Lars(params, **{"lr": 0.1, "trust_coefficient": 0.05, **options})


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_matches_the_formula(flags: dict[str, Any], route: Route) -> None:
    helpers.check_training(ours(**flags), exact(**flags), route)


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("flags", ["plain", "nesterov", "dampening"])
def test_groups_that_adapt_and_groups_that_do_not(flags: str, route: Route) -> None:
    groups = [{"lr": 0.2}, {"lr": 0.01, "is_skipped": True}]
    absent = lambda step: (0,) if step < 5 else (1,) if step % 7 == 0 else ()  # noqa: E731
    helpers.check_training(ours(**FLAGS[flags]), exact(**FLAGS[flags]), route, groups=groups, absent=absent)


@pytest.mark.parametrize("route", routes())
def test_a_length_of_zero_keeps_the_learning_rate(route: Route) -> None:
    def clear(optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 0:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].zero_()

    helpers.check_training(ours(lr=0.01), exact(lr=0.01), route, before_step=clear, steps=3)


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights(dtype: torch.dtype, route: Route) -> None:
    flags = FLAGS["nesterov"]
    helpers.check_master_weights(ours(**flags, master_weights=True), exact(**flags), route, dtype=dtype)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9, "dampening": 0.2}, {"momentum": 0.9, "capturable": True}], ids=str
)
def test_resume(options: dict[str, Any], route: Route) -> None:
    helpers.check_resume(ours(**options), route)


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_resume_with_masters_and_with_stochastic_rounding(route: Route) -> None:
    helpers.check_resume(ours(momentum=0.9, master_weights=True), route, dtype=torch.bfloat16)
    helpers.check_resume(ours(momentum=0.9, stochastic_rounding=True), route, dtype=torch.bfloat16)


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("flags", ["plain", "nesterov", "dampening"])
def test_loss_scaling(flags: str, route: Route) -> None:
    """The norm of the gradients is taken without the scale."""
    helpers.check_scaler(ours(**FLAGS[flags]), route)


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_a_scale_that_amp_left_is_divided_out(route: Route) -> None:
    def leave_a_scale(optimizer: torch.optim.Optimizer, step: int) -> None:
        if isinstance(optimizer, FusedLARS):
            for p in optimizer.param_groups[0]["params"]:
                p.grad.mul_(4.0)
            optimizer.most_recent_scale = 4.0

    optimizer = helpers.check_training(ours(), exact(), route, before_step=leave_a_scale, steps=5)
    assert optimizer.most_recent_scale == 1.0


def test_what_clients_read() -> None:
    optimizer = FusedLARS(parameters(), lr=0.1, eps=0.5)
    assert optimizer.defaults == {
        "lr": 0.1,
        "momentum": 0,
        "dampening": 0,
        "weight_decay": 0,
        "trust_coefficient": 0.001,
        "eps": 0.5,
        "nesterov": False,
        "is_skipped": False,
    }
    assert (optimizer.eps, optimizer.trust_coefficient) == (0.5, 0.001)
    assert optimizer.get_momentums([])[0] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"momentum": -0.1}, "momentum=-0.1"),
        ({"eps": -0.1}, "eps=-0.1"),
        ({"trust_coefficient": -0.1}, "trust_coefficient=-0.1"),
        ({"nesterov": True}, "nesterov needs a momentum"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FusedLARS(parameters(), **{"lr": 0.1, **options})


@pytest.mark.parametrize("route", helpers.CPU_ROUTES)
def test_many_steps(route: Route) -> None:
    helpers.check_training(
        ours(**FLAGS["nesterov"]), exact(**FLAGS["nesterov"]), route, steps=helpers.many_steps(route)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_cuda_graph(flags: dict[str, Any]) -> None:
    helpers.check_graph(ours(**flags, capturable=True))
