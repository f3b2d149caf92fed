"""FusedAdagrad against torch.optim.Adagrad in float64."""

from typing import Any

import pytest
import torch

from apex.optimizers import FusedAdagrad
from tests.optimizers import helpers
from tests.optimizers.helpers import Reference, parameters
from tests.support.harness import Route, routes


def ours(lr: Any = 0.05, **options: Any) -> helpers.Factory:
    return lambda params: FusedAdagrad(params, lr, **options)


def theirs(lr: float = 0.05, **options: Any) -> helpers.Factory:
    return lambda params: torch.optim.Adagrad(params, lr, **options)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"eps": 1e-3}], ids=str)
def test_matches_torch(options: dict[str, Any], route: Route) -> None:
    helpers.check_training(ours(**options), theirs(**options), route)


class DecoupledAdagrad(Reference):
    def update(self, p, g, state, group) -> None:
        total = state.setdefault("sum", torch.zeros_like(p)).add_(g * g)
        p.sub_(group["lr"] * (g / (total.sqrt() + group["eps"]) + group["weight_decay"] * p))


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_decoupled_decay(weight_decay: float, route: Route) -> None:
    options = {"lr": 0.05, "eps": 1e-10, "weight_decay": weight_decay}
    helpers.check_training(
        ours(**options, adagrad_w_mode=True), lambda params: DecoupledAdagrad(params, **options), route
    )


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_groups_and_late_gradients(route: Route) -> None:
    groups = [{"lr": 0.02, "eps": 1e-5}, {"lr": 0.3, "weight_decay": 0.1}]
    absent = lambda step: (0, 2) if step < 5 else (1,) if step % 7 == 0 else ()  # noqa: E731
    helpers.check_training(ours(), theirs(), route, groups=groups, absent=absent)


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights(dtype: torch.dtype, route: Route) -> None:
    helpers.check_master_weights(
        ours(weight_decay=0.1, master_weights=True), theirs(weight_decay=0.1), route, dtype=dtype, steps=30
    )


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("capturable", [False, True])
def test_resume(capturable: bool, route: Route) -> None:
    helpers.check_resume(ours(capturable=capturable), route)


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_resume_with_masters_and_with_stochastic_rounding(route: Route) -> None:
    helpers.check_resume(ours(master_weights=True), route, dtype=torch.bfloat16)
    helpers.check_resume(ours(stochastic_rounding=True), route, dtype=torch.bfloat16)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize(
    "torchs", [{}, {"weight_decay": 0.1}, {"lr_decay": 0.1}, {"initial_accumulator_value": 0.5}], ids=str
)
def test_state_dicts_are_those_of_torch(torchs: dict[str, Any], route: Route) -> None:
    """Options that only PyTorch's has come along with its state."""
    shared = {name: value for name, value in torchs.items() if name == "weight_decay"}
    if torchs == shared:
        helpers.check_interchange(ours(**shared), theirs(**torchs), route)
    else:
        loaded = lambda params: _loaded(FusedAdagrad(params), torchs)  # noqa: E731
        helpers.check_training(loaded, theirs(**torchs), route, steps=10)


def _loaded(optimizer: FusedAdagrad, torchs: dict[str, Any]) -> FusedAdagrad:
    params = optimizer.param_groups[0]["params"]
    saved = torch.optim.Adagrad(params, 0.05, **torchs).state_dict()
    optimizer.load_state_dict(saved)
    return optimizer


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("capturable", [False, True])
def test_loss_scaling(capturable: bool, route: Route) -> None:
    helpers.check_scaler(ours(weight_decay=0.1, capturable=capturable), route)


def test_what_clients_read() -> None:
    optimizer = FusedAdagrad(parameters())
    assert optimizer.defaults == {"lr": 0.01, "eps": 1e-10, "weight_decay": 0.0}
    assert optimizer.adagrad_w_mode == 0
    assert optimizer.set_grad_none


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"eps": -1.0}, {"weight_decay": -1.0}], ids=str)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is negative"):
        FusedAdagrad(parameters(), **options)


@pytest.mark.parametrize("route", helpers.CPU_ROUTES)
def test_many_steps(route: Route) -> None:
    helpers.check_training(ours(weight_decay=0.1), theirs(weight_decay=0.1), route, steps=helpers.many_steps(route))


@pytest.mark.gpu
@pytest.mark.parametrize("adagrad_w_mode", [False, True])
def test_cuda_graph(adagrad_w_mode: bool) -> None:
    helpers.check_graph(ours(weight_decay=0.1, adagrad_w_mode=adagrad_w_mode, capturable=True))
