"""FusedMuon against `torch.optim.Muon` and a float64 reference, its groups, and its other algorithms."""

from __future__ import annotations

import copy
import math
import pickle
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex import graphs
from apex.ops.newton_schulz import config, newton_schulz
from apex.optimizers import FusedAdam, FusedMuon, muon_groups
from tests.ops.newton_schulz.test_newton_schulz import LiveElements

SHAPES = ((24, 40), (40, 24), (16, 16))
EXACT: Any = {"ns_dtype": torch.float64, "ns_method": "standard"}


def make(shapes: Any = SHAPES, dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)) for shape in shapes
    ]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.device, param.dtype)


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = 20, first: int = 0) -> None:
    for step in range(first, first + steps):
        give_gradients(params, step)
        optimizer.step()


def reference_step(
    p: Tensor, g: Tensor, buffer: Tensor, factor: float, lr: float, decay: float, nesterov: bool
) -> None:
    """Take a step of Muon in float64, by a singular value decomposition."""
    buffer.lerp_(g, 0.05)
    direction = g.lerp(buffer, 0.95) if nesterov else buffer
    left, values, right = torch.linalg.svd(direction / direction.norm(), full_matrices=False)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    p.mul_(1 - lr * decay).sub_(left @ (values[:, None] * right), alpha=lr * factor)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw", "spectral_unclamped"])
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_float64_reference(nesterov: bool, adjust: str | None, method: str) -> None:
    params, expected = make(), [param.detach().clone() for param in make()]
    buffers = [torch.zeros_like(param) for param in expected]
    optimizer = FusedMuon(
        params, 0.02, adjust_lr_fn=adjust, nesterov=nesterov, ns_method=method, ns_dtype=torch.float64
    )
    train(optimizer, params)
    for step in range(20):
        twins = [nn.Parameter(param) for param in expected]
        give_gradients(twins, step)
        for param, twin, buffer in zip(expected, twins, buffers, strict=True):
            rows, columns = param.shape
            ratio = rows / columns
            factors = {None: math.sqrt(max(1, ratio)), "spectral_unclamped": math.sqrt(ratio)}
            factors |= {"original": factors[None], "match_rms_adamw": 0.2 * math.sqrt(max(rows, columns))}
            assert twin.grad is not None
            reference_step(param, twin.grad, buffer, factors[adjust], 0.02, 0.1, nesterov)
    for param, other in zip(params, expected, strict=True):
        # Factors of the learning rate are float32.
        torch.testing.assert_close(param.detach(), other, rtol=1e-7, atol=1e-7)


INTERVALS: list[tuple[Any, int, float, float]] = [
    ((3.4445, -4.7750, 2.0315), 5, 0.68, 1.14),
    ("you", 5, 0.977, 1.032),
    ("polar_express", 5, 0.846, 1.124),
    ([(3.4445, -4.7750, 2.0315)] * 8 + [(2.0, -1.5, 0.5)], 10, 0.999, 1.001),
]


@pytest.mark.parametrize(("coefficients", "steps", "low", "high"), INTERVALS, ids=str)
def test_singular_values_of_an_update(coefficients: Any, steps: int, low: float, high: float) -> None:
    """Of a gradient whose own are 0.012 to 0.64 of its norm."""
    left, right = (torch.linalg.qr(param.detach()).Q for param in make([(16, 16), (16, 16)]))
    param = nn.Parameter(torch.zeros(16, 16, dtype=torch.float64))
    values = torch.logspace(-1.7, 0, 16, dtype=torch.float64)
    values = values / values.norm()
    param.grad = left @ (values[:, None] * right)
    FusedMuon([param], lr=1.0, weight_decay=0.0, ns_coefficients=coefficients, ns_steps=steps, **EXACT).step()
    found = torch.linalg.svdvals(param.detach())
    assert low <= float(found.min()) <= float(found.max()) <= high


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with PyTorch 2.9")
@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
def test_as_torch(adjust: str | None) -> None:
    ours, theirs = make(dtype=torch.float32), make(dtype=torch.float32)
    train(FusedMuon(ours, 0.02, adjust_lr_fn=adjust), ours)
    train(torch.optim.Muon(theirs, 0.02, adjust_lr_fn=adjust), theirs)
    for start, param, other in zip(make(dtype=torch.float32), ours, theirs, strict=True):
        # The iteration runs in bfloat16: its five steps amplify roundings to some percent of an update.
        assert (param - other).norm() < 0.06 * (other - start).norm()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with PyTorch 2.9")
def test_state_dicts_of_torch_both_ways() -> None:
    params, others = make(dtype=torch.float32), make(dtype=torch.float32)
    theirs = torch.optim.Muon(others, 0.02, momentum=0.9)
    train(theirs, others, 3)
    ours = FusedMuon(params, 0.5)
    ours.load_state_dict(theirs.state_dict())
    assert (ours.param_groups[0]["lr"], ours.param_groups[0]["momentum"]) == (0.02, 0.9)
    assert torch.equal(ours.state[params[0]]["momentum_buffer"], theirs.state[others[0]]["momentum_buffer"])
    train(ours, params, 1)
    back = torch.optim.Muon(make(dtype=torch.float32), 0.1)
    back.load_state_dict(ours.state_dict())
    assert torch.equal(back.state_dict()["state"][1]["momentum_buffer"], ours.state[params[1]]["momentum_buffer"])


def test_a_loaded_optimizer_goes_on_to_the_bit() -> None:
    shapes = (*SHAPES, (7,))
    params, resumed = make(shapes), make(shapes)
    optimizer = FusedMuon(params, 0.02)
    train(optimizer, params, 3)
    other = FusedMuon(resumed, 0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with torch.no_grad():
        for param, twin in zip(params, resumed, strict=True):
            twin.copy_(param)
    train(optimizer, params, 3, first=3)
    train(other, resumed, 3, first=3)
    assert all(torch.equal(param, twin) for param, twin in zip(params, resumed, strict=True))


@pytest.mark.parametrize(
    ("shape", "options", "parts"),
    [
        ((12, 10), {"num_heads": 3}, lambda tensor: tensor.split(4)),
        ((12, 10), {"split_sizes": (6, 3, 3)}, lambda tensor: tensor.split((6, 3, 3))),
        ((3, 6, 10), {}, lambda tensor: tensor.unbind()),
        ((6, 2, 3, 3), {"flatten": True}, lambda tensor: [tensor.flatten(1)]),
    ],
    ids=["heads", "split", "experts", "convolution"],
)
def test_blocks_are_separate_parameters(shape: tuple[int, ...], options: dict[str, Any], parts: Any) -> None:
    whole = make((shape,))
    pieces = [nn.Parameter(part.detach().clone()) for part in parts(whole[0])]
    first, second = FusedMuon([{"params": whole, **options}], 0.02, **EXACT), FusedMuon(pieces, 0.02, **EXACT)
    for step in range(3):
        give_gradients(whole, step)
        for piece, gradient in zip(pieces, parts(whole[0].grad), strict=True):
            piece.grad = gradient.clone()
        first.step()
        second.step()
    for part, piece in zip(parts(whole[0].detach()), pieces, strict=True):
        torch.testing.assert_close(part, piece.detach(), rtol=1e-9, atol=1e-9)


def test_channels_last_and_transposed_parameters() -> None:
    usual, other = make(((6, 2, 3, 3),)), make(((6, 2, 3, 3),))
    other[0].data = other[0].data.to(memory_format=torch.channels_last)
    for params in (usual, other):
        train(FusedMuon([{"params": params, "flatten": True}], 0.02, **EXACT), params, 3)
    torch.testing.assert_close(other[0].detach(), usual[0].detach(), rtol=1e-9, atol=1e-9)
    usual, other = make(((6, 9),)), make(((6, 9),))
    other[0].data = other[0].data.t().contiguous().t()
    for params in (usual, other):
        train(FusedMuon(params, 0.02, **EXACT), params, 3)
    torch.testing.assert_close(other[0].detach(), usual[0].detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("beta2", [None, 0.9])
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (2, 0, 3), (2, 3, 0)], ids=str)
@pytest.mark.parametrize("flatten", [False, True])
def test_tiny_and_empty_matrices(flatten: bool, shape: tuple[int, ...], beta2: float | None) -> None:
    params = make((shape, (4, 6)))
    before = params[1].detach().clone()
    group = {"params": params, "beta2": beta2, "flatten": flatten}
    optimizer = FusedMuon([group], 0.02, **EXACT)
    train(optimizer, params, 2)
    other = FusedMuon([{**group, "params": make((shape, (4, 6)))}], 0.02, **EXACT)
    other.load_state_dict(optimizer.state_dict())
    assert params[0].isfinite().all()
    assert not torch.equal(params[1].detach(), before)


def normuon(p: Tensor, gradients: list[Tensor], beta2: float) -> Tensor:
    """Return a matrix after steps of NorMuon in float64."""
    buffer, squares = torch.zeros_like(p), torch.zeros(len(p), 1, dtype=torch.float64)
    for g in gradients:
        buffer = buffer.lerp(g, 0.05)
        direction = g.lerp(buffer, 0.95)
        left, values, right = torch.linalg.svd(direction / direction.norm(), full_matrices=False)
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        update = left @ (values[:, None] * right)
        squares = squares.lerp(update.square().mean(1, keepdim=True), 1 - beta2)
        even = update / (squares.sqrt() + 1e-8)
        factor = 0.02 * math.sqrt(max(1.0, p.shape[0] / p.shape[1]))
        p = p - factor * even * update.norm() / even.norm() - 0.02 * 0.1 * p
    return p


def test_normuon_over_20_steps_and_a_skipped_one() -> None:
    params = make()
    params.append(nn.Parameter(params[0].detach().t().contiguous().t()))  # columns one after the other
    start = [param.detach().clone() for param in params]
    optimizer = FusedMuon([{"params": params, "beta2": 0.9}], 0.02, **EXACT)
    seen: list[list[Tensor]] = [[] for _ in params]
    for step in range(20):
        give_gradients(params, step)
        if step == 5:
            before = copy.deepcopy(optimizer.state_dict()["state"])
            optimizer.grad_scale, optimizer.found_inf = torch.ones(1), torch.ones(1)
            optimizer.step()
            optimizer.found_inf.zero_()
            for state, saved in zip(optimizer.state.values(), before.values(), strict=True):
                assert torch.equal(state["second_momentum_buffer"], saved["second_momentum_buffer"])
        if step == 10:  # goes on from a state dict
            other = FusedMuon([{"params": params, "beta2": 0.9}], 0.02, **EXACT)
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer = other
        for gradients, param in zip(seen, params, strict=True):
            gradients.append(param.grad.clone())
        optimizer.step()
    for param, begin, gradients in zip(params, start, seen, strict=True):
        # The averages are float32.
        torch.testing.assert_close(param.detach(), normuon(begin, gradients, 0.9), rtol=1e-4, atol=1e-5)


def test_vectors_are_for_adamw() -> None:
    params, others = make(((5,), (), (4, 6))), make(((5,), (), (4, 6)))
    optimizer = FusedMuon(params, 0.02, betas=(0.8, 0.99))
    assert [(group["algorithm"], len(group["params"])) for group in optimizer.param_groups] == [
        ("muon", 1),
        ("adamw", 2),
    ]
    train(optimizer, params)
    train(torch.optim.AdamW(others, 0.02, betas=(0.8, 0.99), weight_decay=0.1), others)
    for param, other in zip(params[:2], others[:2], strict=True):
        torch.testing.assert_close(param.detach(), other.detach())


def test_lion() -> None:
    params, expected = make(), [param.detach().clone() for param in make()]
    optimizer = FusedMuon([{"params": params, "algorithm": "lion"}], 0.02, betas=(0.9, 0.98), weight_decay=0.3)
    train(optimizer, params, 5)
    averages = [torch.zeros_like(param) for param in expected]
    for step in range(5):
        twins = [nn.Parameter(param) for param in expected]
        give_gradients(twins, step)
        for param, twin, average in zip(expected, twins, averages, strict=True):
            assert twin.grad is not None
            sign = average.lerp(twin.grad, 0.1).sign()
            param.sub_(0.02 * (sign + 0.3 * param))
            average.lerp_(twin.grad, 0.02)
    for param, other in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach(), other)


def test_cautious_decay_spares_elements_that_grow() -> None:
    first, second, third = make(((4, 6),)), make(((4, 6),)), make(((4, 6),))
    train(FusedMuon(first, 0.02, weight_decay=0.0, **EXACT), first, 1)
    train(FusedMuon(second, 0.02, weight_decay=0.5, cautious_weight_decay=True, **EXACT), second, 1)
    start, update = third[0].detach(), (third[0] - first[0]).detach()
    expected = first[0].detach() - torch.where(update * start > 0, 0.02 * 0.5 * start, 0.0)
    torch.testing.assert_close(second[0].detach(), expected)


def test_cautious_decay_of_parameters_that_adamw_updates() -> None:
    first, second = make([(30,)]), make([(30,)])
    options: Any = {"lr": 0.02, "weight_decay": 0.5, "betas": (0.9, 0.99), "cautious_weight_decay": True}
    train(FusedMuon(first, **options), first, 5)
    train(FusedAdam(second, **options), second, 5)
    torch.testing.assert_close(first, second)


def test_a_skipped_step_changes_nothing() -> None:
    params = make(dtype=torch.float32)
    optimizer = FusedMuon(params, 0.02)
    train(optimizer, params, 2)
    before = [param.detach().clone() for param in params]
    buffers = [optimizer.state[param]["momentum_buffer"].clone() for param in params]
    give_gradients(params, 2)
    assert params[1].grad is not None
    params[1].grad[0, 0] = torch.inf
    optimizer.grad_scale, optimizer.found_inf = (
        torch.full((1,), 4.0),
        torch.ones(1),
    )  # as torch.amp.GradScaler sets them
    optimizer.step()
    assert all(torch.equal(param, old) for param, old in zip(params, before, strict=True))
    states = [optimizer.state[param]["momentum_buffer"] for param in params]
    assert all(torch.equal(state, old) for state, old in zip(states, buffers, strict=True))


def test_the_loss_scale_cancels() -> None:
    plain, scaled = make(), make()
    train(FusedMuon(plain, 0.02, **EXACT), plain, 3)
    optimizer = FusedMuon(scaled, 0.02, **EXACT)
    for step in range(3):
        give_gradients(scaled, step)
        for param in scaled:
            assert param.grad is not None
            param.grad *= 4
        optimizer.grad_scale, optimizer.found_inf = torch.full((1,), 4.0), torch.zeros(1)
        optimizer.step()
    for param, other in zip(scaled, plain, strict=True):
        torch.testing.assert_close(param.detach(), other.detach())


def test_master_weights() -> None:
    half, single = make(dtype=torch.bfloat16), [nn.Parameter(param.float()) for param in make(dtype=torch.bfloat16)]
    optimizer = FusedMuon(half, 0.02, master_weights=True)
    train(optimizer, half, 3)
    other = FusedMuon(single, 0.02)
    for step in range(3):
        give_gradients(half, step)
        for param, twin in zip(single, half, strict=True):
            assert twin.grad is not None
            param.grad = twin.grad.float()
        other.step()
    for param, twin in zip(half, single, strict=True):
        assert torch.equal(optimizer.state[param]["master_param"], twin.detach())
        assert torch.equal(param.detach(), twin.detach().bfloat16())


def test_float16_results_of_the_iteration_are_used_as_they_are() -> None:
    """A copy of the results in bfloat16 would be off by up to 2**-9 of an element."""
    params = make(dtype=torch.float32)
    give_gradients(params, 0)
    optimizer = FusedMuon(params, 1.0, weight_decay=0.0, ns_method="gram")
    before = [param.detach().clone() for param in params]
    for step in range(2):  # the second one with other gradients, in other memory
        give_gradients(params, step)
        expected = []
        for param, old in zip(params, before, strict=True):
            assert param.grad is not None
            buffer = optimizer.state[param].get("momentum_buffer", torch.zeros_like(param))
            direction = param.grad.lerp(buffer.lerp(param.grad, 0.05), 0.95).bfloat16()
            rows, columns = param.shape
            result = newton_schulz(direction, [(3.4445, -4.7750, 2.0315)] * 5, method="gram")
            expected.append(old - math.sqrt(max(1, rows / columns)) * result.float())
        optimizer.step()
        for param, other in zip(params, expected, strict=True):
            torch.testing.assert_close(param.detach(), other, rtol=1e-5, atol=1e-5)
        before = [param.detach().clone() for param in params]
    # The lists for float16 results take those of another method too.
    optimizer.param_groups[0]["ns_method"] = "standard"
    give_gradients(params, 2)
    optimizer.step()
    for param, other in zip(params, before, strict=True):
        rows, columns = param.shape
        update = (other - param.detach()) / math.sqrt(max(1, rows / columns))
        assert 0.5 < float(torch.linalg.svdvals(update).max()) < 1.5


def test_large_groups_are_updated_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, in_parts = make(), make()
    train(FusedMuon(at_once, 0.02, **EXACT), at_once, 3)
    monkeypatch.setattr("apex.optimizers.fused_muon.WORKSPACE", 1000)
    optimizer = FusedMuon(in_parts, 0.02, **EXACT)
    train(optimizer, in_parts, 3)
    assert max(space.numel() for space in optimizer._workspaces.values()) < sum(map(Tensor.numel, in_parts))
    for param, other in zip(in_parts, at_once, strict=True):
        torch.testing.assert_close(param.detach(), other.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a caller's frame then holds the normalised matrices")
@pytest.mark.parametrize("beta2", [None, 0.9])
def test_memory_of_a_step_is_that_of_a_batch(beta2: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    params = make(((64, 64),) * 6)
    budget = 2 * config.peak_elements(64, 64)
    monkeypatch.setattr(config, "WORKSPACE", 8 * budget)
    optimizer = FusedMuon([{"params": params, "beta2": beta2}], 0.02, ns_dtype=torch.float64, ns_method="gram")
    train(optimizer, params, 2)
    with LiveElements() as live:
        optimizer.step()
    # Frames of callers hold the two normalised matrices once torch.compile has run in the process.
    assert 0.7 * budget < live.peak < budget + 3 * 4096


def test_batches_stay_within_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal matrices, blocks of rows and experts are divided into batches, whose results are those of one batch."""
    shapes, splits = ((24, 40),) * 5 + ((5, 24, 40),), {"split_sizes": (8, 16)}
    whole, parts, groups = make(shapes), make(shapes), []
    for params in (whole, parts):
        groups.append([{"params": params[:2] + params[5:]}, {"params": params[2:5], **splits}])
    train(FusedMuon(groups[0], 0.02, **EXACT), whole, 3)
    sizes = []

    def recorded(matrices: Tensor, *options: Any, **more: Any) -> Tensor:
        sizes.append(tuple(matrices.shape))
        return newton_schulz(matrices, *options, **more)

    monkeypatch.setattr("apex.optimizers._muon_directions.newton_schulz", recorded)
    monkeypatch.setattr(config, "WORKSPACE", 2 * 8 * config.peak_elements(24, 40))  # two matrices in float64
    train(FusedMuon(groups[1], 0.02, **EXACT), parts, 3)
    assert sizes[: len(sizes) // 3] == [(2, 24, 40)] * 3 + [(1, 24, 40)] + [(3, 8, 40)] + [(2, 16, 40), (1, 16, 40)]
    for param, other in zip(parts, whole, strict=True):
        torch.testing.assert_close(param.detach(), other.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"momentum": 1.0}, "momentum"),
        ({"ns_steps": 100}, "ns_steps"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients"),
        ({"ns_coefficients": "yuo"}, "ns_coefficients='yuo' .* 'you' or 'polar_express'"),
        ({"adjust_lr_fn": "mine"}, "adjust_lr_fn"),
        ({"ns_method": "fast"}, "ns_method"),
        ({"ns_method": "gram", "ns_dtype": torch.bfloat16}, "ns_dtype=torch.float16"),
        ({"ns_dtype": torch.float8_e4m3fn}, "ns_dtype"),
        ({"lr": -1.0}, "lr"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FusedMuon(make(), **options)


@pytest.mark.parametrize(
    ("shape", "group", "words"),
    [
        ((6, 2, 3, 3), {}, "flatten=True"),
        ((7, 4), {"num_heads": 2}, "num_heads=2"),
        ((7, 4), {"split_sizes": (3, 3)}, "split_sizes"),
        ((7, 4), {"algorithm": "sgd"}, "algorithm='sgd'"),
    ],
)
def test_bad_groups_are_refused(shape: tuple[int, ...], group: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FusedMuon([{"params": make((shape,)), **group}])


@pytest.mark.parametrize("of", ["another group", "a computation"])
def test_a_refused_group_leaves_the_groups_as_they_were(of: str) -> None:
    vector = make(((4,),))[0]
    optimizer = FusedMuon([*make(((4, 4),)), vector])
    added = vector if of == "another group" else vector * 2
    with pytest.raises(ValueError, match="group already" if of == "another group" else "leaf"):
        optimizer.add_param_group({"params": [*make(((3, 3),)), added]})  # its matrix alone would be accepted
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_steps_under_autocast(dtype: torch.dtype) -> None:
    """Such as those of amp's O1, which turns autocast on for the whole thread."""
    params, expected = make(dtype=torch.float32), make(dtype=torch.float32)
    train(FusedMuon(expected), expected, 2)
    with torch.autocast("cpu", dtype):
        train(FusedMuon(params), params, 2)
    for param, other in zip(params, expected, strict=True):
        assert torch.equal(param, other)


def test_matrices_with_gaps_are_refused_before_a_step() -> None:
    matrix, vector = nn.Parameter(torch.ones(8, 6)[::2]), nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"shape \[4, 6\] has strides \(12, 1\), .* make it contiguous"):
        FusedMuon([vector, matrix])
    FusedMuon([{"params": [matrix], "algorithm": "adamw"}])


CHANGED: list[dict[str, Any]] = [
    {"adjust_lr_fn": "match_rms_adamw"},
    {"num_heads": 4},
    {"split_sizes": (8, 4, 12)},
    {"beta2": 0.9},
    {"ns_dtype": torch.float32},
    {"momentum": 0.5, "ns_steps": 2},
]


@pytest.mark.parametrize("change", CHANGED, ids=str)
def test_options_that_change_between_steps(change: dict[str, Any]) -> None:
    """They act at once, as in an optimizer that is made with them and goes on from the same state."""
    shapes = ((24, 40), (24, 6))
    params, expected = make(shapes), make(shapes)
    optimizer, first = (FusedMuon(each, 0.1, **EXACT) for each in (params, expected))
    train(optimizer, params, 2)
    train(first, expected, 2)
    second = FusedMuon(expected, 0.1, **EXACT)
    saved = first.state_dict()
    saved["param_groups"][0].update(change)
    second.load_state_dict(saved)
    train(second, expected, 2, first=2)
    optimizer.param_groups[0].update(change)
    train(optimizer, params, 2, first=2)
    for param, other in zip(params, expected, strict=True):
        assert torch.equal(param, other)


@pytest.mark.parametrize("copied", [False, True])
def test_schedulers_cycle_the_momentum_of_matrices(copied: bool) -> None:
    optimizer: FusedMuon = FusedMuon(make(((4, 4), (3,))), betas=(0.8, 0.9))
    if copied:
        optimizer = pickle.loads(pickle.dumps(optimizer))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4, pct_start=0.5)
    optimizer.step()
    scheduler.step()
    assert all(group["momentum"] < 0.95 for group in optimizer.param_groups)
    optimizer.add_param_group({"params": make(((5, 5),))})
    assert [group["betas"] for group in optimizer.param_groups] == [(0.8, 0.9)] * 3


def test_groups_of_parameters_are_refused() -> None:
    with pytest.raises(TypeError, match="model must be a module, got list"):
        muon_groups(make())  # type: ignore[arg-type]


def test_groups_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(
        nn.Embedding(9, 8),
        nn.Conv1d(4, 4, 3, groups=4),
        nn.Conv2d(2, 6, 3),
        nn.LayerNorm(8),
        nn.Linear(8, 8),
        nn.Linear(8, 9),
    )
    model[5].weight = model[0].weight
    groups = muon_groups(model, 0.02, 0.001)
    assert [(group["algorithm"], group["lr"], len(group["params"])) for group in groups] == [
        ("muon", 0.02, 1),
        ("muon", 0.02, 1),
        ("adamw", 0.001, 8),
    ]
    assert groups[0]["params"][0] is model[4].weight
    assert groups[1]["params"][0] is model[2].weight
    assert "Muon  4.weight [8, 8]" in capsys.readouterr().out
    optimizer = FusedMuon(groups)
    params = [param for group in groups for param in group["params"]]
    train(optimizer, params, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_as_cpu(dtype: torch.dtype) -> None:
    shapes = ((300, 700), (700, 300), (300, 700), (64, 64), (9,))
    here, there = make(shapes, dtype), make(shapes, dtype, "cuda")
    for params in (here, there):
        train(FusedMuon(params, 0.02, master_weights=dtype == torch.bfloat16), params, 5)
    for start, param, other in zip(make(shapes, dtype), there, here, strict=True):
        difference, way = param.detach().cpu().float() - other.detach().float(), (other - start).detach().float()
        assert difference.norm() < 0.06 * way.norm()


@pytest.mark.gpu
def test_captured_steps_are_eager_steps_to_the_bit() -> None:
    shapes = ((300, 700), (64, 64), (9,))
    results = []
    for captured in (False, True):
        params = make(shapes, torch.float32, "cuda")
        optimizer = FusedMuon(params, 0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        inputs = [torch.randn(8, *param.shape, generator=torch.Generator().manual_seed(1)).cuda() for param in params]

        def step(scale: Tensor, params: Any = params, optimizer: Any = optimizer, inputs: Any = inputs) -> Tensor:
            optimizer.zero_grad()
            loss = sum(
                ((param * data).sum((-1,)) * scale).square().mean() for param, data in zip(params, inputs, strict=True)
            )
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = graphs.capture(step) if captured else step
        for index in range(8):
            run(torch.full((), 1.0 + index, device="cuda"))
            scheduler.step()
        results.append([param.detach().clone() for param in params])
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))
