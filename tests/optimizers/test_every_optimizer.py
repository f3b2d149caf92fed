"""What users of `torch.optim.Optimizer` expect of any optimizer, of each fused one."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from apex import optimizers
from apex.optimizers._base import FusedOptimizer
from tests.optimizers import helpers
from tests.optimizers.helpers import Factory, parameters, set_gradients
from tests.support.harness import assert_equal_bits

MAKERS: dict[str, Factory] = {
    "FusedAdam": lambda params: optimizers.FusedAdam(params, weight_decay=0.1),
    "FusedAdagrad": lambda params: optimizers.FusedAdagrad(params, weight_decay=0.1),
    "FusedLAMB": lambda params: optimizers.FusedLAMB(params),
    "FusedLARS": lambda params: optimizers.FusedLARS(params, 0.1, momentum=0.9),
    "FusedMixedPrecisionLamb": lambda params: optimizers.FusedMixedPrecisionLamb(
        params, reduced_precision_dtype=torch.bfloat16
    ),
    "FusedNovoGrad": lambda params: optimizers.FusedNovoGrad(params, weight_decay=0.1),
    "FusedSGD": lambda params: optimizers.FusedSGD(params, 0.1, momentum=0.9, dampening=0.1),
}

every_optimizer = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def train(optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        set_gradients(params, step)
        optimizer.step()
    return params


@every_optimizer
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_go_on_alike(dtype: torch.dtype, duplicate: Any, make: Factory) -> None:
    optimizer = make(parameters(dtype=dtype))
    train(optimizer, range(3))
    twin = duplicate(optimizer)
    before = [p.detach().clone() for group in twin.param_groups for p in group["params"]]
    params = train(optimizer, range(3, 5))
    assert_equal_bits(before, [p for group in twin.param_groups for p in group["params"]])
    assert_equal_bits(params, train(twin, range(3, 5)))
    assert_equal_bits(helpers.state_tensors(optimizer), helpers.state_tensors(twin))


@pytest.mark.parametrize("name", [name for name in optimizers.__all__ if name != "FP16_Optimizer"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
@pytest.mark.parametrize("steps", [0, 2])
def test_copies_with_default_options(steps: int, duplicate: Any, name: str) -> None:
    """Options that are None among them; copies that were made before the first step, and after a skipped one."""
    optimizer = getattr(optimizers, name)(parameters(), lr=0.1)
    train(optimizer, range(steps))
    if steps and isinstance(optimizer, FusedOptimizer):
        optimizer.found_inf = torch.ones(1)  # as torch.amp.GradScaler sets it
        train(optimizer, range(1))
        del optimizer.found_inf
    twin = duplicate(optimizer)
    assert_equal_bits(train(optimizer, range(2, 4)), train(twin, range(2, 4)))
    assert_equal_bits(helpers.state_tensors(optimizer), helpers.state_tensors(twin))
    helpers.assert_same_options(optimizer.state_dict(), twin.state_dict())


@pytest.mark.parametrize("name", [name for name in optimizers.__all__ if name != "FP16_Optimizer"])
def test_a_state_dict_from_before_the_first_step_starts_anew(name: str) -> None:
    """Counts of steps and what depends on them, in the groups, do not stay those of the steps that were taken."""
    options = {"state_format": "int8"} if name == "FusedAdam" else {}  # which counts roundings
    optimizer = getattr(optimizers, name)(parameters(), lr=0.1, **options)
    start = copy.deepcopy(optimizer.state_dict())
    first = [param.detach().clone() for param in train(optimizer, range(3))]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    with torch.no_grad():
        for param, value in zip(params, parameters(), strict=True):
            param.copy_(value)
    optimizer.load_state_dict(start)
    assert_equal_bits(first, train(optimizer, range(3)))


@pytest.mark.parametrize("name", [name for name in optimizers.__all__ if name != "FP16_Optimizer"])
def test_hooks_of_loading(name: str) -> None:
    """A hook before may replace the state dict by another one; a hook after sees the state as it stays."""
    optimizer, twin = (getattr(optimizers, name)(parameters(dtype=torch.bfloat16), lr=0.1) for _ in range(2))
    train(optimizer, range(2))
    seen: list[torch.Tensor] = []

    def halved(_: Any, found: dict[str, Any]) -> dict[str, Any]:
        state = {
            key: {name: value / 2 if name != "step" and value.dim() else value for name, value in values.items()}
            for key, values in found["archive"]["state"].items()
        }
        return {**found["archive"], "state": state}

    twin.register_load_state_dict_pre_hook(halved)
    twin.register_load_state_dict_post_hook(lambda loaded: seen.extend(helpers.state_tensors(loaded)))
    for _ in range(2):  # the hooks stay
        seen.clear()
        twin.load_state_dict({"archive": optimizer.state_dict()})
        exact = [value / 2 if value.dim() else value for value in helpers.state_tensors(optimizer)]
        assert_equal_bits(helpers.state_tensors(twin), exact)
        assert_equal_bits(seen, exact)


@pytest.mark.parametrize("name", ["FusedAdam", "FusedNAdam", "FusedScheduleFreeAdamW"])
def test_counts_on_the_device_go_to_the_device_of_the_parameters(name: str) -> None:
    """A graph would repeat the step of the capture if a state dict from host memory left the counts there."""
    options: Any = {"lr": 0.1, "capturable": True} | ({"state_format": "int8"} if name == "FusedAdam" else {})
    optimizer = getattr(optimizers, name)(parameters(), **options)
    train(optimizer, range(2))
    elsewhere = [torch.nn.Parameter(param.detach().to("meta")) for param in parameters()]
    other = getattr(optimizers, name)(elsewhere, **options)
    saved = optimizer.state_dict()
    other.load_state_dict({**saved, "state": {}})
    counts = {
        option: value
        for option, value in other.param_groups[0].items()
        if isinstance(value, torch.Tensor) and option != "lr"
    }
    assert "step" in counts
    assert {value.device.type for value in counts.values()} == {"meta"}


@every_optimizer
def test_closures_hooks_and_later_groups(make: Factory) -> None:
    optimizer = make(parameters())
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    added = parameters(seed=1)
    optimizer.add_param_group({"params": added, "lr": 0.5})
    start = added[0].detach().clone()

    def closure() -> float:
        assert torch.is_grad_enabled()
        calls.append("closure")
        set_gradients(added, 0)
        return 3.5

    assert optimizer.step(closure) == 3.5
    assert calls == ["before", "closure", "after"]
    assert not torch.equal(added[0], start)
    assert [group["lr"] for group in optimizer.param_groups][1] == 0.5


@every_optimizer
def test_hooks_of_all_optimizers(make: Factory) -> None:
    optimizer = make(parameters())
    calls: list[Any] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *arguments: calls.append(arguments)),
        register_optimizer_step_post_hook(lambda *arguments: calls.append(arguments)),
    ]
    try:
        train(optimizer, range(1))
    finally:
        for handle in handles:
            handle.remove()
    assert calls == [(optimizer, (optimizer,), {})] * 2
    train(optimizer, range(1))
    assert len(calls) == 2


@every_optimizer
def test_a_profile_shows_steps(make: Factory) -> None:
    optimizer = make(parameters())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(optimizer, range(2))
    name = f"Optimizer.step#{type(optimizer).__name__}.step"
    assert [event.name for event in profile.events()].count(name) == 2


@every_optimizer
def test_two_runs_have_the_same_bits(make: Factory) -> None:
    runs = [train(make(parameters()), range(5)) for _ in range(2)]
    assert_equal_bits(*runs)


@every_optimizer
def test_a_sparse_gradient_is_refused_before_anything_changes(make: Factory) -> None:
    params = parameters()
    optimizer = make([{"params": params[:1]}, {"params": params[1:]}])
    set_gradients(params, 0)
    params[1].grad = torch.ones(5).to_sparse()
    before = [p.detach().clone() for p in params]
    with pytest.raises(RuntimeError, match=r"gradient of parameter 0 .* is sparse"):
        optimizer.step()
    assert_equal_bits(before, params)


@every_optimizer
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("groups", "parameter groups"),
        ("maximize", "maximize=True"),
        ("group", r"param_groups\[0\] of the state dict is 3"),
    ],
)
def test_a_state_dict_that_does_not_fit_changes_nothing(damage: str, words: str, make: Factory) -> None:
    params = parameters()
    optimizer = make(params)
    train(optimizer, range(2))
    before, options = helpers.state_tensors(optimizer), optimizer.state_dict()
    saved = optimizer.state_dict()
    if damage == "groups":
        saved["param_groups"].append(saved["param_groups"][0])
    elif damage == "group":
        saved["param_groups"][0] = 3
    else:
        saved["param_groups"][0]["maximize"] = True
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(saved)
    assert_equal_bits(before, helpers.state_tensors(optimizer))
    helpers.assert_same_options(optimizer.state_dict(), options)


@every_optimizer
def test_parameters_in_any_memory_order(make: Factory) -> None:
    """channels_last and transposed parameters, with gradients in another order, are updated like contiguous ones."""
    plain = parameters(shapes=[(2, 3, 4, 2), (5, 6)])
    ordered = [
        torch.nn.Parameter(plain[0].detach().clone(memory_format=torch.channels_last)),
        torch.nn.Parameter(plain[1].detach().t().contiguous().t()),
    ]
    for params in (plain, ordered):
        train(make(params), range(3))
    for one, other in zip(plain, ordered, strict=True):
        assert one.stride() != other.stride()
        torch.testing.assert_close(one, other)


@every_optimizer
def test_float64_parameters(make: Factory) -> None:
    single, double = parameters(), parameters(dtype=torch.float64)
    for params in (single, double):
        train(make(params), range(5))
    assert {p.dtype for p in double} == {torch.float64}
    assert helpers.relative_error(single, double) <= helpers.LIMIT
