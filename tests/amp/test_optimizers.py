"""Every optimizer under amp: masters, skipped steps, groups, frozen parameters."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import apex.contrib.optimizers
import apex.optimizers
from apex import amp
from apex.amp._amp_state import _amp_state as state
from apex.ops import _library
from apex.optimizers import FusedAdam, FusedSGD
from apex.parallel import LARC
from tests.amp.common import assert_same, loss_of, overflow_at, quiet, small_model, train, values
from tests.support.harness import Route, routes

Maker = Callable[[Any], Any]


class counting(TorchDispatchMode):
    """Collects the names of operators that run."""

    def __enter__(self) -> list[str]:  # type: ignore[override]
        super().__enter__()
        self.names: list[str] = []
        return self.names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def _makers() -> dict[str, Maker]:
    found: dict[str, Maker] = {}
    for package, prefix in ((apex.optimizers, "apex"), (torch.optim, "torch")):
        for name in sorted(package.__all__ if prefix == "apex" else dir(torch.optim)):
            kind = getattr(package, name)
            if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
                found[f"{prefix}.{name}"] = kind
    for name in ("LBFGS", "SparseAdam"):  # tests of their own below
        found.pop(f"torch.{name}")
    for name in ("FusedAdam", "FusedLAMB"):
        found[f"contrib.{name}"] = getattr(apex.contrib.optimizers, name)
    found["LARC(torch.SGD)"] = lambda params, lr: LARC(torch.optim.SGD(params, lr=lr, momentum=0.9))
    found["LARC(FusedSGD)"] = lambda params, lr: LARC(FusedSGD(params, lr=lr, momentum=0.9))
    found["FusedSGD(materialize_master_grads=False)"] = lambda params, lr: FusedSGD(
        params, lr=lr, momentum=0.9, materialize_master_grads=False
    )
    return found


MAKERS = _makers()


def make(name: str, params: Any) -> Any:
    if name == "torch.Muon":  # for matrices only
        params = [param for param in params if param.dim() == 2]
    if name == "apex.NpuFusedBertAdam":
        return MAKERS[name](params, lr=0.01, t_total=-1)
    return MAKERS[name](params, lr=0.01)


@pytest.mark.parametrize("name", MAKERS)
def test_trains_with_masters(name: str) -> None:
    """O2 with overflows at the second step follows the same optimizer in float32 that never saw that step."""
    plain, model = small_model(), small_model()
    optimizer = make(name, plain.parameters())
    for step in (0, 2, 3, 4):
        optimizer.zero_grad()
        loss_of(plain, step).backward()
        optimizer.step()
    model, optimizer = quiet(model, make(name, model.parameters()), opt_level="O2")
    losses = train(model, optimizer, 5, overflow_at(1))
    assert state.loss_scalers[0].loss_scale() == 2.0**15
    assert losses[4] < losses[0] * 3
    stash = optimizer._amp_stash
    for param, master in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True):
        assert torch.equal(param, master.half())
    expected = torch.cat([p.detach().flatten() for p in plain.parameters()])
    saved = model.state_dict()
    found = torch.cat([saved[name].flatten() for name, _ in model.named_parameters()])
    # Adam-like steps follow the sign of gradients that half precision may turn around.
    assert (found - expected).abs().max() <= 0.1


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", MAKERS)
def test_an_overflow_changes_nothing(name: str, level: str) -> None:
    model = small_model()
    model, optimizer = quiet(model, make(name, model.parameters()), opt_level=level)
    train(model, optimizer, 2)
    before = values(model.parameters()), copy.deepcopy(optimizer.state_dict()["state"])
    train(model, optimizer, [2], overflow_at(2))
    assert_same(before[0], model.parameters())
    after = optimizer.state_dict()["state"]
    for index, states in before[1].items():
        for key, value in states.items():
            if isinstance(value, Tensor):
                assert torch.equal(value, after[index][key]), key


@pytest.mark.parametrize("level", ["O1", "O3", "O4", "O5"])
@pytest.mark.parametrize("name", ["torch.SGD", "torch.Adam", "apex.FusedAdam", "apex.FusedSGD", "apex.FusedLAMB"])
def test_other_levels(level: str, name: str) -> None:
    """Check that the losses are close to float32's."""
    if (level, name) == ("O3", "torch.Adam"):
        pytest.skip("its second moments and its eps do not fit in float16; FusedAdam keeps them in float32")
    losses = {}
    for each in ("O0", level):
        model = small_model()
        model, optimizer = quiet(model, make(name, model.parameters()), opt_level=each)
        losses[each] = train(model, optimizer, 6)
        amp.shutdown()
    assert losses[level] == pytest.approx(losses["O0"], rel=0.02)


def test_an_optimizer_without_support_for_amp() -> None:
    model = small_model()
    with pytest.raises(RuntimeError, match=r"apex\.optimizers\.FusedSGD is"):
        quiet(model, apex.contrib.optimizers.FusedSGD(model.parameters(), lr=0.1), opt_level="O2")
    assert model[0].weight.dtype == torch.float32


def test_sparse_gradients() -> None:
    for level, scale in (("O1", "dynamic"), ("O2", "dynamic"), ("O2", 1.0)):
        torch.manual_seed(0)
        model = nn.Embedding(10, 4, sparse=True)
        reference = copy.deepcopy(model)
        model, optimizer = quiet(
            model,
            torch.optim.SparseAdam(model.parameters(), lr=0.01),
            opt_level=level,
            loss_scale=scale,
            dynamic_init_scale=128.0,
        )
        theirs = torch.optim.SparseAdam(reference.parameters(), lr=0.01)
        for step in range(3):
            index = torch.tensor([step, 3, 3])
            optimizer.zero_grad()
            theirs.zero_grad()
            for _ in range(2):  # accumulated
                with amp.scale_loss(model(index).float().sum(), optimizer) as scaled:
                    scaled.backward()
                reference(index).sum().backward()
            optimizer.step()
            theirs.step()
        torch.testing.assert_close(model.state_dict()["weight"], reference.weight.detach(), atol=1e-5, rtol=1e-5)
        with amp.scale_loss(model(index).float().sum() * float("inf"), optimizer) as scaled:
            scaled.backward()
        before = values(model.parameters())
        if scale == "dynamic":
            optimizer.step()
        assert_same(before, model.parameters())
        amp.shutdown()


@pytest.mark.parametrize("name", ["apex.FusedAdam", "apex.FusedLAMB", "apex.FusedNovoGrad", "LARC(FusedSGD)"])
def test_the_model_follows_its_masters(name: str) -> None:
    model = small_model()
    model, optimizer = quiet(model, make(name, model.parameters()), opt_level="O5")
    before = model[0].weight.detach().clone()
    train(model, optimizer, 2)
    assert not torch.equal(before, model[0].weight)
    for param, master in zip(
        optimizer._amp_stash.all_fp16_params, optimizer._amp_stash.all_fp32_from_fp16_params, strict=True
    ):
        assert torch.equal(param, master.bfloat16())


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("name", ["apex.FusedAdam", "apex.FusedSGD", "FusedSGD(materialize_master_grads=False)"])
def test_by_every_route(name: str, route: Route) -> None:
    """Kernels and PyTorch operators write the same models; an overflow keeps both from it."""
    with _library.implementation(route.implementation):
        model = small_model(device=route.device)
        model, optimizer = quiet(model, make(name, model.parameters()), opt_level="O2")
        before = values(model.parameters())
        train(model, optimizer, 3, overflow_at(1))
        stash = optimizer._amp_stash
        assert_same([master.half() for master in stash.all_fp32_from_fp16_params], stash.all_fp16_params)
        assert not torch.equal(before[0], model[0].weight)
        after = values(model.parameters())
        train(model, optimizer, [3], overflow_at(3))
        assert_same(after, model.parameters())


def test_a_subclass_with_a_step_of_its_own() -> None:
    """The subclass was written for the original and calls the kernel, which does not write the model."""

    class Own(FusedAdam):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            with torch.no_grad():
                for param in self.param_groups[0]["params"]:
                    param.sub_(param.grad, alpha=0.1)

    model = small_model()
    model, optimizer = quiet(model, Own(model.parameters()), opt_level="O2")
    before = model[0].weight.detach().clone()
    train(model, optimizer, 1)
    assert not torch.equal(before, model[0].weight)
    assert torch.equal(model[0].weight, optimizer._amp_stash.all_fp32_from_fp16_params[0].half())


def test_masters_start_from_the_exact_weights() -> None:
    model = small_model()
    exact = values(model.parameters())
    model, optimizer = quiet(model, FusedAdam(model.parameters()), opt_level="O2")
    assert_same(exact, amp.master_params(optimizer))
    assert_same([exact[0].half()], [model[0].weight])


UNSCALING = ("FusedAdam", "FusedAdagrad", "FusedLAMB", "FusedLARS", "FusedNovoGrad", "FusedSGD", "NpuFusedAdamW")


@pytest.mark.parametrize(
    ("kind", "level", "passes"),
    [*((kind, "O2", 1) for kind in UNSCALING), ("FusedSGD", "O2", 3), ("FusedAdam", "O5", 1)],
)
def test_without_materialized_master_gradients(kind: str, level: str, passes: int) -> None:
    """Compare numbers, up to rounding of sums in half precision; half parameters get no float32 gradients."""
    results = []
    for materialize in (True, False):
        model = small_model()
        fused = getattr(apex.optimizers, kind)(model.parameters(), lr=0.1, materialize_master_grads=materialize)
        scaling = {"scale_window": 2} if level == "O2" else {"loss_scale": 8.0}
        model, optimizer = quiet(model, fused, opt_level=level, **scaling)
        for step in range(4):
            optimizer.zero_grad()
            for part in range(passes):
                with amp.scale_loss(loss_of(model, step * passes + part), optimizer) as scaled:
                    scaled.backward()
            assert all((m.grad is None) != materialize for m in optimizer._amp_stash.all_fp32_from_fp16_params)
            assert optimizer.scale_set_by_backward is not materialize
            if level == "O5" and not materialize:  # a static scale: nobody has to touch them before the step
                assert all(param.grad._version == 0 for param in optimizer._amp_stash.all_fp16_params)
            optimizer.step()
            assert optimizer.most_recent_scale == 1.0
            assert not optimizer.scale_set_by_backward
        results.append(values(amp.master_params(optimizer)))
        amp.shutdown()
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=3e-7 if passes == 1 else 1e-3)


@pytest.mark.parametrize("route", routes())
def test_sums_that_half_precision_cannot_hold(route: Route, capsys: pytest.CaptureFixture) -> None:
    """Two gradients fit into float16, their sum does not: an overflow like any other."""
    with _library.implementation(route.implementation):
        model = nn.Linear(1, 3, bias=False).to(route.device)
        sgd = FusedSGD(model.parameters(), lr=0.1, momentum=0.9, materialize_master_grads=False)
        model, optimizer = quiet(model, sgd, opt_level="O2", dynamic_init_scale=32768.0)
        amp._amp_state.verbosity = 1
        before = values(model.parameters())
        for scale in (32768.0, 16384.0):
            assert amp.state_dict()["loss_scaler0"]["loss_scale"] == scale
            assert_same(before, model.parameters())
            optimizer.zero_grad()
            for _ in range(2):
                with amp.scale_loss(model(torch.ones(1, 1, device=route.device))[:, 1].sum(), optimizer) as scaled:
                    scaled.backward()
            assert model.weight.grad.flatten().tolist() == [0.0, float("inf") if scale > 2e4 else 2 * scale, 0.0]
            optimizer.step()
    moved = torch.tensor([[0.0], [0.2], [0.0]]).to(model.weight)
    torch.testing.assert_close(before[0] - model.weight, moved, atol=1e-3, rtol=0)
    assert "1 of 1 gradients are not finite: weight (1 inf)" in capsys.readouterr().out


@pytest.mark.parametrize("loss_scale", ["dynamic", 128.0])
def test_gradients_keep_the_smallest_scale(loss_scale: Any) -> None:
    """Two losses with their own scales, in either order, and a parameter that only the first one uses."""
    for scales in ((1024.0, 64.0), (64.0, 1024.0)):
        model = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
        sgd = FusedSGD(model.parameters(), lr=1.0, materialize_master_grads=False)
        options = {"num_losses": 2, "cast_model_outputs": torch.float16, "loss_scale": loss_scale}
        model, optimizer = quiet(model, sgd, opt_level="O2", **options)
        for scaler, scale in zip(amp._amp_state.loss_scalers, scales, strict=True):
            scaler._loss_scale = scale
        before = values(amp.master_params(optimizer))
        inputs = torch.ones(1, 1).half()
        losses = [(model[0](inputs) + 3 * model[1](inputs)).sum(), 63 * model[1](inputs).sum()]
        for loss_id, loss in enumerate(losses):
            with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
                scaled.backward()
        assert optimizer.most_recent_scale == 64.0
        assert [param.grad.item() for param in model.parameters()] == [64.0, 64.0 * 66]
        optimizer.step()
        after = values(amp.master_params(optimizer))
        assert [float(a - b) for a, b in zip(before, after, strict=True)] == pytest.approx([1.0, 66.0])
        amp.shutdown()


def test_a_static_scale_of_one_takes_no_kernels() -> None:
    """A kernel takes the host 10 us: a step of a small network would be 0.1 ms longer for multiplying by 1."""
    model = small_model()
    adam = FusedAdam(model.parameters(), materialize_master_grads=False)
    model, optimizer = quiet(model, adam, opt_level="O5")
    train(model, optimizer, 1)
    optimizer.zero_grad()
    loss = loss_of(model, 0)
    with counting() as before:
        context = amp.scale_loss(loss, optimizer)
        scaled = context.__enter__()
    assert scaled is loss
    scaled.backward()
    with counting() as after:
        context.__exit__(None, None, None)
    assert not before
    assert after in ([], ["aten::add_"])  # the steps since an overflow
    assert optimizer.most_recent_scale == 1.0
    assert type(optimizer.most_recent_scale) is float


def test_nor_does_it_where_gradients_go_to_masters() -> None:
    model = small_model()
    model, optimizer = quiet(model, FusedAdam(model.parameters()), opt_level="O5")
    for _ in range(2):  # with gradients to add to, the second time
        loss = loss_of(model, 0)
        with counting() as names, amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        assert "aten::reciprocal" not in names
    optimizer.step()


def test_a_skipped_step_forgets_the_scale() -> None:
    model = small_model()
    sgd = LARC(FusedSGD(model.parameters(), lr=0.1, materialize_master_grads=False))
    model, optimizer = quiet(model, sgd, opt_level="O2")
    train(model, optimizer, 3, overflow_at(1))
    assert optimizer.optim.most_recent_scale == 1.0


@pytest.mark.parametrize("kind", [torch.optim.SGD, FusedAdam], ids=["SGD", "FusedAdam"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_add_param_group(level: str, kind: Any) -> None:
    model = small_model()
    optimizer = kind(model[0].parameters(), lr=0.1)
    model, optimizer = quiet(model, optimizer, opt_level=level)
    train(model, optimizer, 1)
    optimizer.add_param_group({"params": model[3].parameters(), "lr": 0.5})
    optimizer.add_param_group({"params": model[1].weight})
    before = values(model.parameters())
    train(model, optimizer, 1)
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert moved == [True, True, False, True, True]
    assert optimizer.param_groups[1]["lr"] == 0.5
    assert {p.dtype for p in amp.master_params(optimizer)} == {torch.float32}
    assert len(list(amp.master_params(optimizer))) == 4
    with pytest.raises(TypeError, match="order"):
        optimizer.add_param_group({"params": {model[1].bias}})


@pytest.mark.parametrize("kind", [torch.optim.SGD, FusedAdam], ids=["SGD", "FusedAdam"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_parameters_that_are_unfrozen_later(level: str, kind: Any) -> None:
    model = small_model()
    model[0].weight.requires_grad_(False)
    model, optimizer = quiet(model, kind(model.parameters(), lr=0.1), opt_level=level)
    frozen = model[0].weight.detach().clone()
    train(model, optimizer, 2)
    assert torch.equal(frozen, model[0].weight)
    model[0].weight.requires_grad_(True)
    train(model, optimizer, 2)
    assert not torch.equal(frozen, model[0].weight)
    # A step on scaled gradients would have gone to the moon.
    assert (frozen - model[0].weight).abs().max() < 1.0
    assert all(p.dtype == torch.float32 for p in amp.master_params(optimizer))


def test_state_from_before_initialize() -> None:
    for level in ("O2", "O3"):
        for kind in (torch.optim.Adam, FusedAdam):
            model = small_model()
            optimizer = kind(model.parameters(), lr=0.01)
            loss_of(model, 0).backward()
            optimizer.step()
            moment = optimizer.state[model[0].weight]["exp_avg"].clone()
            model, optimizer = quiet(model, optimizer, opt_level=level)
            master = next(amp.master_params(optimizer))
            found = optimizer.state[master]["exp_avg"]
            torch.testing.assert_close(found.float(), moment, rtol=1e-3, atol=1e-6)
            train(model, optimizer, 2)
            amp.shutdown()


def test_counts_of_steps_are_not_cast_to_half_precision() -> None:
    """float16 has no 2049: an optimizer whose count were cast would stop counting at 2048."""
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_of(model, 0).backward()
    optimizer.step()
    for kept in optimizer.state.values():
        kept["step"].fill_(2049.0)
    model, optimizer = quiet(model, optimizer, opt_level="O3")
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.float16
    train(model, optimizer, 2)
    assert {float(kept["step"]) for kept in optimizer.state.values()} == {2051.0}
    amp.shutdown()
    assert {float(kept["step"]) for kept in optimizer.state.values()} == {2051.0}


def test_zero_grad() -> None:
    model = small_model()
    model, optimizer = quiet(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2")
    for set_to_none in (True, False):
        with amp.scale_loss(loss_of(model, 0), optimizer) as scaled:
            scaled.backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        params = (*model.parameters(), *amp.master_params(optimizer))
        if set_to_none:
            assert all(param.grad is None for param in params)
        else:
            assert all(param.grad is not None and not param.grad.any() for param in params)


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_zeros_are_gradients_of_parameters_that_a_backward_pass_does_not_reach(level: str) -> None:
    """As in PyTorch: momentum moves a parameter with a gradient of zeros, and not one without a gradient."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, inputs: Tensor, number: int) -> Tensor:
            return self.layers[number](inputs)

    for set_to_none in (False, True):
        model: Any = Branches()
        first = model.layers[0].weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = quiet(model, optimizer, opt_level=level, loss_scale=1.0)
        moved = []
        for number in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            before = values([first])
            with amp.scale_loss(model(torch.ones(1, 4), min(number, 1)).float().sum(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            moved.append(not torch.equal(before[0], values([first])[0]))
        assert moved == [True, *[not set_to_none] * 3]
        amp.shutdown()


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_clipping_gradients_that_a_step_does_not_read_warns(level: str) -> None:
    model = small_model()
    model, optimizer = quiet(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level)

    def step(params: Any) -> None:
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, 0), optimizer) as scaled:
            scaled.backward()
        if params is not None:
            torch.nn.utils.clip_grad_norm_(params(), 0.1)
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for params in (None, lambda: amp.master_params(optimizer), *([model.parameters] if level == "O1" else [])):
            step(params)
    if level != "O1":
        with pytest.warns(UserWarning, match=r"clip_grad_norm_\(amp.master_params\(optimizer\)") as found:
            step(model.parameters)
        assert [warning.filename for warning in found] == [__file__]
        with warnings.catch_warnings():  # it is told once
            warnings.simplefilter("error")
            step(model.parameters)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_zero_grad_of_an_optimizer_that_keeps_zeros(level: str) -> None:
    """If masters have the sums, zeros in the model's own gradients would be useless."""
    model = small_model()
    model, optimizer = quiet(model, FusedSGD(model.parameters(), lr=0.1, momentum=0.9), opt_level=level)
    train(model, optimizer, 1)
    optimizer.zero_grad()
    kept = [param.grad is not None for param in model.parameters()]
    assert kept == ([True] * 5 if level == "O1" else [False, True, True, False, False])
    assert not any(param.grad.any() for param in model.parameters() if param.grad is not None)
    before = values(model.parameters())
    train(model, optimizer, 1)
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_step_after_backward_without_scale_loss() -> None:
    model = small_model()
    model, optimizer = quiet(model, FusedAdam([*model[0].parameters()], lr=0.1), opt_level="O2")
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"amp\.scale_loss"):
        optimizer.step()


def test_schedulers_before_and_after() -> None:
    for first in (True, False):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if first:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model, optimizer = quiet(model, optimizer, opt_level="O2")
        if not first:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        train(model, optimizer, 1)
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
        amp.shutdown()
        optimizer.step()


def test_copies_of_an_optimizer_are_plain() -> None:
    for kind in (torch.optim.SGD, FusedAdam):
        model = small_model()
        model, optimizer = quiet(model, kind(model.parameters(), lr=0.1), opt_level="O2")
        train(model, optimizer, 1)
        twin = copy.deepcopy(optimizer)
        before = values(amp.master_params(optimizer))
        for param in amp.master_params(twin):
            param.grad = torch.ones_like(param)
        twin.step()
        assert_same(before, amp.master_params(optimizer))
        assert not torch.equal(before[0], next(amp.master_params(twin)))
        amp.shutdown()


def test_upstreams_stash() -> None:
    model = small_model()
    optimizer = FusedAdam(model.parameters())
    assert not hasattr(optimizer, "_amp_stash")
    assert not hasattr(optimizer, "_lazy_init_maybe_master_weights")
    model, optimizer = quiet(model, optimizer, opt_level="O2")
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    assert [p.dtype for p in optimizer._amp_stash.all_fp32_from_fp16_params] == [torch.float32] * 3
    assert [p.dtype for p in optimizer._amp_stash.all_fp16_params] == [torch.float16] * 3
    assert len(optimizer._amp_stash.all_fp32_from_fp32_params) == 2
    optimizer._amp_stash.all_fp32_from_fp16_params[0].data.fill_(2.0)
    optimizer._master_params_to_model_params()
    assert (model[0].weight == 2).all()
