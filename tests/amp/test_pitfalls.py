"""Statements of docs/amp.md about weights in O2 and O5, one test for each."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from apex import amp
from apex.optimizers import FusedSGD
from tests.amp.common import HALF, assert_same, batch, loss_of, quiet, small_model, train, values

levels = pytest.mark.parametrize("level", ["O2", "O5"])
kinds = pytest.mark.parametrize("kind", [torch.optim.SGD, FusedSGD], ids=["SGD", "FusedSGD"])


def trained(level: str, kind: Any = FusedSGD) -> tuple[Any, Any]:
    model = small_model()
    model, optimizer = quiet(model, kind(model.parameters(), lr=0.05), opt_level=level, loss_scale=16.0)
    train(model, optimizer, 1)
    return model, optimizer


@kinds
@levels
def test_a_weight_changed_in_place(level: str, kind: Any) -> None:
    model, optimizer = trained(level, kind)
    before = model.eval()(batch(0)[0])
    with torch.no_grad():
        model[3].bias.fill_(50.0)
    assert (model(batch(0)[0]) - before).min() > 40
    assert model.state_dict()["3.bias"].max() < 1
    train(model.train(), optimizer, [1])
    assert model[3].bias.max() < 10


@kinds
@levels
def test_a_master_changed_in_place(level: str, kind: Any) -> None:
    model, optimizer = trained(level, kind)
    with torch.no_grad():
        list(amp.master_params(optimizer))[-1].fill_(5.0)
    assert model[3].bias.max() < 1
    train(model, optimizer, [1])
    assert model[3].bias.min() > 4


@kinds
@levels
def test_a_changed_state_dict(level: str, kind: Any) -> None:
    model, optimizer = trained(level, kind)
    state = model.state_dict()
    state["3.bias"].fill_(5.0)
    assert model[3].bias.max() < 1
    assert list(amp.master_params(optimizer))[-1].max() < 1
    model.load_state_dict(state)
    assert (model[3].bias == 5.0).all()
    assert (list(amp.master_params(optimizer))[-1] == 5.0).all()
    train(model, optimizer, [1])
    assert model[3].bias.min() > 4


@levels
def test_a_state_dict_does_not_follow_the_training(level: str) -> None:
    model, optimizer = trained(level)
    state = model.state_dict()
    before = {name: value.clone() for name, value in state.items()}
    train(model, optimizer, [1])
    assert torch.equal(state["0.weight"], before["0.weight"])
    assert torch.equal(state["1.weight"], model[1].weight)  # a batch norm's own
    assert not torch.equal(state["1.weight"], before["1.weight"])
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])


@levels
def test_averages(level: str) -> None:
    model, _ = trained(level)
    assert copy.deepcopy(model)[0].weight.dtype == HALF[level]
    assert torch.optim.swa_utils.AveragedModel(model).module[0].weight.dtype == HALF[level]
    results = []
    for dtype in (HALF[level], torch.float32):
        average, target = torch.ones(1, dtype=dtype), torch.full((1,), 1.1, dtype=dtype)
        for _ in range(1000):
            average.lerp_(target, 0.001)
        results.append(average.item())
    assert results == [1.0, pytest.approx(1.063, abs=1e-3)]


@levels
def test_evaluating_an_average_in_between(level: str) -> None:
    runs = []
    for averages in (False, True):
        model, optimizer = trained(level)
        average = {name: value.clone() for name, value in model.state_dict().items()}
        for step in range(1, 4):
            train(model, optimizer, [step])
            for name, value in model.state_dict().items():
                average[name].lerp_(value, 0.5) if value.is_floating_point() else average[name].copy_(value)
        if averages:
            before = model.eval()(batch(0)[0])
            current = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(average)
            assert not torch.equal(model(batch(0)[0]), before)
            model.load_state_dict(current)
            assert torch.equal(model(batch(0)[0]), before)
            model.train()
        train(model, optimizer, [4, 5])
        runs.append(values(amp.master_params(optimizer)))
        amp.shutdown()
    assert_same(*runs)


def test_gradients_of_the_model_are_scaled() -> None:
    model, optimizer = trained("O2")
    optimizer.zero_grad()
    with amp.scale_loss(loss_of(model, 1), optimizer) as scaled:
        scaled.backward()
    master = next(iter(amp.master_params(optimizer)))
    torch.testing.assert_close(model[0].weight.grad.float(), 16.0 * master.grad)


@levels
def test_parts_and_layers(level: str) -> None:
    model, optimizer = trained(level)
    x, _ = batch(0)
    with pytest.raises(RuntimeError, match="dtype"):
        model[0](x)
    assert model[0](x.to(HALF[level])).dtype == HALF[level]
    model[3] = nn.Linear(8, 4)
    with pytest.raises(RuntimeError, match="dtype"):
        model(x)
    model, optimizer = quiet(model, FusedSGD(model.parameters(), lr=0.05), opt_level=level, loss_scale=16.0)
    before = model[3].weight.detach().clone()
    train(model, optimizer, 1)
    assert not torch.equal(model[3].weight, before)


def test_numbers_that_do_not_fit() -> None:
    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("position", torch.tensor([4097.0]))

        def forward(self, *values: torch.Tensor) -> Any:
            return *values, self.position

    floats, integers, position = quiet(Passes(), opt_level="O2")(torch.tensor([70000.0, 4097.0]), torch.tensor([70000]))
    assert floats.tolist() == [float("inf"), 4096.0]
    assert integers.tolist() == [70000]
    assert position.tolist() == [4096.0]
    scores, mask = torch.zeros(2).half(), torch.tensor([True, False])
    with pytest.raises(RuntimeError, match="without overflow"):
        scores.masked_fill(mask, -1e9)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert scores.to(dtype).masked_fill(mask, torch.finfo(dtype).min).isfinite().all()


@kinds
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_scale_loss_and_steps_inside_of_scale_loss(level: str, kind: Any) -> None:
    """Scaled gradients can neither be unscaled twice nor used; the error changes nothing, and training continues."""
    model = small_model()
    model, optimizer = quiet(model, kind(model.parameters(), lr=0.05), opt_level=level, loss_scale=16.0)
    train(model, optimizer, 1)
    before = values(model.parameters())
    with (
        pytest.raises(RuntimeError, match="inside of another one of the same optimizer"),
        amp.scale_loss(loss_of(model, 1), optimizer),
        amp.scale_loss(loss_of(model, 1), optimizer),
    ):
        pass
    with amp.scale_loss(loss_of(model, 1), optimizer) as scaled_loss:
        scaled_loss.backward()
        with pytest.raises(RuntimeError, match="call it after that block"):
            optimizer.step()
    assert_same(before, values(model.parameters()))
    train(model, optimizer, [1])
    assert not all(torch.equal(old, new) for old, new in zip(before, values(model.parameters()), strict=True))


@kinds
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_an_inner_scale_loss_that_does_not_unscale(level: str, kind: Any) -> None:
    """Check that the outer scale_loss unscales the sum once and keeps earlier gradients."""
    results = []
    for nests in (False, True):
        model = small_model()
        model, optimizer = quiet(model, kind(model.parameters(), lr=0.05), opt_level=level, loss_scale=16.0)
        for _ in range(2):
            with amp.scale_loss(loss_of(model, 0), optimizer) as scaled_loss:
                scaled_loss.backward()
            # Before the block, which has no autocast: PyTorch 2.9 cannot differentiate mse_loss of two dtypes there.
            last_loss = loss_of(model, 2)
            with amp.scale_loss(loss_of(model, 1), optimizer, delay_unscale=not nests) as scaled_loss:
                scaled_loss.backward()
                if nests:
                    with amp.scale_loss(last_loss, optimizer, delay_unscale=True) as scaled_loss:
                        scaled_loss.backward()
                    with pytest.raises(RuntimeError, match="call it after that block"):
                        optimizer.step()
            if not nests:
                with amp.scale_loss(last_loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(values(model.parameters()))
        amp.shutdown()
    assert_same(*results)


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("loss_ids", [(0, 0), (0, 1)])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_delayed_gradients_keep_their_scale(level: str, loss_ids: tuple[int, int], joint: bool) -> None:
    """Another optimizer, or another loss, changes the scale between the two passes of a step."""
    both, plain = [small_model(seed) for seed in (0, 1)], [small_model(seed) for seed in (0, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in both]
    options: Any = {"num_losses": 2, "scale_window": 1, "dynamic_init_scale": 8.0}
    both, optimizers = quiet(both, optimizers, opt_level=level, **options)
    with amp.scale_loss(loss_of(both[0], 0), optimizers[0], loss_id=loss_ids[0], delay_unscale=True) as scaled:
        scaled.backward()
    for _ in range(2):
        with amp.scale_loss(loss_of(both[1], 1), optimizers[1], loss_id=0) as scaled:
            scaled.backward()
    if joint:  # the second optimizer's gradients have a delayed scale of their own
        with amp.scale_loss(loss_of(both[1], 2), optimizers[1], loss_id=1, delay_unscale=True) as scaled:
            scaled.backward()
    loss = loss_of(both[0], 3) + loss_of(both[1], 3)
    with amp.scale_loss(loss, optimizers, loss_id=loss_ids[1]) as scaled:
        scaled.backward()
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 64.0
    for model, steps in zip(plain, ((0, 3), (1, 1, 2, 3) if joint else (1, 1, 3)), strict=True):
        for step in steps:
            loss_of(model, step).backward()
    for optimizer, model in zip(optimizers, plain, strict=True):
        for master, param in zip(amp.master_params(optimizer), model.parameters(), strict=True):
            torch.testing.assert_close(master.grad, param.grad, atol=1e-2, rtol=1e-2)


def test_an_inner_scale_loss_of_another_loss_has_the_scale_of_the_outer_one() -> None:
    model, plain = small_model(), small_model()
    options: Any = {"num_losses": 2, "scale_window": 1, "dynamic_init_scale": 8.0}
    model, optimizer = quiet(model, torch.optim.SGD(model.parameters(), lr=0.05), opt_level="O1", **options)
    with amp.scale_loss(loss_of(model, 0), optimizer, loss_id=1) as scaled:  # this scale is 16 afterwards
        scaled.backward()
    inner_loss = loss_of(model, 2)
    with amp.scale_loss(loss_of(model, 1), optimizer, loss_id=0) as scaled:
        scaled.backward()
        with amp.scale_loss(inner_loss, optimizer, loss_id=1, delay_unscale=True) as scaled:
            scaled.backward()
    for step in range(3):
        loss_of(plain, step).backward()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad, expected.grad, atol=5e-3, rtol=5e-3)


@kinds
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_step_refuses_gradients_that_are_still_scaled(level: str, kind: Any) -> None:
    model = small_model()
    options = {} if level == "O2" and kind is torch.optim.SGD else {"loss_scale": 16.0}
    model, optimizer = quiet(model, kind(model.parameters(), lr=0.05), opt_level=level, **options)
    before = values(model.parameters())
    with amp.scale_loss(loss_of(model, 0), optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    with pytest.raises(RuntimeError, match="still scaled, because of delay_unscale=True"):
        optimizer.step()
    assert_same(before, values(model.parameters()))
    train(model, optimizer, [1])


@kinds
@levels
def test_a_plain_backward_pass_is_refused_though_batch_norms_have_gradients(level: str, kind: Any) -> None:
    """Batch norms are float32 and get their gradients directly: a step trained them alone."""
    model, optimizer = trained(level, kind)
    before = values(model.parameters())
    for _ in range(2):  # gradients of the pass under scale_loss are used up, then there are some without it
        with pytest.raises(RuntimeError, match="none on their float32 masters"):
            optimizer.step()
        assert_same(before, values(model.parameters()))
        optimizer.zero_grad()
        loss_of(model, 1).backward()


@levels
def test_frozen_weights_are_rounded(level: str) -> None:
    model = small_model()
    model[0].requires_grad_(False)
    exact = model[0].weight.clone()
    trained_ones = [param for param in model.parameters() if param.requires_grad]
    model, _ = quiet(model, FusedSGD(trained_ones, lr=0.05), opt_level=level)
    saved = model.state_dict()["0.weight"]
    assert saved.dtype == torch.float32
    assert torch.equal(saved, exact.to(HALF[level]).float())
    assert not torch.equal(saved, exact)
    amp.shutdown()
    assert torch.equal(model[0].weight, saved)
