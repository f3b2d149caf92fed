"""FusedNovoGrad against NovoGrad written out in float64."""

from typing import Any

import pytest
import torch

from apex.optimizers import FusedNovoGrad
from tests.optimizers import helpers
from tests.optimizers.helpers import parameters, set_gradients
from tests.optimizers.references import NovoGrad
from tests.support.harness import Route, assert_equal_bits, routes

FLAGS: dict[str, dict[str, Any]] = {
    "default": {},
    "decay": {"weight_decay": 0.1},
    "inside": {"weight_decay": 0.1, "reg_inside_moment": True},
    "zero": {"init_zero": True, "weight_decay": 0.1},
    "maximum": {"norm_type": 0, "weight_decay": 0.1},
    "maximum-zero-inside": {"norm_type": 0, "init_zero": True, "reg_inside_moment": True, "betas": (0.95, 0.98)},
    "no-correction": {"bias_correction": False, "eps": 1e-3},
    "no-averaging": {"grad_averaging": False},
    "no-averaging-inside": {"grad_averaging": False, "reg_inside_moment": True, "bias_correction": False},
}


def ours(**options: Any) -> helpers.Factory:
    return lambda params: FusedNovoGrad(params, **{"lr": 0.01, **options})


def exact(**options: Any) -> helpers.Factory:
    return lambda params: NovoGrad(params, **{"lr": 0.01, **options})


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_matches_the_formula(flags: dict[str, Any], route: Route) -> None:
    helpers.check_training(ours(**flags), exact(**flags), route)


@pytest.mark.parametrize("route", routes())
def test_numbers_on_the_device(route: Route) -> None:
    lr = torch.tensor(0.01, dtype=torch.float64, device=route.device)
    helpers.check_training(ours(lr=lr, capturable=True, **FLAGS["inside"]), exact(**FLAGS["inside"]), route)


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("init_zero", [False, True])
def test_groups_and_late_gradients(init_zero: bool, route: Route) -> None:
    """The average of a late parameter starts with its own first norm."""
    groups = [{"lr": 0.02, "weight_decay": 0.1}, {"lr": 0.03, "betas": (0.8, 0.9), "norm_type": 0}]
    absent = lambda step: (0,) if step < 5 else (1,) if step % 7 == 0 else ()  # noqa: E731
    options = {"init_zero": init_zero}
    helpers.check_training(ours(**options), exact(**options), route, groups=groups, absent=absent)


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights(dtype: torch.dtype, route: Route) -> None:
    flags = FLAGS["decay"]
    helpers.check_master_weights(ours(**flags, master_weights=True), exact(**flags), route, dtype=dtype)


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("options", [{}, {"norm_type": 0}, {"init_zero": True}, {"capturable": True}], ids=str)
def test_resume(options: dict[str, Any], route: Route) -> None:
    helpers.check_resume(ours(**options), route)


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_resume_with_masters_and_with_stochastic_rounding(route: Route) -> None:
    helpers.check_resume(ours(master_weights=True), route, dtype=torch.bfloat16)
    helpers.check_resume(ours(stochastic_rounding=True), route, dtype=torch.bfloat16)


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("flags", ["default", "maximum-zero-inside"])
@pytest.mark.parametrize("capturable", [False, True])
def test_loss_scaling(capturable: bool, flags: str, route: Route) -> None:
    helpers.check_scaler(ours(**FLAGS[flags], capturable=capturable), route)


@pytest.mark.parametrize("norm_type", [0, 2])
def test_checkpoints_of_the_original(norm_type: int) -> None:
    """The original has norms in the group: a tensor for 16-bit parameters, one for the others, in order."""
    params = [p for pair in zip(parameters(), parameters(dtype=torch.float16, seed=1), strict=True) for p in pair]
    optimizer = FusedNovoGrad(params, norm_type=norm_type)
    absent = (4, 5)  # these have no state
    for step in range(3):
        set_gradients(params, step, absent=absent)
        optimizer.step()
    saved = helpers.through_a_file(optimizer.state_dict())
    lists = saved["param_groups"][0]["exp_avg_sq"]
    assert [norms.shape for norms in lists] == [(2,), (2,)]
    averages = torch.stack([optimizer.state[p]["exp_avg_sq"] for p in params[:4]])
    torch.testing.assert_close(torch.stack(lists[::-1], 1).flatten(), averages.sqrt() if norm_type == 2 else averages)
    for state in saved["state"].values():
        del state["exp_avg_sq"], state["step"]
    twin_params = helpers.same_copy(params)
    twin = FusedNovoGrad(twin_params, norm_type=norm_type)
    twin.load_state_dict(saved)
    assert "exp_avg_sq" not in twin.param_groups[0]
    for each, tensors in ((optimizer, params), (twin, twin_params)):
        set_gradients(tensors, 3)
        each.step()
    for found, wanted in zip(helpers.state_tensors(twin), helpers.state_tensors(optimizer), strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_checkpoint_whose_norms_do_not_fit_changes_nothing() -> None:
    params = parameters()
    optimizer = FusedNovoGrad(params)
    set_gradients(params, 0)
    optimizer.step()
    before = helpers.state_tensors(optimizer)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["exp_avg_sq"][1] = torch.ones(7)
    with pytest.raises(ValueError, match="has 0 norms of 16-bit parameters and 7 of others; the state has 0 and 3"):
        optimizer.load_state_dict(saved)
    assert_equal_bits(before, helpers.state_tensors(optimizer))


def test_state_that_a_user_moved() -> None:
    """State tensors that were replaced by others are what the next step goes on from."""
    params, twins = parameters(), parameters()
    optimizers = [FusedNovoGrad(params), FusedNovoGrad(twins)]
    for step in range(4):
        for optimizer, tensors in zip(optimizers, (params, twins), strict=True):
            set_gradients(tensors, step)
            optimizer.step()
        for state in optimizers[1].state.values():
            for name, value in state.items():
                state[name] = value.clone()
    assert_equal_bits(params, twins)


def test_a_new_plan_goes_on_with_the_same_averages() -> None:
    """Capturing a CUDA graph makes a new plan, on its stream; averages gathered anew would be so at every replay."""
    params = parameters()
    optimizer = FusedNovoGrad(params, capturable=True)
    addresses = []
    for step in range(3):
        set_gradients(params, step)
        optimizer.step()
        addresses.append([optimizer.state[p]["exp_avg_sq"].data_ptr() for p in params])
        optimizer._group_buckets.clear()
    assert addresses[0] == addresses[1] == addresses[2]


def test_what_clients_read() -> None:
    optimizer = FusedNovoGrad(parameters())
    assert optimizer.defaults == {
        "lr": 1e-3,
        "bias_correction": True,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "grad_averaging": True,
        "norm_type": 2,
        "init_zero": False,
    }
    assert optimizer.moment_mode == 1
    assert FusedNovoGrad(parameters(), reg_inside_moment=True).moment_mode == 0


def test_bad_options() -> None:
    with pytest.raises(RuntimeError, match="AMSGrad"):
        FusedNovoGrad(parameters(), amsgrad=True)
    with pytest.raises(ValueError, match="norm_type=1 is neither 2"):
        FusedNovoGrad(parameters(), norm_type=1)
    for options in ({"lr": -1.0}, {"eps": -1.0}, {"weight_decay": -1.0}, {"betas": (0.9, 1.0)}):
        with pytest.raises(ValueError, match=r"is negative|is not in \[0, 1\)"):
            FusedNovoGrad(parameters(), **options)


@pytest.mark.parametrize("route", helpers.CPU_ROUTES)
def test_many_steps(route: Route) -> None:
    helpers.check_training(ours(**FLAGS["decay"]), exact(**FLAGS["decay"]), route, steps=helpers.many_steps(route))


@pytest.mark.gpu
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_cuda_graph(flags: dict[str, Any]) -> None:
    helpers.check_graph(ours(**flags, capturable=True))
