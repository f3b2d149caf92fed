"""FusedAdamSWA against torch.optim and an average by hand, in float64."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from apex.contrib.openfold_triton import FusedAdamSWA
from apex.contrib.openfold_triton.fused_adam_swa import AdamMathType
from apex.ops import _library
from apex.optimizers import FusedAdam
from tests.support.harness import Route, assert_close, routes

SIZES = ((7,), (3, 5), (1,), (700,))
OPTIONS = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.01}
DECAY = 0.9


class Twin:
    """Lists of tensors for FusedAdamSWA, and the same in float64 for torch.optim."""

    def __init__(self, device: str, state: torch.dtype, compute: torch.dtype, decoupled: bool = False) -> None:
        values = [torch.randn(size, dtype=state, device=device) for size in SIZES]
        self.params = [nn.Parameter(value.clone()) for value in values]
        self.computed = [nn.Parameter(value.to(compute)) for value in values]
        self.averages = [torch.full_like(value, torch.nan) for value in values]
        self.exact = [nn.Parameter(value.double()) for value in values]
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        self.exact_optimizer = kind(self.exact, **OPTIONS)
        self.exact_averages: list[Tensor] = []

    def lists(self) -> tuple[list, list, list, float]:
        return self.params, self.computed, self.averages, DECAY

    def gradients(self, factor: float = 1.0, without: int | None = None) -> None:
        """New gradients, which the exact ones see multiplied by `factor`."""
        for index, (computed, exact) in enumerate(zip(self.computed, self.exact, strict=True)):
            computed.grad = exact.grad = None
            if index != without:
                computed.grad = torch.randn_like(computed)
                exact.grad = computed.grad.double() * factor

    def exact_step(self) -> None:
        self.exact_optimizer.step()
        current = [param.detach().clone() for param in self.exact]
        pairs = zip(self.exact_averages or current, current, strict=True)
        self.exact_averages = [average + (1 - DECAY) * (param - average) for average, param in pairs]

    def check(self) -> None:
        for param, computed, average, exact, exact_average in zip(
            self.params, self.computed, self.averages, self.exact, self.exact_averages, strict=True
        ):
            assert_close(param, exact, reduction=4)
            assert_close(average, exact_average, reduction=4)
            assert_close(computed, param.double())


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("mode", AdamMathType)
def test_matches_adam_and_an_average(route: Route, mode: AdamMathType) -> None:
    twin = Twin(route.device, torch.float32, torch.bfloat16, mode is AdamMathType.ApexAdamW)
    with _library.implementation(route.implementation):
        optimizer = FusedAdamSWA(*twin.lists(), **OPTIONS, adam_math_mode=mode)
        for _ in range(3):
            twin.gradients()
            optimizer.step()
            twin.exact_step()
    twin.check()
    assert optimizer.swa_param_groups[0]["n_averaged"] == 3
    assert optimizer.param_groups[0]["step"] == 3


def test_double_precision_and_a_mixture_of_dtypes() -> None:
    """As upstream's test has it: float64 weights, some of which are computed with in float32."""
    twin = Twin("cpu", torch.float64, torch.float32)
    twin.computed[1] = nn.Parameter(twin.computed[1].detach().double())
    optimizer = FusedAdamSWA(*twin.lists(), **OPTIONS)
    for _ in range(3):
        twin.gradients()
        optimizer.step()
        twin.exact_step()
    twin.check()


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("as_tensor", [False, True])
def test_gradients_are_clipped_on_the_way(route: Route, as_tensor: bool) -> None:
    twin = Twin(route.device, torch.float32, torch.bfloat16)
    factor = torch.tensor(0.25, device=route.device) if as_tensor else 0.25
    with _library.implementation(route.implementation):
        optimizer = FusedAdamSWA(*twin.lists(), **OPTIONS)
        for _ in range(2):
            twin.gradients(0.25)
            optimizer.step(grad_clip_scale=factor)
            twin.exact_step()
    twin.check()


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_a_parameter_without_gradient_is_averaged_all_the_same(route: Route) -> None:
    twin = Twin(route.device, torch.float32, torch.float32)
    with _library.implementation(route.implementation):
        optimizer = FusedAdamSWA(*twin.lists(), **OPTIONS)
        for _ in range(2):
            twin.gradients(without=1)
            optimizer.step()
            twin.exact_step()
    twin.check()


def test_continues_from_adam() -> None:
    twin = Twin("cpu", torch.float32, torch.bfloat16)
    adam = torch.optim.Adam(twin.params, **OPTIONS)
    for _ in range(2):
        twin.gradients()
        for param, computed in zip(twin.params, twin.computed, strict=True):
            param.grad = computed.grad.float()
        adam.step()
        twin.exact_optimizer.step()
    optimizer = FusedAdamSWA.from_optim(adam, *twin.lists())
    assert optimizer.param_groups[0]["step"] == 2
    for _ in range(2):
        twin.gradients()
        optimizer.step()
        twin.exact_step()
    twin.check()


def test_continues_from_an_adam_without_steps() -> None:
    """The first step is step 1: upstream would take it for step 2."""
    twin = Twin("cpu", torch.float32, torch.bfloat16)
    optimizer = FusedAdamSWA.from_optim(torch.optim.Adam(twin.params, **OPTIONS), *twin.lists())
    twin.gradients()
    optimizer.step()
    twin.exact_step()
    twin.check()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, FusedAdam])
def test_continues_with_the_same_weight_decay(kind: type[torch.optim.Optimizer]) -> None:
    param = nn.Parameter(torch.linspace(-2, 2, 6, dtype=torch.float64))
    adam = kind([param], lr=0.1, weight_decay=0.5)
    computed, average = nn.Parameter(param.detach().clone()), param.detach().clone()
    twin = nn.Parameter(param.detach().clone())
    optimizer = FusedAdamSWA.from_optim(adam, [twin], [computed], [average], 0.9)
    for step in range(3):
        param.grad = torch.arange(6.0, dtype=torch.float64) + step
        computed.grad = param.grad.clone()
        adam.step()
        optimizer.step()
    torch.testing.assert_close(twin, param)


def test_weight_decay_of_the_other_kind_is_refused() -> None:
    param = nn.Parameter(torch.ones(2))
    saved = torch.optim.AdamW([param]).state_dict()
    saved["param_groups"][0]["decoupled_weight_decay"] = True  # PyTorch 2.6 does not save it
    optimizer = FusedAdamSWA([param], [param.detach()], [param.detach().clone()], 0.9)
    with pytest.raises(ValueError, match=r"adam_math_mode=AdamMathType\.ApexAdamW"):
        optimizer.load_state_dict(saved)
    with pytest.raises(TypeError, match="SGD"):
        FusedAdamSWA.from_optim(torch.optim.SGD([param]), [param], [param.detach()], [param.detach()], 0.9)


def test_unequal_steps_are_refused() -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    adam = torch.optim.Adam(params)
    for count, param in enumerate(params, 1):
        for _ in range(count):
            params[0].grad = params[1].grad = None
            param.grad = torch.ones(2)
            adam.step()
    with pytest.raises(ValueError, match=r"\[1, 2\] times"):
        FusedAdamSWA.from_optim(adam, params, [p.detach() for p in params], [p.detach() for p in params], 0.9)


def test_state_dict_is_that_of_adam() -> None:
    twin = Twin("cpu", torch.float32, torch.bfloat16)
    optimizer = FusedAdamSWA(*twin.lists(), **OPTIONS)
    twin.gradients()
    optimizer.step()
    saved = optimizer.state_dict()
    assert set(saved["state"][0]) == {"exp_avg", "exp_avg_sq", "step"}
    torch.optim.Adam(twin.params, **OPTIONS).load_state_dict(saved)
    again = FusedAdamSWA(*twin.lists(), **OPTIONS)
    again.load_state_dict(saved)
    again.swa_param_groups[0]["n_averaged"] = 1
    twin.exact_step()
    twin.gradients()
    again.step()
    twin.exact_step()
    twin.check()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_work_on_their_own_lists(duplicate) -> None:
    twin = Twin("cpu", torch.float32, torch.bfloat16)
    optimizer = FusedAdamSWA(*twin.lists(), **OPTIONS)
    twin.gradients()
    optimizer.step()
    before = [param.detach().clone() for param in twin.params]
    other, other_twin = duplicate((optimizer, twin))
    twin.exact_step()
    other_twin.exact_optimizer = torch.optim.Adam(other_twin.exact, **OPTIONS)
    other_twin.exact_optimizer.load_state_dict(twin.exact_optimizer.state_dict())
    for mine, its in zip(twin.exact, other_twin.exact, strict=True):
        its.data.copy_(mine.data)
    other_twin.exact_averages = twin.exact_averages
    other_twin.gradients()
    other.step()
    other_twin.exact_step()
    other_twin.check()
    assert all(map(torch.equal, before, twin.params))


def test_zero_grad_reaches_the_parameters_that_have_gradients() -> None:
    twin = Twin("cpu", torch.float32, torch.bfloat16)
    optimizer = FusedAdamSWA(*twin.lists(), set_grad_none=False)
    twin.gradients()
    optimizer.zero_grad()
    assert all(not param.grad.any() for param in twin.computed)
    optimizer.zero_grad(set_to_none=True)
    assert all(param.grad is None for param in twin.computed)


def test_a_closure_is_called() -> None:
    twin = Twin("cpu", torch.float32, torch.bfloat16)
    optimizer = FusedAdamSWA(*twin.lists())

    def closure() -> Tensor:
        loss = sum(param.float().square().sum() for param in twin.computed)
        loss.backward()
        return loss.detach()

    assert optimizer.step(closure) > 0
    assert not torch.equal(twin.params[0], twin.exact[0].float())


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_an_overflow_skips_the_step_and_keeps_averages_sound(route: Route) -> None:
    twin = Twin(route.device, torch.float32, torch.float16)
    with _library.implementation(route.implementation):
        optimizer = FusedAdamSWA(*twin.lists(), **OPTIONS)
        before = [param.detach().clone() for param in twin.params]
        twin.gradients()
        twin.computed[0].grad[0] = torch.inf
        optimizer.grad_scale = torch.tensor(8.0, device=route.device)
        optimizer.found_inf = torch.tensor(1.0, device=route.device)
        optimizer.step()
        assert all(map(torch.equal, before, twin.params))
        assert all(map(torch.equal, before, twin.averages))
        twin.gradients(1 / 8)
        optimizer.found_inf = torch.tensor(0.0, device=route.device)
        optimizer.step()
    twin.exact_averages = [param.detach().clone() for param in twin.exact]
    twin.exact_step()
    twin.check()


@pytest.mark.parametrize("option", ["amsgrad", "capturable", "master_weights"])
def test_options_that_do_not_exist(option: str) -> None:
    twin = Twin("cpu", torch.float32, torch.bfloat16)
    with pytest.raises(NotImplementedError, match=option):
        FusedAdamSWA(*twin.lists(), **{option: True})


def test_lists_that_do_not_fit() -> None:
    params, computed, averages, _ = Twin("cpu", torch.float32, torch.bfloat16).lists()
    with pytest.raises(ValueError, match="one length"):
        FusedAdamSWA(params, computed[:-1], averages, 0.9)
    with pytest.raises(ValueError, match="one length"):
        FusedAdamSWA([], [], [], 0.9)
    with pytest.raises(ValueError, match=r"compute_params\[0\] has shape"):
        FusedAdamSWA(params, computed[::-1], averages, 0.9)
    with pytest.raises(ValueError, match=r"swa_params\[0\] is torch.float64"):
        FusedAdamSWA(params, computed, [average.double() for average in averages], 0.9)
    with pytest.raises(TypeError, match="not groups"):
        FusedAdamSWA([{"params": params}], computed[:1], averages[:1], 0.9)
    with pytest.raises(ValueError, match=r"swa_decay_rate=1\.5"):
        FusedAdamSWA(params, computed, averages, 1.5)
    with pytest.raises(ValueError, match="adam_math_mode=2"):
        FusedAdamSWA(params, computed, averages, 0.9, adam_math_mode=2)
    with pytest.raises(ValueError, match="one parameter group"):
        FusedAdamSWA(params, computed, averages, 0.9).add_param_group({"params": [nn.Parameter(torch.ones(1))]})
