"""FusedSGD against torch.optim.SGD in float64."""

import copy
from typing import Any

import pytest
import torch
from torch.optim.optimizer import required

from apex.ops import implementation
from apex.optimizers import FusedSGD
from tests.optimizers import helpers
from tests.optimizers.helpers import Reference, parameters, set_gradients
from tests.support.harness import Route, assert_equal_bits, routes

FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.9},
    "momentum-decay": {"momentum": 0.9, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    "dampening": {"momentum": 0.8, "weight_decay": 0.1, "dampening": 0.3},
}


def ours(lr: Any = 0.01, **options: Any) -> helpers.Factory:
    return lambda params: FusedSGD(params, lr, **options)


def theirs(lr: float = 0.01, **options: Any) -> helpers.Factory:
    return lambda params: torch.optim.SGD(params, lr, **options)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_matches_torch(flags: dict[str, Any], route: Route) -> None:
    helpers.check_training(ours(**flags), theirs(**flags), route)


@pytest.mark.parametrize("route", routes())
def test_float16_parameters_reach_zero_where_torchs_do(route: Route) -> None:
    """Upstream has torch's numbers to the bit where learning rate and momentum are powers of two."""
    interpreted = route == Route("cpu", "triton")  # where many elements take long
    start = torch.rand(20011 if interpreted else 278011, device=route.device).half()
    param, wanted = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizer, reference = FusedSGD([param], 0.25, momentum=0.125), torch.optim.SGD([wanted], 0.25, momentum=0.125)
    zeros = 0
    with implementation(route.implementation):
        for _ in range(7):
            wanted.grad = param.grad = torch.rand_like(start)
            optimizer.step()
            reference.step()
            zeros += int((wanted == 0).sum())
            assert_equal_bits([param], [wanted])
    assert zeros
    assert_equal_bits([optimizer.state[param]["momentum_buffer"]], [reference.state[wanted]["momentum_buffer"]])


@pytest.mark.parametrize("route", routes())
def test_momentum_is_float32_but_for_float16_parameters_without_masters(route: Route) -> None:
    for dtype, masters, expected in (
        (torch.float16, False, torch.float16),
        (torch.float16, True, torch.float32),
        (torch.bfloat16, False, torch.float32),
        (torch.float32, False, torch.float32),
    ):
        param = torch.nn.Parameter(torch.ones(5, dtype=dtype, device=route.device))
        param.grad = torch.ones_like(param)
        optimizer = FusedSGD([param], 0.1, momentum=0.9, master_weights=masters)
        with implementation(route.implementation):
            optimizer.step()
        assert optimizer.state[param]["momentum_buffer"].dtype == expected


class DecayAfterMomentum(Reference):
    def update(self, p, g, state, group) -> None:
        if group["momentum"]:
            buffer = state.setdefault("momentum_buffer", torch.zeros_like(p))
            buffer.mul_(group["momentum"]).add_(g)
            g = g + group["momentum"] * buffer if group["nesterov"] else buffer
        p.sub_(group["lr"] * (g + group["weight_decay"] * p))


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
def test_decay_after_momentum(momentum: float, nesterov: bool, route: Route) -> None:
    options = {"lr": 0.01, "momentum": momentum, "weight_decay": 0.1, "nesterov": nesterov and momentum > 0}
    helpers.check_training(
        ours(**options, wd_after_momentum=True), lambda params: DecayAfterMomentum(params, **options), route
    )


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_groups_and_schedules(route: Route) -> None:
    """Groups differ in every option, `lr` is required of each, and a schedule changes it."""

    def schedule(optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.02 / (1 + step)

    groups = [{"lr": 0.02, "momentum": 0.9}, {"lr": 0.03, "weight_decay": 0.1}]
    make = lambda params: FusedSGD(params)  # noqa: E731
    helpers.check_training(make, theirs(), route, groups=groups, before_step=schedule)
    with pytest.raises(ValueError, match="lr"):
        FusedSGD(parameters())


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("dampening", [0.0, 0.3])
def test_gradients_that_come_late_and_go(dampening: float, route: Route) -> None:
    """The first step of a late parameter is undampened, like the first step of any."""
    options = {"momentum": 0.9, "dampening": dampening}
    absent = lambda step: (0,) if step < 5 else (1,) if step % 7 == 0 else ()  # noqa: E731
    helpers.check_training(ours(**options), theirs(**options), route, absent=absent)


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("flags", ["plain", "nesterov", "dampening"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights(dtype: torch.dtype, flags: str, route: Route) -> None:
    options = FLAGS[flags]
    helpers.check_master_weights(ours(**options, master_weights=True), theirs(**options), route, dtype=dtype)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.2},
        {"momentum": 0.9, "capturable": True},
    ],
    ids=str,
)
def test_resume(options: dict[str, Any], route: Route) -> None:
    helpers.check_resume(ours(**options), route)


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_resume_with_masters_and_with_stochastic_rounding(route: Route) -> None:
    helpers.check_resume(ours(momentum=0.9, master_weights=True), route, dtype=torch.bfloat16)
    helpers.check_resume(ours(momentum=0.9, stochastic_rounding=True), route, dtype=torch.bfloat16)


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_state_dicts_are_those_of_torch(flags: dict[str, Any], route: Route) -> None:
    helpers.check_interchange(ours(**flags), theirs(**flags), route)


def test_a_buffer_that_torch_has_not_made_yet() -> None:
    params = parameters()
    optimizer = FusedSGD(params, 0.1, momentum=0.9)
    saved = torch.optim.SGD(params, 0.1, momentum=0.9).state_dict()
    saved["state"] = {0: {"momentum_buffer": None}}
    optimizer.load_state_dict(saved)
    set_gradients(params, 0)
    optimizer.step()
    assert optimizer.state[params[0]]["momentum_buffer"].shape == params[0].shape


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("flags", ["plain", "nesterov", "dampening"])
def test_loss_scaling(flags: str, capturable: bool, route: Route) -> None:
    helpers.check_scaler(ours(**FLAGS[flags], capturable=capturable), route)


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("copies", [copy.deepcopy, None], ids=["deepcopy", "state_dict"])
def test_a_first_step_that_overflowed_is_still_to_come(copies: Any, route: Route) -> None:
    """A checkpoint, a copy or a new plan between an overflow and the first real step does not make it dampened."""
    make = ours(momentum=0.9, dampening=0.5)
    results = []
    for overflow_first in (False, True):
        params = parameters(route.device)
        with implementation(route.implementation):
            optimizer = make(params)
            if overflow_first:
                set_gradients(params, 9, absent=(0,))  # parameter 0 joins later, which makes a new plan
                optimizer.grad_scale = torch.ones(1, device=route.device)
                optimizer.found_inf = torch.ones(1, device=route.device)
                optimizer.step()
                del optimizer.grad_scale, optimizer.found_inf
                if copies is not None:
                    optimizer = copies(optimizer)
                    params = optimizer.param_groups[0]["params"]
                else:
                    saved = helpers.through_a_file(optimizer.state_dict())
                    optimizer = make(params)
                    optimizer.load_state_dict(saved)
            for step in range(3):
                set_gradients(params, step)
                optimizer.step()
        results.append(params)
    assert_equal_bits(*results)


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("on_device", [False, True])
def test_a_scale_that_amp_left_is_divided_out(on_device: bool, route: Route) -> None:
    def leave_a_scale(optimizer: torch.optim.Optimizer, step: int) -> None:
        if isinstance(optimizer, FusedSGD):
            scale = 2.0 ** (step % 5)
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                p.grad.mul_(scale)
            optimizer.most_recent_scale = torch.tensor(scale, device=route.device) if on_device else scale
            optimizer.scale_set_by_backward = True

    optimizer = helpers.check_training(ours(), theirs(), route, before_step=leave_a_scale, steps=10)
    assert optimizer.most_recent_scale == 1.0
    assert not optimizer.scale_set_by_backward


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_momentum_that_starts_later(route: Route) -> None:
    def switch_on(optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.param_groups[0]["momentum"] = 0.9 if step >= 3 else 0.0

    helpers.check_training(ours(), theirs(), route, before_step=switch_on, steps=10)


@pytest.mark.parametrize("route", routes())
def test_a_learning_rate_on_the_device(route: Route) -> None:
    lr = torch.tensor(0.01, dtype=torch.float64, device=route.device)
    helpers.check_training(ours(lr, momentum=0.9, capturable=True), theirs(0.01, momentum=0.9), route, steps=10)


def test_what_clients_read() -> None:
    params = parameters()
    optimizer = FusedSGD(params, lr=0.1, momentum=0.9)
    assert optimizer.defaults == {"lr": 0.1, "momentum": 0.9, "dampening": 0, "weight_decay": 0, "nesterov": False}
    assert optimizer.materialize_master_grads
    assert optimizer.most_recent_scale == 1.0
    assert not optimizer.scale_set_by_backward
    assert not optimizer.wd_after_momentum
    momentums, first_run = optimizer.get_momentums(params)
    assert first_run
    assert [momentum.shape for momentum in momentums] == [p.shape for p in params]
    again, first_run = optimizer.get_momentums(params)
    assert not first_run
    assert all(one is other for one, other in zip(momentums, again, strict=True))
    set_gradients(params, 0)
    optimizer.step()
    optimizer.zero_grad()
    assert params[0].grad is not None
    assert not params[0].grad.any()
    assert FusedSGD(params, 0.1, set_grad_none=True).zero_grad() is None
    assert params[0].grad is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"momentum": -0.1}, "momentum=-0.1"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"nesterov": True}, "nesterov needs a momentum"),
        ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "nesterov needs a momentum"),
        ({"stochastic_rounding": True, "master_weights": True}, "stochastic_rounding"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FusedSGD(parameters(), **{"lr": 0.1, **options})


def test_lr_may_be_left_to_the_groups() -> None:
    assert FusedSGD([{"params": parameters(), "lr": 0.5}]).defaults["lr"] is required


@pytest.mark.gpu
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_cuda_graph(flags: dict[str, Any]) -> None:
    helpers.check_graph(ours(**flags, capturable=True))


@pytest.mark.parametrize("route", helpers.CPU_ROUTES)
def test_many_steps(route: Route) -> None:
    helpers.check_training(
        ours(**FLAGS["nesterov"]), theirs(**FLAGS["nesterov"]), route, steps=helpers.many_steps(route)
    )


def test_gradients_that_need_no_copy() -> None:
    """Contiguous either way: strides may differ where a size is 1."""
    param = torch.nn.Parameter(torch.randn(4, 3, 1, 1).to(memory_format=torch.channels_last))
    param.grad = torch.randn(4, 3, 1, 1).as_strided((4, 3, 1, 1), (3, 1, 1, 1))
    assert param.grad.stride() != param.stride()
    optimizer, expected = FusedSGD([param], lr=1.0), param.detach() - param.grad
    optimizer.step()
    assert torch.equal(param, expected)
    gradients = optimizer._group_buckets[0].buckets[0]._gradients()
    assert gradients is not None
    assert gradients[0] is param.grad
