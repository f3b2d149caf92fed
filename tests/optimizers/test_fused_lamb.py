"""FusedLAMB and FusedMixedPrecisionLamb against LAMB written out in float64."""

from typing import Any

import pytest
import torch

from apex.ops import implementation
from apex.optimizers import FusedLAMB, FusedMixedPrecisionLamb
from tests.optimizers import helpers
from tests.optimizers.helpers import parameters, set_gradients
from tests.optimizers.references import Lamb
from tests.support.harness import Route, assert_equal_bits, routes

FLAGS: dict[str, dict[str, Any]] = {
    "default": {},
    "no-decay": {"weight_decay": 0.0},
    "nvlamb": {"weight_decay": 0.0, "use_nvlamb": True},
    "l2": {"adam_w_mode": False, "weight_decay": 0.1},
    "cautious": {"cautious_weight_decay": True, "weight_decay": 0.5},
    "no-correction": {"bias_correction": False},
    "no-averaging": {"grad_averaging": False},
    "no-averaging-l2": {"grad_averaging": False, "adam_w_mode": False, "bias_correction": False},
    "no-clipping": {"max_grad_norm": 0.0},
    "clipping-sometimes": {"max_grad_norm": 9.0, "betas": (0.8, 0.95), "eps": 1e-3},
}
CLASSES = [FusedLAMB, FusedMixedPrecisionLamb]


def ours(cls: type = FusedLAMB, **options: Any) -> helpers.Factory:
    return lambda params: cls(params, **{"lr": 0.01, **options})


def exact(**options: Any) -> helpers.Factory:
    return lambda params: Lamb(params, **{"lr": 0.01, **options})


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_matches_the_formula(flags: dict[str, Any], route: Route) -> None:
    helpers.check_training(ours(**flags), exact(**flags), route)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("flags", ["default", "no-decay", "no-averaging-l2"])
def test_numbers_on_the_device(flags: str, route: Route) -> None:
    helpers.check_training(ours(**FLAGS[flags], capturable=True), exact(**FLAGS[flags]), route)
    # A learning rate of float32, as upstream keeps it, is off by 2e-8.
    helpers.check_training(ours(FusedMixedPrecisionLamb, **FLAGS[flags]), exact(**FLAGS[flags]), route)


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("cls", CLASSES)
def test_groups_late_gradients_and_schedules(cls: type, route: Route) -> None:
    """Clipping is over all groups; a late parameter shares its group's step count."""

    def schedule(optimizer: torch.optim.Optimizer, step: int) -> None:
        group = optimizer.param_groups[0]
        lr = 0.02 / (1 + step)
        group["lr"] = group["lr"].fill_(lr) if isinstance(group["lr"], torch.Tensor) else lr

    groups = [{"lr": 0.02, "weight_decay": 0.0}, {"lr": 0.03, "betas": (0.8, 0.9)}]
    absent = lambda step: (0,) if step < 5 else (1,) if step % 7 == 0 else ()  # noqa: E731
    helpers.check_training(ours(cls), exact(), route, groups=groups, absent=absent, before_step=schedule)


@pytest.mark.parametrize("route", routes())
def test_parameters_of_zeros_and_gradients_of_zeros(route: Route) -> None:
    """The ratio of the lengths is 1 where one of them is 0."""
    for zero_gradient in (False, True):
        params = parameters(route.device)
        with torch.no_grad():
            params[0].zero_()
        truth = helpers.exact_copy(params)
        make = {"weight_decay": 0.0, "use_nvlamb": True}
        with implementation(route.implementation):
            for optimizer, tensors in ((ours(**make)(params), params), (exact(**make)(truth), truth)):
                for step in range(3):
                    set_gradients(tensors, step)
                    if zero_gradient:
                        tensors[0].grad.zero_()
                        tensors[1].grad.zero_()
                    optimizer.step()
        assert helpers.relative_error(params, truth) <= helpers.LIMIT


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("flags", ["default", "no-decay"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights(dtype: torch.dtype, flags: str, route: Route) -> None:
    helpers.check_master_weights(ours(**FLAGS[flags], master_weights=True), exact(**FLAGS[flags]), route, dtype=dtype)


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_reduced_precision(route: Route) -> None:
    make = ours(FusedMixedPrecisionLamb, reduced_precision_dtype=torch.bfloat16)
    helpers.check_master_weights(make, exact(), route)
    # Only parameters of that dtype have masters.
    params = [*parameters(route.device, torch.bfloat16), *parameters(route.device, torch.float16)]
    optimizer = make(params)
    assert optimizer.param_groups_full_precision == []
    set_gradients(params, 0)
    with implementation(route.implementation):
        optimizer.step()
    masters = optimizer.param_groups_full_precision[0]["params"]
    assert [master is not None for master in masters] == [p.dtype == torch.bfloat16 for p in params]
    assert optimizer.state[params[-1]]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.0}, {"capturable": True}], ids=str)
def test_resume(options: dict[str, Any], route: Route) -> None:
    helpers.check_resume(ours(**options), route)


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_resume_in_half_precision(route: Route) -> None:
    helpers.check_resume(ours(master_weights=True), route, dtype=torch.bfloat16)
    helpers.check_resume(ours(stochastic_rounding=True), route, dtype=torch.bfloat16)
    make = ours(FusedMixedPrecisionLamb, reduced_precision_dtype=torch.bfloat16)
    helpers.check_resume(make, route, dtype=torch.bfloat16)


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("cls", CLASSES)
def test_loss_scaling(cls: type, route: Route) -> None:
    helpers.check_scaler(ours(cls), route)
    helpers.check_scaler(ours(cls, weight_decay=0.0, max_grad_norm=None), route)


@pytest.mark.parametrize("cls", CLASSES)
def test_gradients_stay(cls: type) -> None:
    params = parameters()
    optimizer = cls(params)
    set_gradients(params, 0)
    before = [p.grad.clone() for p in params]
    optimizer.step()
    assert_equal_bits(before, [p.grad for p in params])


def test_the_two_classes_load_each_other() -> None:
    params = parameters()
    plain, mixed = FusedLAMB(params), FusedMixedPrecisionLamb(params, step=7)
    assert mixed.param_groups[0]["step"].tolist() == [7]
    for optimizer in (plain, plain, plain, mixed):
        set_gradients(params, 0)
        optimizer.step()
    mixed.load_state_dict(plain.state_dict())
    step, lr = mixed.param_groups[0]["step"], mixed.param_groups[0]["lr"]
    assert step.dtype == torch.int32
    assert step.tolist() == [3]
    assert lr.dtype == torch.float32
    saved = mixed.state_dict()
    lr.fill_(5.0)
    assert saved["param_groups"][0]["lr"].item() == pytest.approx(1e-3)
    assert_equal_bits(helpers.state_tensors(plain), helpers.state_tensors(mixed))


def test_groups_of_the_mixed_class_do_not_share_their_numbers() -> None:
    first, second, third, fourth = parameters(shapes=[(3,)] * 4)
    optimizer = FusedMixedPrecisionLamb([{"params": [first]}, {"params": [second]}, {"params": [third], "lr": 0.5}])
    optimizer.add_param_group({"params": [fourth]})
    for name in ("lr", "step"):
        assert len({group[name].data_ptr() for group in optimizer.param_groups}) == 4
    assert [group["lr"].item() for group in optimizer.param_groups] == pytest.approx([1e-3, 1e-3, 0.5, 1e-3])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    kept = optimizer.param_groups[0]["lr"]
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] is kept
    assert kept.item() == pytest.approx(1e-4)


def test_what_clients_read() -> None:
    optimizer = FusedLAMB(parameters(), adam_w_mode=False)
    assert optimizer.defaults == {
        "lr": 1e-3,
        "bias_correction": True,
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "weight_decay": 0.01,
        "grad_averaging": True,
        "max_grad_norm": 1.0,
        "cautious_weight_decay": False,
    }
    assert optimizer.adam_w_mode == 0
    assert not optimizer.use_nvlamb
    mixed = FusedMixedPrecisionLamb(parameters())
    assert mixed.defaults["lr"].dtype == torch.float32
    assert mixed.defaults["step"].tolist() == [0]
    assert mixed._step_supports_amp_scaling


@pytest.mark.parametrize("cls", CLASSES)
def test_bad_options(cls: type) -> None:
    with pytest.raises(RuntimeError, match=f"{cls.__name__} does not support the AMSGrad"):
        cls(parameters(), amsgrad=True)
    for options in ({"eps": -1.0}, {"weight_decay": -1.0}, {"max_grad_norm": -1.0}, {"betas": (1.0, 0.9)}):
        with pytest.raises(ValueError, match=r"is negative|is not in \[0, 1\)"):
            cls(parameters(), **options)


@pytest.mark.parametrize("route", helpers.CPU_ROUTES)
def test_many_steps(route: Route) -> None:
    helpers.check_training(ours(), exact(), route, steps=helpers.many_steps(route))


@pytest.mark.gpu
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_cuda_graph(flags: dict[str, Any], cls: type) -> None:
    helpers.check_graph(ours(cls, **flags, **({"capturable": True} if cls is FusedLAMB else {})))
