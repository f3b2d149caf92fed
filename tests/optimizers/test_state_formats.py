"""Optimizer state in fewer bytes: close to float64, without the failures of simpler codecs, and exact to resume."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex import amp, graphs
from apex.ops import implementation
from apex.optimizers import FusedAdam, FusedLAMB, FusedMuon, FusedSGD, NpuFusedAdamW
from tests.support.harness import Route, routes

SHAPES = ((7,), (30, 20), (130,), (64,))
FORMATS = ("bfloat16", "int8", "float8")


def make(dtype: torch.dtype = torch.float32, device: str = "cpu", shapes: Any = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 + step)
        for param in params:
            gradient = torch.randn(param.shape, generator=generator) * 0.1
            param.grad = gradient.to(param.device, param.dtype)
        optimizer.step()


def distance(params: list[nn.Parameter], others: list[nn.Parameter], start: list[nn.Parameter]) -> float:
    """Return the distance of two results, as a share of the way from the start."""
    triples = zip(params, others, start, strict=True)
    flat = [[each.detach().cpu().double().reshape(-1) for each in triple] for triple in triples]
    result, other, begin = (torch.cat(each) for each in zip(*flat, strict=True))
    return float((result - other).norm() / (other - begin).norm())


# Shares of the way of 10 steps. int8 moments are off by 1/254 of the largest of 64 moments, float8 ones by 1/16.
@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize(("format", "limit"), [("bfloat16", 0.02), ("int8", 0.02), ("float8", 0.06)])
def test_steps_are_close_to_float64(format: str, limit: float, route: Route) -> None:
    params, exact = make(device=route.device), make(torch.float64)
    with implementation(route.implementation):
        train(FusedAdam(params, lr=1e-2, weight_decay=0.1, state_format=format), params, 10)
    train(torch.optim.AdamW(exact, lr=1e-2, weight_decay=0.1), exact, 10)
    assert distance(params, exact, make(torch.float64)) < limit


# FusedMuon's float32 state stands for the truth: its iteration in bfloat16 is off by more than the formats are.
MOMENTUMS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "SGD": (FusedSGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "dampening": 0.1}),
    "Muon": (FusedMuon, {"lr": 1e-2}),
}
MATRICES = ((24, 20), (130, 3), (64,))


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize(("format", "limit"), [("bfloat16", 0.02), ("int8", 0.02), ("float8", 0.06)])
@pytest.mark.parametrize("name", MOMENTUMS)
def test_momentum_in_fewer_bytes(name: str, format: str, limit: float, route: Route) -> None:
    cls, options = MOMENTUMS[name]
    dtype = torch.float64 if cls is FusedSGD else torch.float32
    params, exact = make(device=route.device, shapes=MATRICES), make(dtype, route.device, MATRICES)
    with implementation(route.implementation):
        optimizer = cls(params, state_format=format, **options)
        train(optimizer, params, 10)
    train(cls(exact, **options), exact, 10)
    # Muon's direction has singular values near 1, whatever those of the momentum were: its errors are larger.
    assert distance(params, exact, make(torch.float64, shapes=MATRICES)) < limit * (1 if cls is FusedSGD else 4)
    name = "momentum_buffer" if format == "bfloat16" else "momentum_buffer::quantized"
    assert optimizer.state[params[0]][name].element_size() <= 2


@pytest.mark.parametrize("format", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", MOMENTUMS)
def test_momentum_is_saved_and_loaded(name: str, format: str) -> None:
    """A resumed run has the same bits; a first step that was skipped leaves no momentum, so that dampening waits."""
    cls, options = MOMENTUMS[name]
    params, twins = make(torch.bfloat16, shapes=MATRICES), make(torch.bfloat16, shapes=MATRICES)
    optimizer = cls(params, state_format=format, master_bits=24, **options)
    optimizer.found_inf = torch.ones(1)  # as torch.amp.GradScaler sets it
    train(optimizer, params, 1)
    del optimizer.found_inf
    saved = optimizer.state_dict()
    if cls is FusedSGD:
        assert not any(name.startswith("momentum_buffer") for state in saved["state"].values() for name in state)
    train(optimizer, params, 2)
    resumed = cls(twins, state_format=format, master_bits=24, **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for param, twin in zip(params, twins, strict=True):
        twin.data.copy_(param)
    train(optimizer, params, 2, first=2)
    train(resumed, twins, 2, first=2)
    assert all(map(torch.equal, params, twins))
    plain = cls(make(torch.bfloat16, shapes=MATRICES), **options)
    plain.load_state_dict(optimizer.state_dict(decoded=True))
    assert next(iter(plain.state.values()))["momentum_buffer"].dtype == torch.float32


@pytest.mark.parametrize("format", ["float32", *FORMATS])
@pytest.mark.parametrize("route", routes())
def test_float32_masters_beside_state_in_fewer_bytes(route: Route, format: str) -> None:
    params, twins = make(torch.bfloat16, route.device), make(torch.bfloat16, route.device)
    with implementation(route.implementation):
        optimizer = FusedAdam(params, lr=1e-3, master_weights=True, state_format=format)
        other = FusedAdam(twins, lr=1e-3, master_bits=32, state_format=format)
        train(optimizer, params, 4)
        train(other, twins, 4)
    masters = zip(params, optimizer.master_parameters(), other.master_parameters(), strict=True)
    for param, master, expected in masters:
        torch.testing.assert_close(master, expected, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(param.detach().float(), master, rtol=2.0**-7, atol=0)  # the interpreter truncates


class Moments:
    """One tensor trained by FusedAdam with the given state, beside its moments in float64."""

    def __init__(self, size: int = 1024, **options: Any) -> None:
        self.param = nn.Parameter(torch.zeros(size))
        self.optimizer = FusedAdam([self.param], lr=1.0, **options)
        self.second = torch.zeros(size, dtype=torch.float64)
        self.generator = torch.Generator().manual_seed(0)

    def step(self, gradient: Tensor) -> Tensor:
        """Return the update of this step."""
        before = self.param.detach().clone()
        self.param.grad = gradient.clone()
        self.optimizer.step()
        self.second.mul_(0.999).addcmul_(gradient.double(), gradient.double(), value=0.001)
        return before - self.param.detach()

    def error(self) -> float:
        """Return the mean error of the roots of the second moment, as a share of the mean root."""
        roots = self.optimizer.state_dict(decoded=True)["state"][0]["exp_avg_sq"].double().sqrt()
        return float((roots - self.second.sqrt()).abs().mean() / self.second.sqrt().mean())

    def normal(self, scale: float | Tensor) -> Tensor:
        return torch.randn(len(self.param), generator=self.generator) * scale


@pytest.mark.parametrize("format", ["int8", "float8"])
def test_updates_stay_small_beside_second_moments_that_would_round_to_zero(format: str) -> None:
    """Gradients of a wide spread within a group: code 0 of a second moment would give updates of thousands."""
    moments = Moments(state_format=format)
    spread = torch.exp(1.5 * torch.randn(1024, generator=moments.generator))
    largest = max(float(moments.step(moments.normal(spread)).abs().max()) for _ in range(60))
    # (1 - beta1) / sqrt((1 - beta2) (1 - beta1**2 / beta2)), times the corrections of step 60 or earlier, is below 7.3.
    assert largest < 7.3


@pytest.mark.parametrize(("format", "limit"), [("bfloat16", 0.03), ("int8", 0.005), ("float8", 0.005)])
def test_second_moments_follow_a_slow_decay(format: str, limit: float) -> None:
    """Gradients fall to a tenth: half-precision scales, and the nearest bfloat16 numbers, would stay where they are."""
    moments = Moments(256, state_format=format)
    gradient = torch.linspace(0.5, 1.0, 256)
    for step in range(300):
        moments.step(gradient if step < 100 else 0.1 * gradient)
    assert moments.error() < limit


@pytest.mark.parametrize("format", FORMATS)
def test_tiny_gradients(format: str) -> None:
    """Second moments of 1e-12 are below the smallest float16."""
    moments = Moments(256, state_format=format)
    for _ in range(200):
        moments.step(moments.normal(1e-6))
    assert moments.error() < 0.1


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("bits", [24, 32])
def test_masters_of_bits_that_parameters_lack(bits: int, route: Route) -> None:
    params, twins = make(torch.bfloat16, route.device), make(torch.bfloat16, route.device)
    with implementation(route.implementation):
        optimizer = FusedAdam(params, lr=1e-3, weight_decay=0.1, master_bits=bits)
        plain = FusedAdam(twins, lr=1e-3, weight_decay=0.1, master_weights=True)
        train(optimizer, params, 10)
        train(plain, twins, 10)
    for param, master, other in zip(params, optimizer.master_parameters(), plain.master_parameters(), strict=True):
        # 24 bits: each of 10 steps rounds to 17 binary digits, and steps depend on rounded masters by their decay only.
        limit = 1e-6 if bits == 32 else 11 * 2.0**-17
        torch.testing.assert_close(master, other, rtol=limit, atol=limit * 1e-2)
        torch.testing.assert_close(param.detach().float(), master, rtol=2.0**-8, atol=0)
    remainders = {state["master_param::remainder"].dtype for state in optimizer.state.values()}
    assert remainders == {torch.int8 if bits == 24 else torch.int16}


OPTIONS: dict[str, dict[str, Any]] = {
    "bfloat16": {"state_format": "bfloat16"},
    "int8": {"state_format": "int8"},
    "float8": {"state_format": "float8"},
    "int8, 24 bits": {"state_format": "int8", "master_bits": 24},
    "32 bits": {"master_bits": 32},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_loaded_optimizer_goes_on_to_the_bit(options: dict[str, Any]) -> None:
    params = make(torch.bfloat16)
    optimizer = FusedAdam(params, lr=1e-2, **options)
    train(optimizer, params, 3)
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    other = FusedAdam(twins, lr=1e-2, **options)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, tensors in ((optimizer, params), (other, twins)):
        train(each, tensors, 3, first=3)
    assert all(map(torch.equal, params, twins))
    for one, two in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name].view(torch.uint8), two[name].view(torch.uint8)) for name in one)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_decoded_state_is_that_of_torch_and_of_other_formats(options: dict[str, Any]) -> None:
    params = make(torch.bfloat16)
    optimizer = FusedAdam(params, lr=1e-2, **options)
    train(optimizer, params, 3)
    decoded = optimizer.state_dict(decoded=True)
    names = {"step", "exp_avg", "exp_avg_sq"} | ({"master_param"} if "master_bits" in options else set())
    for state in decoded["state"].values():
        assert set(state) == names
        assert all(state[name].dtype == torch.float32 for name in names)
    torch.optim.AdamW(make(torch.bfloat16), lr=1e-2).load_state_dict(copy.deepcopy(decoded))
    again = FusedAdam([nn.Parameter(param.detach().clone()) for param in params], lr=1e-2, **options)
    again.load_state_dict(copy.deepcopy(decoded))
    plain = FusedAdam([nn.Parameter(param.detach().clone()) for param in params], lr=1e-2)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for state, other in zip(decoded["state"].values(), again.state_dict(decoded=True)["state"].values(), strict=True):
        for name in names:  # codes of decoded numbers are the same codes, up to the rounding of a scale
            torch.testing.assert_close(other[name], state[name], rtol=1e-5, atol=1e-12)
    for state, other in zip(decoded["state"].values(), plain.state.values(), strict=True):
        assert all(torch.equal(other[name], state[name]) for name in ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("format", ["int8", "float8"])
def test_optimizers_without_formats_and_other_layouts_decode(format: str) -> None:
    """Groups of 64 elements follow the memory of the parameter that they were made for."""
    param = nn.Parameter(torch.randn(8, 16, 3, 3).to(memory_format=torch.channels_last))
    optimizer = FusedAdam([param], state_format=format)
    param.grad = torch.exp(3 * torch.randn_like(param))
    optimizer.step()
    decoded = optimizer.state_dict(decoded=True)["state"][0]
    twins = [nn.Parameter(param.detach().contiguous()) for _ in range(2)]
    for other in (FusedAdam(twins[:1], state_format=format), NpuFusedAdamW(twins[1:])):
        other.load_state_dict(optimizer.state_dict())
        saved = other.state_dict(decoded=True) if isinstance(other, FusedAdam) else other.state_dict()
        found = saved["state"][0]
        for name in ("exp_avg", "exp_avg_sq"):
            limit = float(decoded[name].abs().max()) * (0.07 if format == "float8" else 0.01)
            torch.testing.assert_close(found[name], decoded[name], rtol=0, atol=limit)


def test_state_of_torch_is_encoded() -> None:
    params = make()
    theirs = torch.optim.AdamW(params, lr=1e-2)
    train(theirs, params, 3)
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    ours = FusedAdam(twins, lr=1e-2, weight_decay=1e-2, state_format="int8")
    ours.load_state_dict(theirs.state_dict())
    start = [nn.Parameter(param.detach().clone()) for param in params]
    train(theirs, params, 3, first=3)
    train(ours, twins, 3, first=3)
    assert all("exp_avg" not in state for state in ours.state.values())
    assert distance(twins, params, start) < 0.05


def saved_by_torch() -> tuple[list[nn.Parameter], dict[str, Any]]:
    params = make(shapes=((30, 20), (7,), (5000,)))
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    train(optimizer, params, 3)
    return params, optimizer.state_dict()


def as_bitsandbytes(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the state in bitsandbytes' layout: places in a sorted map of 256 numbers, blocks of 256."""
    states = {}
    for key, state in saved["state"].items():
        new = {"step": int(state["step"])}
        for number, name in enumerate(("exp_avg", "exp_avg_sq"), 1):
            values = state[name].reshape(-1)
            new[f"state{number}"] = state[name]
            if values.numel() >= 4096:
                numbers = torch.linspace(-1.0 if number == 1 else 0.0, 1.0, 256)
                blocks = torch.nn.functional.pad(values, (0, -len(values) % 256)).view(-1, 256)
                scales = blocks.abs().amax(1)
                places = torch.bucketize(blocks / scales[:, None], (numbers[1:] + numbers[:-1]) / 2)
                new[f"state{number}"] = places.reshape(-1)[: len(values)].to(torch.uint8).view(state[name].shape)
                new |= {f"absmax{number}": scales, f"qmap{number}": numbers}
        states[key] = new
    groups = [{**group, "alpha": 0.0, "t_alpha": None, "t_beta3": None} for group in saved["param_groups"]]
    return {"state": states, "param_groups": groups}


class Codes:
    """A stand-in for torchao's tensors, which have codes and scales and decode themselves."""

    def __init__(self, values: Tensor) -> None:
        self.scale = values.abs().amax()
        self.codes = (values / self.scale * 127).round().to(torch.int8)

    def dequantize(self) -> Tensor:
        return self.codes.to(torch.bfloat16) * (self.scale / 127)


def as_torchao(saved: dict[str, Any]) -> dict[str, Any]:
    states = {
        key: {name: Codes(value) if value.numel() >= 4096 else value for name, value in state.items()}
        for key, state in saved["state"].items()
    }
    return {**saved, "state": states}


def as_flash(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the state in FlashOptim's layout: groups of 32 elements, float16 scales."""
    states = {}
    for key, state in saved["state"].items():
        new = {"step": state["step"]}
        for name in ("exp_avg", "exp_avg_sq"):
            values = state[name].reshape(-1) if name == "exp_avg" else state[name].reshape(-1).sqrt()
            groups = torch.nn.functional.pad(values, (0, -len(values) % 32)).view(-1, 32)
            scales = groups.abs().amax(1).half()
            x = groups / scales.float()[:, None]
            codes = torch.floor(127 * 2 * x / (1 + x.abs()) + 0.5) if name == "exp_avg" else torch.floor(255 * x + 0.5)
            dtype = torch.int8 if name == "exp_avg" else torch.uint8
            codes = codes.clamp(-127, 127 if name == "exp_avg" else 255).to(dtype)
            new[f"{name}::quantized"] = codes.reshape(-1)[: len(values)].view(state[name].shape)
            new[f"{name}::scales"] = scales
        states[key] = new
    return {**saved, "state": states}


@pytest.mark.parametrize("format", ["float32", "int8"])
@pytest.mark.parametrize("layout", [as_bitsandbytes, as_torchao, as_flash])
def test_layouts_of_other_libraries_load(layout: Callable[..., Any], format: str) -> None:
    params, saved = saved_by_torch()
    optimizer = FusedAdam(params, lr=1e-2, state_format=format)
    optimizer.load_state_dict(layout(copy.deepcopy(saved)))
    assert optimizer.param_groups[0]["step"] == 3
    for state, truth in zip(optimizer.state_dict(decoded=True)["state"].values(), saved["state"].values(), strict=True):
        first, second = state["exp_avg"], state["exp_avg_sq"]
        # Steps of 1/127 of the largest number of a block, by either codec; of squares 1/255 of the largest.
        torch.testing.assert_close(first, truth["exp_avg"], rtol=0, atol=float(truth["exp_avg"].abs().amax()) / 60)
        torch.testing.assert_close(second, truth["exp_avg_sq"], rtol=0, atol=float(truth["exp_avg_sq"].amax()) / 60)
    train(optimizer, params, 1, first=3)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_skipped_step_changes_nothing(options: dict[str, Any]) -> None:
    params = make(torch.bfloat16)
    optimizer = FusedAdam(params, lr=1e-2, **options)
    train(optimizer, params, 2)
    before = [param.detach().clone() for param in params]
    states = [{name: value.clone() for name, value in state.items()} for state in optimizer.state.values()]
    optimizer.grad_scale, optimizer.found_inf = torch.full((1,), 8.0), torch.ones(1)
    train(optimizer, params, 1, first=2)
    assert all(map(torch.equal, params, before))
    for state, saved in zip(optimizer.state.values(), states, strict=True):
        assert all(torch.equal(state[name].view(torch.uint8), saved[name].view(torch.uint8)) for name in saved)


def test_bytes_of_a_parameter() -> None:
    params = [nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))]
    optimizer = FusedAdam(params, state_format="int8", master_bits=24)
    train(optimizer, params, 1)
    (state,) = optimizer.state.values()
    assert sum(value.nbytes for value in state.values()) / params[0].numel() == 3.125


REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (FusedAdam, {"state_format": "int4"}, "state_format='int4' is none of float32, bfloat16, int8, float8"),
    (FusedAdam, {"master_bits": 16}, "master_bits=16 is none of None, 24 and 32"),
    (FusedAdam, {"state_format": "int8", "amsgrad": True}, "amsgrad=True needs state_format='float32'"),
    (FusedAdam, {"master_bits": 24, "stochastic_rounding": True}, "stochastic_rounding rounds parameters"),
    (FusedLAMB, {"state_format": "int8"}, "FusedLAMB keeps float32 state"),
]


@pytest.mark.parametrize(("optimizer", "options", "words"), REFUSED, ids=str)
def test_refusals(optimizer: Callable[..., Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        optimizer(make(), **options)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("exp_avg::quantized", torch.zeros(3, dtype=torch.int8)),
        ("exp_avg::quantized", torch.zeros(9, 70)),
        ("exp_avg::scales", None),
        ("exp_avg_sq::quantized", torch.zeros(9, 70, dtype=torch.int8)),
        ("exp_avg_sq::scales", torch.zeros(9)),
        ("master_param::remainder", torch.zeros(9, 70)),
    ],
    ids=str,
)
def test_codes_that_do_not_fit_change_nothing(key: str, value: Any) -> None:
    params = [nn.Parameter(torch.ones(9, 70, dtype=torch.bfloat16))]
    optimizer = FusedAdam(params, state_format="int8", master_bits=24)
    train(optimizer, params, 2)
    saved, before = optimizer.state_dict(), dict(optimizer.state[params[0]])
    saved = {**saved, "state": {0: {**saved["state"][0], key: value}}}
    for loading in (optimizer, FusedAdam(params)):
        with pytest.raises(ValueError, match=f"{key} in the state of parameter 0 is .* tensor of shape .* is expected"):
            loading.load_state_dict(saved)
    assert all(optimizer.state[params[0]][name] is kept for name, kept in before.items())


def test_float16_parameters_have_masters_only_as_copies() -> None:
    params = [nn.Parameter(torch.zeros(8, 8, dtype=torch.float16))]
    with pytest.raises(ValueError, match="master_bits=24 is for bfloat16 parameters"):
        train(FusedAdam(params, master_bits=24), params, 1)
    assert not params[0].any()
    optimizer = FusedAdam(params, master_bits=24, master_weights=True)
    train(optimizer, params, 1)
    assert optimizer.state[params[0]]["master_param"].dtype == torch.float32


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_masters_of_amp_are_refused_before_anything_is_cast(level: str) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = FusedAdam(model.parameters(), state_format="int8")
    with pytest.raises(ValueError, match=f"state_format='int8'.*not the float32 masters that {level} makes"):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert model.weight.dtype == torch.float32


def test_parameters_with_gaps_are_refused() -> None:
    param = nn.Parameter(torch.zeros(128)[::2])
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match="strides"):
        FusedAdam([param], state_format="int8").step()


def test_cautious_decay_spares_elements_that_grow() -> None:
    exact = make(torch.float64)
    params = [nn.Parameter(param.detach().clone()) for param in exact]
    optimizer = FusedAdam(params, lr=1e-2, weight_decay=0.1, cautious_weight_decay=True)
    moments = [[torch.zeros_like(param.detach()) for param in exact] for _ in range(2)]
    for step in range(20):
        train(optimizer, params, 1, first=step)
        for param, twin, m, v in zip(exact, params, *moments, strict=True):
            gradient = twin.grad
            m.lerp_(gradient, 0.1)
            v.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            update = m / (1 - 0.9 ** (step + 1)) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
            decay = torch.where(update * param >= 0, 0.1 * param, 0.0)
            param.data.sub_(update + decay, alpha=1e-2)
    for param, twin in zip(exact, params, strict=True):
        torch.testing.assert_close(twin.detach(), param.detach(), rtol=1e-9, atol=1e-12)


CAPTURED: dict[str, dict[str, Any]] = {**OPTIONS, "rounded parameters": {"stochastic_rounding": True}}


@pytest.mark.gpu
@pytest.mark.parametrize("options", CAPTURED.values(), ids=CAPTURED)
def test_captured_steps_are_eager_steps_to_the_bit(options: dict[str, Any]) -> None:
    """The seed of every step is on the device: also of steps that are skipped."""
    results = []
    for captured in (False, True):
        params = make(torch.bfloat16, "cuda")
        optimizer = FusedAdam(params, lr=1e-2, weight_decay=0.1, **options)

        def step(scale: Tensor, params: Any = params, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            sum((param.float() * scale).square().sum() for param in params).backward()
            optimizer.step()

        run = graphs.capture(step) if captured else step
        for index in range(8):
            run(torch.full((), 1.0 + index, device="cuda"))
        results.append([*params, *(value for state in optimizer.state.values() for value in state.values())])
    for one, two in zip(*results, strict=True):
        assert torch.equal(one.detach().view(torch.uint8), two.detach().view(torch.uint8))


@pytest.mark.gpu
def test_capturable_steps_have_a_new_seed_at_every_replay() -> None:
    params, twins = (make(torch.bfloat16, "cuda") for _ in range(2))
    optimizer, eager = (FusedAdam(each, lr=1e-2, stochastic_rounding=True, capturable=True) for each in (params, twins))
    for tensors in (params, twins):
        for param in tensors:
            param.grad = torch.ones_like(param)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        optimizer.step()
    for _ in range(4):
        graph.replay()
    for _ in range(5):
        eager.step()
    torch.cuda.synchronize()
    assert all(map(torch.equal, params, twins))
    assert int(optimizer.param_groups[0]["rounding_count"]) == 5
