"""DistributedFusedAdam under apex.amp in one process: the numbers of FusedAdam at the same opt level."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from apex import amp
from apex.contrib.optimizers import DistributedFusedAdam, DistributedFusedLAMB
from apex.optimizers import FusedAdam
from tests.amp.common import LEVELS, assert_same, loss_of, overflow_at, quiet, small_model, train, values
from tests.amp.test_rollback import armed
from tests.contrib.zero.amp_checks import CHECKS
from tests.parallel.processes import run_checks


@pytest.fixture(autouse=True)
def _no_session() -> Iterator[None]:
    amp.shutdown()
    yield
    amp.shutdown()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks("tests.contrib.zero.amp_checks", Path(tmp_path_factory.mktemp("processes")))


@pytest.mark.parametrize("name", CHECKS)
def test_two_processes(name: str, results: dict[str, str]) -> None:
    assert not results[name], results[name]


def make(kind: Any, level: str, model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, Any]:
    model = small_model() if model is None else model
    # At O3 FusedAdam has no float32 weights either.
    more = {} if kind is FusedAdam else {"store_params": level != "O3", "bucket_cap_mb": 100 / 2**20}
    return quiet(model, kind(model.parameters(), lr=0.01, weight_decay=0.1, **more), opt_level=level, **options)


SCALES: dict[str, dict[str, Any]] = {
    "default": {},
    "static": {"loss_scale": 128.0},
    # Grows between the passes of a step.
    "dynamic": {"loss_scale": "dynamic", "dynamic_init_scale": 2.0**10, "scale_window": 3},
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("level", LEVELS)
def test_equal_to_fused_adam(level: str, scale: str) -> None:
    """With accumulation, clipping, `delay_unscale` and overflow: the same bits and the same loss scales."""
    dynamic = scale == "dynamic" or (scale == "default" and level in ("O1", "O2"))
    outcomes = []
    for kind in (FusedAdam, DistributedFusedAdam):
        model, optimizer = make(kind, level, **SCALES[scale])
        for step in range(7):
            optimizer.zero_grad()
            for part in range(1 + step % 3):
                factor = torch.inf if dynamic and (step, part) in ((2, 0), (5, 2)) else 1.0
                with amp.scale_loss(
                    loss_of(model, 10 * step + part, factor), optimizer, delay_unscale=step == 1 and part == 0
                ) as scaled:
                    scaled.backward()
            if step % 2 and kind is FusedAdam:
                torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5)
            elif step % 2:
                optimizer.clip_grad_norm(0.5)
            optimizer.step()
        scaler = amp.state_dict()["loss_scaler0"]
        outcomes.append((values(model.parameters()), tuple(scaler.values()) if dynamic else scaler["loss_scale"]))
        amp.shutdown()
    assert outcomes[0][1] == outcomes[1][1]
    for found, expected in zip(outcomes[1][0], outcomes[0][0], strict=True):
        assert found.dtype == expected.dtype
        # Clipping divides by the norm in other places.
        tolerance = 1e-5 if found.dtype == torch.float32 else 2 * torch.finfo(found.dtype).eps
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_as_fused_adam_without_clipping(level: str) -> None:
    outcomes = []
    for kind in (FusedAdam, DistributedFusedAdam):
        model, optimizer = make(kind, level)
        losses = train(model, optimizer, 6, overflow_at(0, 3))
        outcomes.append((values(model.parameters()), losses, dict(amp.state_dict())))
        amp.shutdown()
    torch.testing.assert_close(outcomes[0], outcomes[1])  # on a CPU FusedAdam is PyTorch's, with its rounding


def test_losses_with_scales_of_their_own() -> None:
    outcomes = []
    for kind in (FusedAdam, DistributedFusedAdam):
        model, optimizer = make(kind, "O2", num_losses=2)
        amp._amp_state.loss_scalers[1]._loss_scale = 2.0**4
        for step in range(3):
            optimizer.zero_grad()
            for loss_id in (0, 1, 0):
                with amp.scale_loss(loss_of(model, 3 * step + loss_id), optimizer, loss_id) as scaled:
                    scaled.backward()
            optimizer.step()
        outcomes.append(values(model.parameters()))
        amp.shutdown()
    for found, expected in zip(outcomes[1], outcomes[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("options", [{"contiguous_grad_buffer": True}, {"overlap_grad_sync": False}], ids=str)
def test_options(options: dict[str, Any]) -> None:
    outcomes = []
    for more in ({}, options):
        model = small_model()
        optimizer = DistributedFusedAdam(model.parameters(), lr=0.01, **more)
        model, optimizer = quiet(model, optimizer, opt_level="O2", scale_window=3)
        for step in range(4):
            optimizer.zero_grad()
            with optimizer.no_sync(), amp.scale_loss(loss_of(model, step), optimizer) as scaled:
                scaled.backward()
            with amp.scale_loss(loss_of(model, step, overflow_at(2)(step)), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        outcomes.append(values(model.parameters()))
        amp.shutdown()
    for found, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-6)


def test_an_overflow_in_no_sync_is_found() -> None:
    model, optimizer = make(DistributedFusedAdam, "O1")
    before = values(model.parameters())
    with optimizer.no_sync(), amp.scale_loss(loss_of(model, 0, torch.inf), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert_same(before, model.parameters())
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 0}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("first", ["plain", "divided"])
@pytest.mark.parametrize("overflows", ["plain", "divided"])
def test_an_overflow_of_one_of_two_optimizers_skips_both(overflows: str, first: str, level: str) -> None:
    """A plain and a divided optimizer under one loss scale, in either order, and either of them overflows."""
    models = {"plain": small_model(0), "divided": small_model(1)}
    kinds = {"plain": torch.optim.SGD, "divided": DistributedFusedAdam}
    order = sorted(models, key=lambda name: name != first)
    optimizers: list[Any] = [kinds[name](models[name].parameters(), lr=0.1) for name in order]
    _, optimizers = quiet([models[name] for name in order], optimizers, opt_level=level)
    before = values(param for model in models.values() for param in model.parameters())
    losses = [loss_of(model, 0, torch.inf if name == overflows else 1.0) for name, model in models.items()]
    with amp.scale_loss(sum(losses), optimizers) as scaled:
        scaled.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert_same(before, [param for model in models.values() for param in model.parameters()])
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 0}


def test_gradients_cleared_inside_of_scale_loss() -> None:
    outcomes = []
    for kind in (FusedAdam, DistributedFusedAdam):
        model, optimizer = make(kind, "O2")
        for step in range(3):
            with amp.scale_loss(loss_of(model, step), optimizer) as scaled:
                optimizer.zero_grad()
                scaled.backward()
            optimizer.step()
        outcomes.append(values(model.parameters()))
        amp.shutdown()
    torch.testing.assert_close(*outcomes)


def test_masters_are_the_exact_weights_and_no_others_are_made() -> None:
    model = small_model()
    exact = values(model.parameters())
    model, optimizer = make(DistributedFusedAdam, "O2", model)
    saved = model.state_dict()
    assert_same(exact, [saved[name] for name, _ in model.named_parameters()])
    other = small_model(seed=5)
    model.load_state_dict(other.state_dict())  # between initialize and the first backward pass
    optimizer.zero_grad()
    with amp.scale_loss(loss_of(model, 0), optimizer) as scaled:
        scaled.backward()
    state = optimizer.state_dict()["state"]
    assert_same(other.parameters(), [state[index]["param"] for index in range(5)])
    assert all(param is mine for param, mine in zip(amp.master_params(optimizer), model.parameters(), strict=True))
    assert not len(amp._amp_state.masters)


@pytest.mark.parametrize("level", LEVELS)
def test_resume(level: str) -> None:
    options = {"scale_window": 2}
    model, optimizer = make(DistributedFusedAdam, level, **options)
    train(model, optimizer, 3, overflow_at(1) if level in ("O1", "O2") else lambda step: 1.0)
    saved = [model.state_dict(), optimizer.state_dict(), amp.state_dict()]
    train(model, optimizer, range(3, 6))
    expected = values(model.parameters()), optimizer.state_dict()["state"], dict(amp.state_dict())
    amp.shutdown()
    model, optimizer = make(DistributedFusedAdam, level, small_model(seed=9), **options)
    for each, state in zip((model, optimizer, amp), saved, strict=True):
        each.load_state_dict(state)
    train(model, optimizer, range(3, 6))
    assert_same(expected[0], model.parameters())
    for index in range(5):
        found = optimizer.state_dict()["state"][index]
        assert_same(expected[1][index].values(), found.values())
    assert expected[2] == amp.state_dict()


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_shutdown(level: str, used: bool) -> None:
    model = small_model()
    exact = values(model.parameters())
    model, optimizer = make(DistributedFusedAdam, level, model)
    if used:
        train(model, optimizer, 2)
    amp.shutdown()
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert not {"step", "zero_grad", "_exact_value", "_amp_stash"} & set(vars(optimizer))
    if not used and level != "O3":
        assert_same(exact, model.parameters())
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(loss_of(model, 0))
        losses[-1].backward()
        optimizer.step()
    assert losses[1] < losses[0]


def test_what_is_refused() -> None:
    for options in ({"combine_grad": True}, {"combine_ddp": True}, {"check_combined_tensors": True}):
        model = small_model()
        optimizer = DistributedFusedAdam(model.parameters())
        with pytest.raises(RuntimeError, match="not for DistributedFusedAdam"):
            quiet(model, optimizer, opt_level="O2", **options)
        assert model[0].weight.dtype == torch.float32
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"DistributedFusedAdam has been used already.*O2"):
        quiet(model, optimizer, opt_level="O2")
    assert model[0].weight.dtype == torch.float32
    quiet(model, optimizer, opt_level="O1")
    train(model, optimizer, 2)
    model = small_model()
    lamb = DistributedFusedLAMB(model.parameters())
    for level in LEVELS:
        with pytest.raises(RuntimeError, match=r"DistributedFusedLAMB is not for amp; .*GradScaler"):
            quiet(model, lamb, opt_level=level)
    assert not hasattr(lamb, "_amp_stash")
    assert not hasattr(model, "_amp_casts")


def test_a_second_initialize_that_fails() -> None:
    """The session goes on, to the bit, though its masters had been given up."""
    runs = []
    for fails in (False, True):
        model, optimizer = make(DistributedFusedAdam, "O2")
        train(model, optimizer, 2)
        if fails:
            other = small_model(seed=1)
            with pytest.raises(RuntimeError, match="not me"):
                quiet([model, other], [optimizer, armed(other)], opt_level="O1")
        train(model, optimizer, 2)
        runs.append(values(model.parameters()))
        amp.shutdown()
    assert_same(*runs)
