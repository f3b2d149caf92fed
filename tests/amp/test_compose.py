"""amp together with everything else that a training script does."""

import copy
import io
import itertools
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from apex import amp
from apex.optimizers import FusedAdam, FusedSGD
from tests.amp.common import HALF, LEVELS, assert_same, batch, loss_of, overflow_at, quiet, small_model, train, values

levels = pytest.mark.parametrize("level", LEVELS)
kinds = pytest.mark.parametrize("kind", [torch.optim.SGD, FusedSGD], ids=["SGD", "FusedSGD"])


def prepared(level: str, kind: Any = FusedSGD, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    model = model or small_model()
    return quiet(model, kind(model.parameters(), lr=0.05), opt_level=level, **options)


@kinds
@levels
def test_accumulation(level: str, kind: Any) -> None:
    """Several backward passes per step equal one pass over the mean, with delay_unscale and without."""

    def run(delay: bool) -> list[Tensor]:
        model, optimizer = prepared(level, kind, model=nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)))
        for step in range(3):
            optimizer.zero_grad()
            for part in range(4):
                loss = loss_of(model, 10 * step + part) / 4
                with amp.scale_loss(loss, optimizer, delay_unscale=delay and part < 3) as scaled:
                    scaled.backward()
            optimizer.step()
        found = values(amp.master_params(optimizer))
        amp.shutdown()
        return [value.float() for value in found]

    torch.manual_seed(0)
    at_once = run(delay=False)
    torch.manual_seed(0)
    delayed = run(delay=True)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = kind(plain.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        (sum(loss_of(plain, 10 * step + part) for part in range(4)) / 4).backward()
        optimizer.step()
    for a, b, expected in zip(at_once, delayed, plain.parameters(), strict=True):
        torch.testing.assert_close(a, expected.detach(), atol=5e-3, rtol=5e-3)
        torch.testing.assert_close(b, expected.detach(), atol=5e-3, rtol=5e-3)


@kinds
def test_accumulation_across_a_change_of_scale(kind: Any) -> None:
    """The scale grows between two passes of one step; the sum is of unscaled gradients."""
    model, optimizer = prepared("O2", kind, scale_window=1, dynamic_init_scale=8.0)
    plain = small_model()
    for part in range(3):
        with amp.scale_loss(loss_of(model, part), optimizer) as scaled:
            scaled.backward()
        loss_of(plain, part).backward()
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 64.0
    for master, param in zip(amp.master_params(optimizer), plain.parameters(), strict=True):
        torch.testing.assert_close(master.grad, param.grad, atol=5e-3, rtol=5e-3)


def test_delayed_passes_after_one_that_was_not() -> None:
    """Unscaled gradients wait aside while scaled ones are summed."""
    model, optimizer = prepared("O1")
    plain = small_model()
    for part, delay in enumerate((False, True, False)):
        with amp.scale_loss(loss_of(model, part), optimizer, delay_unscale=delay) as scaled:
            scaled.backward()
        loss_of(plain, part).backward()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad, expected.grad, atol=5e-3, rtol=5e-3)


@kinds
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_clipping(level: str, kind: Any) -> None:
    model, optimizer = prepared(level, kind, dynamic_init_scale=16.0)
    with amp.scale_loss(loss_of(model, 0, 100.0), optimizer) as scaled:
        scaled.backward()
    before = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5)
    assert before > 0.5
    after = torch.cat([p.grad.flatten() for p in amp.master_params(optimizer)]).norm()
    assert after.item() == pytest.approx(0.5, rel=1e-4)
    start = values(amp.master_params(optimizer))
    optimizer.step()
    moved = torch.cat([(a - b).flatten() for a, b in zip(start, amp.master_params(optimizer), strict=True)]).norm()
    assert moved.item() == pytest.approx(0.05 * 0.5, rel=1e-3)


@levels
def test_evaluation_between_steps(level: str) -> None:
    """An evaluation changes nothing and uses the current weights."""

    def run(look: bool) -> list[Tensor]:
        model, optimizer = prepared(level, FusedAdam)
        seen = []
        for step in range(4):
            if look:
                model.eval()
                with torch.no_grad():
                    seen.append(model(batch(99)[0]).float())
                model.train()
            train(model, optimizer, [step])
        if look:
            assert all(not torch.equal(a, b) for a, b in itertools.pairwise(seen))
            with torch.no_grad():
                fresh = copy.deepcopy(model).eval()(batch(99)[0])
                assert torch.equal(fresh, model.eval()(batch(99)[0]))
        found = values(amp.master_params(optimizer))
        amp.shutdown()
        return found

    assert_same(run(look=False), run(look=True))


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_no_grad_inside_a_forward_pass_loses_no_gradient(level: str) -> None:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.net(x)
            return self.net(x) - target * 0.5

    model, optimizer = prepared(level, model=Teacher(), dynamic_init_scale=16.0)
    before = model.net.weight.detach().clone()
    train(model, optimizer, 1)
    assert not torch.equal(before, model.net.weight)


def test_weights_changed_by_hand_are_seen_at_once() -> None:
    model, _ = prepared("O1", model=nn.Linear(2, 2))
    x = torch.ones(1, 2)
    first = model(x)
    with torch.no_grad():
        model.weight.fill_(3.0)
        model.bias.fill_(0.0)
    assert not torch.equal(first, model(x))
    assert (model(x) == 6.0).all()
    # Outside of a model too, where a loss may use weights.
    once = x @ model.weight
    model.weight.data.fill_(1.0)
    assert not torch.equal(once, x @ model.weight)


@levels
def test_loading_a_model_in_mid_training(level: str) -> None:
    """Check that the optimizer and its masters continue from the loaded weights."""
    model, optimizer = prepared(level, FusedSGD)
    saved = copy.deepcopy(model.state_dict())
    start = values(amp.master_params(optimizer))
    train(model, optimizer, 2)
    model.load_state_dict(saved)
    assert_same(start, amp.master_params(optimizer))
    first = train(model, optimizer, 1)
    amp.shutdown()
    model, optimizer = prepared(level, FusedSGD)
    assert first == train(model, optimizer, 1)


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("combine", [False, True], ids=["", "combined"])
def test_weights_that_a_wrapper_writes_before_the_first_step(level: str, combine: bool) -> None:
    """Write weights as DistributedDataParallel does when it broadcasts them."""
    model, optimizer = prepared(level, model=small_model(seed=0), combine_grad=combine)
    other, other_optimizer = prepared(level, model=small_model(seed=1), combine_grad=combine)
    with torch.no_grad():
        for index, (target, source) in enumerate(zip(model.parameters(), other.parameters(), strict=True)):
            (target.data if index % 2 else target).copy_(source)  # PyTorch counts only the changes of the latter
    for master in amp.master_params(other_optimizer):  # what reaches the other processes is rounded
        master.data.copy_(master.to(HALF[level]).float() if master.dim() else master)
    train(model, optimizer, 3)
    train(other, other_optimizer, 3)
    assert_same(values(model.parameters()), values(other.parameters()))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_masters_keep_their_digits_where_nothing_was_written(level: str) -> None:
    model, optimizer = prepared(level)
    before = values(amp.master_params(optimizer))
    assert any(not torch.equal(master, master.to(HALF[level]).float()) for master in before)
    with amp.scale_loss(loss_of(model, 0), optimizer) as scaled:
        scaled.backward()
    assert_same(before, values(amp.master_params(optimizer)))


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_state_dicts_are_float32(level: str) -> None:
    model, optimizer = prepared(level)
    train(model, optimizer, 2)
    saved = model.state_dict()
    assert {value.dtype for value in saved.values() if value.is_floating_point()} == {torch.float32}
    plain = small_model(seed=3)
    plain.load_state_dict(saved)
    if level != "O3":
        for name, master in zip((n for n, _ in model.named_parameters()), amp.master_params(optimizer), strict=True):
            assert torch.equal(saved[name], master)
    assert {value.dtype for value in model[3].state_dict().values()} == {torch.float32}
    other = quiet(small_model(seed=3), opt_level=level)
    other.load_state_dict(saved)
    assert torch.equal(other.eval()(batch(0)[0]), model.eval()(batch(0)[0]))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.reentrant = reentrant

    def block(self, x: Tensor) -> Tensor:
        return torch.softmax(self.second(torch.relu(self.first(x))), -1)

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.last(self.block(x))
        return self.last(checkpoint(self.block, x.requires_grad_(), use_reentrant=self.reentrant))


@levels
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_activation_checkpointing(level: str, reentrant: bool) -> None:
    """The recomputed pass is cast like the first: equal bits."""
    results = []
    for way in (None, reentrant):
        model, optimizer = prepared(level, FusedAdam, model=Checkpointed(way))
        losses = train(model, optimizer, 3, overflow_at(1) if level in ("O1", "O2") else lambda step: 1.0)
        results.append((losses[::2], values(amp.master_params(optimizer))))
        amp.shutdown()
    assert results[0][0] == results[1][0]
    assert_same(results[0][1], results[1][1])


@levels
@pytest.mark.parametrize("when", ["before", "after", "in place"])
def test_compile(level: str, when: str) -> None:
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        optimizer = FusedAdam(model.parameters(), lr=0.01)
        if compiled and when == "before":
            model = torch.compile(model, backend="eager")
        model, optimizer = quiet(model, optimizer, opt_level=level)
        if compiled and when == "after":
            model = torch.compile(model, backend="eager")
        if compiled and when == "in place":
            model.compile(backend="eager")
        losses = train(model, optimizer, 3)
        with torch.no_grad():
            assert model(batch(0)[0]).dtype == (HALF[level] if level in ("O1", "O4") else torch.float32)
        results.append((losses, values(amp.master_params(optimizer))))
        amp.shutdown()
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-3)
    for a, b in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_compile_without_graph_breaks(level: str) -> None:
    torch._dynamo.reset()
    model, optimizer = prepared(level, model=nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    train(compiled, optimizer, 2)
    expected = model(batch(0)[0])
    torch.testing.assert_close(compiled(batch(0)[0]), expected, rtol=2e-3, atol=2e-3)


def test_a_compiled_training_step() -> None:
    """Scaling, unscaling and the optimizer run in Python between the graphs, with autocast switched off and on."""
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, optimizer = prepared("O1", model=nn.Linear(6, 4))

        def step(inputs: Tensor, targets: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs).float(), targets)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            return loss

        run = torch.compile(step, backend="eager") if compiled else step
        results.append(([run(*batch(index)).item() for index in range(3)], values(amp.master_params(optimizer))))
        amp.shutdown()
    assert results[0][0] == results[1][0]
    assert_same(results[0][1], results[1][1])


def test_a_compiled_training_step_has_graphs_of_the_model_alone() -> None:
    """One for each master, or for each optimizer, would soon reach the limit of recompilations."""
    torch._dynamo.reset()
    graphs: list[str] = []

    def backend(module: Any, _: Any) -> Any:
        graphs.append(module.code)
        return module.forward

    model, optimizer = prepared("O2", model=nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(4, 4)))

    def step(inputs: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    run = torch.compile(step, backend=backend)
    for index in range(2):
        run(*batch(index))
    assert graphs
    assert all("mse_loss" in graph for graph in graphs), graphs


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_export(level: str) -> None:
    """Check that an exported model casts like the model and shares its weights."""
    model, _ = prepared(level, model=nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).eval())
    inputs = batch(0)[0]
    expected = model(inputs)
    program = torch.export.export(model, (inputs,)).module()
    if level == "O1":  # O2's weights are float32 again after it
        amp.shutdown()
    assert_same([program(inputs)], [expected])


@levels
def test_threads_with_replicas(level: str) -> None:
    """Do as nn.DataParallel: shallow replicas with their own weights, each in a new thread."""
    model, _ = prepared(level, model=nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)))
    replica = model._replicate_for_data_parallel()
    replica._modules = {name: child._replicate_for_data_parallel() for name, child in model._modules.items()}
    for name, child in replica._modules.items():
        child.__dict__["weight"] = model._modules[name].weight.detach() * 2
        child.__dict__["bias"] = model._modules[name].bias.detach()
    found: dict[str, Tensor] = {}
    x = batch(0)[0]

    def run(name: str, module: nn.Module) -> None:
        found[name] = module(x)

    threads = [threading.Thread(target=run, args=item) for item in (("model", model), ("replica", replica))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    here = model(x)
    assert found["model"].dtype == here.dtype
    assert torch.equal(found["model"], here)
    assert not torch.equal(found["replica"], here)
    assert found["replica"].dtype == here.dtype


@levels
def test_copies_have_weights_of_their_own(level: str) -> None:
    """An average of weights, made by deepcopy after initialize."""
    model, optimizer = prepared(level)
    twin = copy.deepcopy(model)
    x = batch(0)[0]
    start = twin(x)
    train(model, optimizer, 2)
    assert torch.equal(start, twin(x))
    assert not torch.equal(model(x), twin(x))
    assert type(twin).__name__ == "Sequential"
    twin.load_state_dict(model.state_dict())
    twin.eval(), model.eval()
    torch.testing.assert_close(twin(x).float(), model(x).float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_copy_that_is_cast_takes_inputs_of_its_own_type(level: str) -> None:
    model, _ = prepared(level)
    x = batch(0)[0]
    twin = copy.deepcopy(model)
    rounded = twin(x)  # still in half precision
    twin.float().eval()
    plain = small_model().eval()
    plain.load_state_dict(twin.state_dict())
    assert torch.equal(twin(x), plain(x))
    torch.testing.assert_close(model(x), rounded)


@levels
def test_whole_models_can_be_pickled(level: str) -> None:
    model, optimizer = prepared(level)
    train(model, optimizer, 1)
    model.eval()
    expected = model(batch(0)[0])
    buffer = io.BytesIO()
    torch.save(model, buffer)
    again = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert torch.equal(again(batch(0)[0]), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(batch(0)[0]), expected)
    pickle.dumps(optimizer)


def test_tracing() -> None:
    model, _ = prepared("O2", model=nn.Linear(6, 4))
    x = batch(0)[0]
    with torch.no_grad():
        traced = torch.jit.trace(model, x)
        assert torch.equal(traced(x), model(x))


def test_autocast_that_the_user_switches_off() -> None:
    model, _ = prepared("O1", model=nn.Linear(6, 4))
    x = batch(0)[0]
    with torch.autocast("cpu", enabled=False):
        assert model(x).dtype == torch.float32
        assert (x @ x.T).dtype == torch.float32
    assert model(x).dtype == torch.float16
    with amp.disable_casts():
        assert model(x).dtype == torch.float32
        assert (x @ x.T).dtype == torch.float32
    assert (x @ x.T).dtype == torch.float16


def test_a_forward_pass_inside_scale_loss() -> None:
    """Call the model inside scale_loss, as a gradient penalty may: only its forward pass casts."""
    model, optimizer = prepared("O1", model=nn.Linear(6, 4))
    with amp.scale_loss(loss_of(model, 0), optimizer) as scaled:
        assert model(batch(0)[0]).dtype == torch.float16
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        scaled.backward()
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16


def test_second_derivatives() -> None:
    for level in ("O0", "O1", "O2", "O4"):
        model, optimizer = prepared(level, model=nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
        x = batch(0)[0].requires_grad_()
        with amp.scale_loss(model(x).float().sum(), optimizer) as scaled:
            (gradient,) = torch.autograd.grad(scaled, x, create_graph=True)
            scale = amp._amp_state.loss_scalers[0].loss_scale()
            ((gradient / scale).pow(2).sum() * scale).backward()
        optimizer.step()
        with amp.scale_loss(model(x).float().sum(), optimizer) as scaled:
            scaled.backward(create_graph=True)
        amp.shutdown()
