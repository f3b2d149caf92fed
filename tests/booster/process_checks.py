"""The Booster in several processes: each plugin, in each precision, trains as plain PyTorch does in one process."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import signal
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex import amp
from apex.booster import Booster, _whole_state, _zero, checkpoint_io
from apex.booster._whole_state import whole_model, whole_optimizer
from apex.booster.mixed_precision import FP8MixedPrecision, FP16ApexMixedPrecision, mixed_precision_factory
from apex.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from apex.checkpoint import DamagedCheckpoint, Series, _background, _huggingface
from apex.nn.lr_scheduler import LinearWarmupLR
from apex.optimizers import FusedAdam
from apex.parallel import ElasticLoader
from apex.transformer import parallel_state
from tests.booster.problem import (
    OPTIMIZERS,
    ROWS,
    STEPS,
    Net,
    adam,
    assert_as_plain,
    assert_equal,
    batch,
    net,
    plain,
    train,
)
from tests.booster.problem import booster as make
from tests.lazy import lazy_checks
from tests.parallel.processes import Check, assert_same_everywhere
from tests.support.grids import pairs
from tests.zero import zero_checks

TOLERANCE = {"fp32": 1e-4, "fp16": 0.01, "fp16_apex": 0.01, "fp16_naive": 0.01, "bf16": 0.05, "fp8": 0.2}
PRECISIONS = tuple(TOLERANCE)
needs_fsdp = torch.__version__ >= "2.7"  # 2.6 has none for a CPU


def precision_of(name: str) -> Any:
    """Return a precision object, because some plugins give the names another meaning."""
    if name == "fp16_apex":
        return FP16ApexMixedPrecision("O2", verbosity=0)
    return FP8MixedPrecision(smallest_weight=0) if name == "fp8" else mixed_precision_factory(name)


# Boosters by plugin, of a precision's name; "fp16" and "bf16" of ZeRO and Gemini have weights in these types.
PLUGINS: dict[str, Callable[[str], Booster]] = {
    "ddp": lambda name: make(mixed_precision=_or_none(name), plugin=TorchDDPPlugin()),
    "apex ddp": lambda name: make(mixed_precision=_or_none(name), plugin=TorchDDPPlugin(ddp="apex")),
    "zero 1": lambda name: make(plugin=LowLevelZeroPlugin(1, _or_fp32(name))),
    "zero 2": lambda name: make(plugin=LowLevelZeroPlugin(2, name if name[-1] == "6" else _or_fp32(name), 2.0**12)),
}
if needs_fsdp:
    PLUGINS |= {
        "fsdp": lambda name: make(mixed_precision=_or_none(name), plugin=TorchFSDPPlugin()),
        "gemini": lambda name: make(plugin=GeminiPlugin(precision=_or_fp32(name), offload_optim_frac=1.0)),
    }
# Plugins that few checks use.
OTHERS: dict[str, Callable[[str], Booster]] = {
    "ddp in order": lambda name: make(plugin=TorchDDPPlugin(find_unused_parameters=True)),
    "none": lambda name: make(),
    "fsdp unsharded": lambda name: make(plugin=TorchFSDPPlugin(sharding_strategy="NO_SHARD")),
    "gemini twice": lambda name: make(plugin=GeminiPlugin(precision=name, extra_dp_size=2)),
}


def _or_none(name: str) -> Any:
    return None if name == "fp32" else precision_of(name)


def _or_fp32(name: str) -> Any:
    return name if name == "fp32" else precision_of(name)


@contextlib.contextmanager
def ended() -> Iterator[None]:
    """Clean up after a check, so that later checks see nothing of it."""
    try:
        yield
    finally:
        amp.shutdown()
        parallel_state.destroy_model_parallel()


def weights_of(model: Any) -> dict[str, Tensor]:
    return whole_model(model, copies=True)


def equality(plugin: str, precision: str, optimizer: str) -> Check:
    """Return a check that training equals plain PyTorch's, from an optimizer with two groups and existing state."""

    def check(rank: int) -> None:
        plain(optimizer)
        with ended(), warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            model = net()
            raw = OPTIMIZERS[optimizer](model)
            train(make(), make().boost(model, raw, nn.CrossEntropyLoss()), range(1))
            booster = (PLUGINS | OTHERS)[plugin](precision)
            parts = booster.boost(model, raw, nn.CrossEntropyLoss())
            train(booster, parts, range(1, STEPS), rank, dist.get_world_size())
            found = weights_of(parts[0])
            assert_same_everywhere(list(found.values()))
            assert_as_plain(found, optimizer, TOLERANCE[precision])
            assert [group["lr"] for group in parts[1].param_groups] == [group["lr"] for group in raw.param_groups]

    return check


def starts_from_the_first_process(rank: int) -> None:
    for plugin in PLUGINS:
        with ended():
            booster = PLUGINS[plugin]("fp16_naive")
            model = net(seed=rank)
            boosted, optimizer, *_ = booster.boost(model, adam(model))
            booster.backward(boosted(batch(0)[0]).square().mean(), optimizer)
            optimizer.step()
            found = weights_of(boosted)
            assert_same_everywhere(list(found.values()))
            assert all((found[name] - value).abs().max() < 0.01 for name, value in net(0).state_dict().items()), plugin


def adds_up(plugin: str, precision: str) -> Check:
    """Return a check that two backward passes, the first in no_sync, equal one over both halves."""

    def check(rank: int) -> None:
        plain()
        with ended():
            booster = PLUGINS[plugin](precision)
            model = net()
            model, optimizer, criterion, _, _ = booster.boost(model, adam(model), nn.CrossEntropyLoss())
            ranks = dist.get_world_size()
            for step in range(STEPS):
                optimizer.zero_grad()
                inputs, targets = (tensor[rank::ranks].chunk(2) for tensor in batch(step))
                with booster.no_sync(model):
                    booster.backward(criterion(model(inputs[0]), targets[0]) / 2, optimizer)
                booster.backward(criterion(model(inputs[1]), targets[1]) / 2, optimizer)
                optimizer.clip_grad_by_norm(1.0)
                optimizer.step()
            assert_as_plain(weights_of(model), "adam", TOLERANCE[precision])

    return check


def overflow(plugin: str, precision: str) -> Check:
    """Return a check that an overflow in one process skips the step and lowers the scale in all."""

    def check(rank: int) -> None:
        with ended():
            booster = PLUGINS[plugin](precision)
            model = net()
            model, optimizer, criterion, _, _ = booster.boost(model, adam(model), nn.CrossEntropyLoss())
            before = weights_of(model)
            for step in range(3):  # fp16_naive lowers its scale after the second of them
                optimizer.zero_grad()
                factor = torch.inf if rank == dist.get_world_size() - 1 and step < 2 else 1.0
                booster.backward(criterion(model(batch(step)[0]), batch(step)[1]) * factor, optimizer)
                optimizer.step()
                changed = any(not torch.equal(value, before[name]) for name, value in weights_of(model).items())
                assert changed == (step == 2), step
            state = optimizer.scaler_state()
            scale = state["amp"]["loss_scaler0"]["loss_scale"] if "amp" in state else state["scale"]
            assert_same_everywhere([torch.tensor(scale)])
            assert scale < 2.0**16

    return check


def resumes(plugin: str, precision: str, shard: bool, use_async: bool) -> Check:
    """Return a check that new objects resume bit for bit from files, scheduler and loss scale included."""

    def check(rank: int) -> None:
        with ended():
            ranks, folder = dist.get_world_size(), Path(f"{plugin} {precision}")
            booster, parts = _with_scheduler(plugin, precision, seed=0)
            _train(booster, parts, range(2), rank, ranks)
            series, loader = Series(folder, sharded=True), ElasticLoader(range(8), ranks)
            options = {"shard": shard, "size_per_shard": 0}
            random.seed(rank)
            if use_async:
                next(iter(loader))
                everything = {"loader": loader, "note": "kept", "size_per_shard": 0, "use_async": True}
                booster.save_training(series, 2, *parts[:2], parts[4], **everything)
            else:
                booster.save_model(parts[0], folder / "model", use_safetensors=shard, **options)
                booster.save_optimizer(parts[1], folder / "optimizer", **options)
                booster.save_lr_scheduler(parts[4], folder / "scheduler")
            drawn = random.random(), torch.rand(2).tolist()
            _train(booster, parts, range(2, 4), rank, ranks)
            expected = weights_of(parts[0]), whole_optimizer(parts[1], copies=True)
            amp.shutdown()
            booster, parts = _with_scheduler(plugin, precision, seed=1)
            if use_async:
                loader = ElasticLoader(range(8), ranks)
                found = booster.resume_latest(series, *parts[:2], parts[4], loader=loader)
                assert found == (2, {"note": "kept"})
                assert loader.taken == 1
                assert (random.random(), torch.rand(2).tolist()) == drawn
            else:
                booster.load_model(parts[0], folder / "model")
                booster.load_optimizer(parts[1], folder / "optimizer")
                booster.load_lr_scheduler(parts[4], folder / "scheduler")
            _train(booster, parts, range(2, 4), rank, ranks)
            assert_equal((weights_of(parts[0]), whole_optimizer(parts[1])), expected)

    return check


def _with_scheduler(plugin: str, precision: str, seed: int) -> tuple[Booster, tuple[Any, ...]]:
    booster, model = (PLUGINS | OTHERS)[plugin](precision), net(seed)
    optimizer = adam(model)
    return booster, booster.boost(model, optimizer, nn.CrossEntropyLoss(), None, LinearWarmupLR(optimizer, 8, 2))


def _train(booster: Booster, parts: tuple[Any, ...], steps: range, rank: int, ranks: int) -> None:
    for step in steps:
        train(booster, parts, range(step, step + 1), rank, ranks)
        parts[4].step()


def checkpoints_load_in_other_plugins(rank: int) -> None:
    """Check that a checkpoint of each plugin loads bit for bit in any number of processes and in other plugins.

    Training continued from it gives the weights of one process without a plugin, up to rounding. In samples each
    checkpoint is loaded in one number of processes.
    """
    ranks = dist.get_world_size()
    for plugin in [plugin for plugin, number in pairs(PLUGINS, (1, 4, 2), each=1) if number == ranks]:
        ways = []
        for other in ("none", plugin, "ddp"):
            folder = Path("..", "two", f"{plugin} fp32")
            if not folder.exists():  # this is where they are saved
                return
            booster, parts = _with_scheduler(other, "fp32", seed=1)
            booster.load_model(parts[0], folder / "model")
            booster.load_optimizer(parts[1], folder / "optimizer")
            expected_model, expected_optimizer = weights_of(parts[0]), whole_optimizer(parts[1])
            from safetensors.torch import load_file

            saved = {}
            for path in (folder / "model").glob("*.safetensors"):
                saved |= load_file(path)
            assert_equal(expected_model, {name: saved[name] for name in expected_model})
            assert {float(state["step"]) for state in expected_optimizer["state"].values()} == {2.0}
            train(booster, parts, range(2, STEPS), *((0, 1) if other == "none" else (rank, dist.get_world_size())))
            way = [value - saved[name] for name, value in weights_of(parts[0]).items()]
            ways.append(torch.cat([each.flatten() for each in way]))
        for found in ways[1:]:
            assert (found - ways[0]).norm() < 1e-4 * ways[0].norm(), plugin


def waits_for_a_save_elsewhere(rank: int) -> None:
    """Check that a load waits for the first process's save, whose error is raised in all processes."""
    booster, model = make(plugin=TorchDDPPlugin()), net()
    model, *_ = booster.boost(model)
    booster.save_model(model, "started", use_async=True)
    booster.wait_for_saves()
    if rank == 0:
        writer = _background._writer_of_process._process.pid
        os.kill(writer, signal.SIGSTOP)
        threading.Timer(0.3, os.kill, (writer, signal.SIGCONT)).start()
    booster.save_model(model, "slowly", use_async=True)
    booster.load_model(model, "slowly")
    booster.save_model(model, Path("slowly", "nowhere"), use_async=True)
    with pytest.raises(OSError, match=r"nowhere could not be written; rank 0 had"):
        booster.save_model(model, "again")


def refuses_a_checkpoint_together(rank: int) -> None:
    """Check that no rank changes anything if one rank finds damage, a misfit tensor or an invalid loss scale."""
    booster, model = make("fp16", TorchDDPPlugin()), net()
    model, optimizer, *_ = booster.boost(model, adam(model))
    booster.save_model(model, "fits")
    booster.save_optimizer(optimizer, "optimizer")
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    before, scale = whole_model(model, copies=True), optimizer.scaler_state()

    def failing(kind: type[Exception]) -> Any:
        def fail(*_: Any) -> None:
            raise kind("of rank 1")

        return fail

    for place, name, kind in (
        (_huggingface.Checkpoint, "files_of_model", DamagedCheckpoint),
        (checkpoint_io, "check_tensors", RuntimeError),
        (_huggingface.Checkpoint, "optimizer", DamagedCheckpoint),
        (_whole_state, "check_optimizer", ValueError),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(place, name, failing(kind))
            load, target = booster.load_model, (model, "fits")
            if "optimizer" in name:
                load, target = booster.load_optimizer, (optimizer, "optimizer")
            with pytest.raises(kind, match="of rank 1" if rank == 1 else "rank 1 cannot load a checkpoint: of rank 1"):
                load(*target)
        assert_equal(whole_model(model), before)
        assert optimizer.scaler_state() == scale
        assert not optimizer.state
    # Rank 0 has opened it before, and the others after it was replaced.
    fingerprint = _huggingface.Checkpoint.fingerprint
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_huggingface.Checkpoint, "fingerprint", lambda *args: fingerprint(*args) + rank)
        for load, target in ((booster.load_model, (model, "fits")), (booster.load_optimizer, (optimizer, "optimizer"))):
            with pytest.raises(RuntimeError, match="was replaced while it was read; load it again: rank 1 has another"):
                load(*target)
    assert_equal(whole_model(model), before)


def only_the_first_process_writes(rank: int) -> None:
    """Check that only the first process's path is written, whether asynchronously or not."""
    booster, model = make(plugin=TorchDDPPlugin()), net()
    model, optimizer, *_ = booster.boost(model, adam(model))
    for use_async in (False, True):
        name = f"{use_async} of rank {rank}"
        booster.save_model(model, f"model {name}", use_async=use_async)
        booster.save_optimizer(optimizer, f"optimizer {name}", use_async=use_async)
        booster.wait_for_saves()
        assert [Path(f"{kind} {name}").exists() for kind in ("model", "optimizer")] == [rank == 0] * 2


def saves_file_by_file(rank: int) -> None:
    """Check that the writer holds the whole tensors of one file at a time, and other processes one tensor at a time."""
    for plugin in PLUGINS:
        with ended(), pytest.MonkeyPatch.context() as patch:
            booster, parts = _with_scheduler(plugin, "fp16_naive", seed=0)
            _train(booster, parts, range(1), rank, dist.get_world_size())
            model = {name: value.numel() for name, value in whole_model(parts[0]).items()}
            held: list[int] = []
            whole: list[weakref.ref[Tensor]] = []

            def count(tensors: Iterable[Tensor], held: Any = held, whole: Any = whole) -> None:
                whole += map(weakref.ref, tensors)
                alive = [tensor for ref in whole if (tensor := ref()) is not None]
                held.append(sum({tensor.data_ptr(): tensor.numel() for tensor in alive}.values()))

            def full_tensor(*args: Any, count: Any = count, original: Any = _whole_state.full_tensor) -> Tensor:
                value = original(*args)
                count([value])
                return value

            def gather(*args: Any, count: Any = count, original: Any = _zero.gather) -> Any:
                found = original(*args)
                count([value for state in found.values() for value in state.values()])
                return found

            patch.setattr(_whole_state, "full_tensor", full_tensor)
            patch.setattr(_zero, "gather", gather)
            folder, options = Path(f"file by file {plugin}"), {"shard": True, "size_per_shard": 0}
            booster.save_model(parts[0], folder, **options)
            # A file has one tensor, or the two moments and the step count of a parameter; the file before may be left.
            largest = max(model.values())
            assert max(held, default=0) <= 2 * largest < sum(model.values()), (plugin, held)
            held.clear()
            booster.save_optimizer(parts[1], folder, **options)
            assert max(held, default=0) <= 2 * (2 * largest + 1), (plugin, held)
            assert rank == 0 or max(held, default=0) <= largest, (plugin, held)


def is_refused(rank: int) -> None:
    model, booster = net(), make(plugin=LowLevelZeroPlugin())
    optimizer = torch.optim.RMSprop(model.parameters())
    with pytest.raises(ValueError, match="RMSprop, whose state cannot be divided; use Adam, AdamW or SGD"):
        booster.boost(model, optimizer)
    with pytest.raises(ValueError, match="stage=3 is not known"):
        LowLevelZeroPlugin(stage=3)
    with pytest.raises(ValueError, match="norm_type=1"):
        LowLevelZeroPlugin(norm_type=1.0)
    with pytest.raises(ValueError, match="precision='fp4' is not known to LowLevelZeroPlugin"):
        LowLevelZeroPlugin(precision="fp4")
    with pytest.raises(NotImplementedError, match="fp8_communication"):
        TorchDDPPlugin(fp8_communication=True)
    with pytest.raises(ValueError, match="ddp='other'"):
        TorchDDPPlugin(ddp="other")
    with pytest.raises(ValueError, match="placement_policy='elsewhere'"):
        GeminiPlugin(placement_policy="elsewhere")
    with pytest.raises(TypeError, match="no_such"):
        GeminiPlugin(no_such=1)
    with pytest.raises(
        NotImplementedError, match=r"LowLevelZeroPlugin has no no_sync .* LowLevelZeroPlugin with stage=1"
    ):
        make(plugin=LowLevelZeroPlugin(stage=2)).no_sync(net())
    if rank == 0:
        plugin = LowLevelZeroPlugin()
        with pytest.warns(UserWarning, match="LowLevelZeroPlugin has a precision of its own"):
            make(mixed_precision="bf16", plugin=plugin)


def clips_by_itself(rank: int) -> None:
    with ended():
        booster = make(plugin=LowLevelZeroPlugin(precision="fp32", max_norm=1e-3))
        model = net()
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
        before = weights_of(model)
        booster.backward(model(batch(0)[0]).square().sum(), optimizer)
        optimizer.step()
        moved = sum(float((value - before[name]).square().sum()) for name, value in weights_of(model).items()) ** 0.5
        assert moved == pytest.approx(1e-3, rel=1e-3)


def measures(plugin: str, precision: str) -> Check:
    """Check that `get_grad_norm` returns the last step's norm, also after `zero_grad`, and does not affect training."""

    def check(rank: int) -> None:
        _, norms = _measured("none", "fp32", (0, 1), asks=True)
        with ended():
            place = rank, dist.get_world_size()
            weights, found = _measured(plugin, precision, place, asks=True)
            assert found == pytest.approx(norms, rel=TOLERANCE[precision])
            assert_equal(weights, _measured(plugin, precision, place, asks=False)[0])

    return check


def _measured(plugin: str, precision: str, place: tuple[int, int], asks: bool) -> tuple[dict[str, Tensor], list[float]]:
    """Return the weights after some steps, and the norms of their gradients."""
    booster, model = (PLUGINS | OTHERS)[plugin](precision), net()
    model, optimizer, criterion, *_ = booster.boost(model, adam(model), nn.CrossEntropyLoss())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in net().named_parameters()]
    assert list(model.state_dict()) == list(net().state_dict())
    norms = []
    for step in range(STEPS):
        inputs, targets = (tensor[place[0] :: place[1]] for tensor in batch(step))
        booster.backward(criterion(model(inputs), targets), optimizer)
        optimizer.step()
        norms += [optimizer.get_grad_norm()] if asks else []
        optimizer.zero_grad()
        assert not asks or optimizer.get_grad_norm() == norms[-1]
    amp.shutdown()
    return weights_of(model), norms


def refuses_plain_backward_passes(rank: int) -> None:
    for plugin in PLUGINS:
        with ended():
            booster, model = PLUGINS[plugin]("fp16_naive"), net()
            model, optimizer, *_ = booster.boost(model, adam(model))
            model(batch(0)[0]).square().mean().backward()
            with pytest.raises(RuntimeError, match="do not come from a scaled loss"):
                optimizer.step()
            optimizer.zero_grad()
            booster.backward(model(batch(0)[0]).square().mean(), optimizer)
            optimizer.step()


def loads_into_a_model_that_was_trained(rank: int) -> None:
    """Check that ZeRO's float32 weights are loaded too, and that the next file keeps earlier ones exact."""
    for precision in ("fp32", "fp16_naive"):
        with ended():
            booster, model, folder = PLUGINS["zero 1"](precision), net(), Path(f"loaded again {precision}")
            parts = booster.boost(model, adam(model), nn.CrossEntropyLoss())
            _train_without_rate(booster, parts, rank)
            booster.save_model(parts[0], folder, shard=True, size_per_shard=0)
            saved = weights_of(parts[0])
            other = net(seed=1)
            parts = booster.boost(other, adam(other), nn.CrossEntropyLoss())
            for load in (lambda: booster.load_model(parts[0], folder), lambda: parts[0].load_state_dict(saved)):  # noqa: B023
                train(booster, parts, range(1), rank, dist.get_world_size())
                load()
                assert_equal(weights_of(parts[0]), saved)
                _train_without_rate(booster, parts, rank)
                assert_equal(weights_of(parts[0]), saved)


def _train_without_rate(booster: Booster, parts: tuple[Any, ...], rank: int) -> None:
    """Take a step with a learning rate of zero."""
    rates = [group["lr"] for group in parts[1].param_groups]
    for group in parts[1].param_groups:
        group["lr"] = 0.0
    train(booster, parts, range(1), rank, dist.get_world_size())
    for group, rate in zip(parts[1].param_groups, rates, strict=True):
        group["lr"] = rate


class EveryRank(torch.utils.data.Sampler[int]):
    """A sampler of a user, without the arguments `seed` and `drop_last`."""

    def __init__(self, dataset: Any, num_replicas: int, rank: int, shuffle: bool) -> None:
        self._indices = range(rank, len(dataset), num_replicas)

    def __iter__(self) -> Any:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)


def reads_data_in_parts(rank: int) -> None:
    ranks, plugin = dist.get_world_size(), TorchDDPPlugin()
    loader = plugin.prepare_dataloader(list(range(8 * ranks)), 4, shuffle=True, seed=3, num_workers=0)
    mine = torch.cat(list(loader))
    found = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(found, mine)
    assert torch.cat(found).sort().values.tolist() == list(range(8 * ranks))
    assert torch.cat(found).tolist() != list(range(8 * ranks))
    loader.sampler.set_epoch(1)
    assert torch.cat(list(loader)).tolist() != mine.tolist()
    loader = plugin.prepare_dataloader(list(range(8)), 4, seed=3, distributed_sampler_cls=EveryRank)
    assert torch.cat(list(loader)).tolist() == list(range(rank, 8, ranks))


class Wider(Net):
    """A layer has more outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(self.last.in_features, 8)


class Reordered(Net):
    """A Net with its layers in another order."""

    def __init__(self) -> None:
        super().__init__()
        self._modules["first"] = self._modules.pop("first")


def ranks_that_differ(plugin: str) -> Check:
    """Return a check that all ranks name the last rank's difference in `boost` or in the first step."""

    def check(rank: int) -> None:
        last = dist.get_world_size() - 1
        for other, message in (
            (Wider, r"the models of rank 0 and rank {last} differ: .*last.weight of shape \(4, 32\), .* \(8, 32\)"),
            (Reordered, r"Rank 0 has parameter first.weight .*, rank {last} has parameter norm.weight"),
            ("sgd", r"the settings of rank 0 and rank {last} differ: optimizer is AdamW in rank 0 and SGD in"),
            ("fp8", r"precision of the (Booster|plugin) is .*in rank 0 and .*FP8MixedPrecision.*in rank {last}"),
        ):
            mine = other if rank == last else None
            with ended():
                model = mine() if isinstance(mine, type) else net()
                before = {name: value.clone() for name, value in model.state_dict().items()}
                booster = PLUGINS[plugin]("fp8" if mine == "fp8" else "fp32")
                with pytest.raises(RuntimeError, match=message.format(last=last)):
                    booster.boost(model, OPTIMIZERS["sgd" if mine == "sgd" else "adam"](model))
                assert_equal(dict(model.state_dict()), before)
        with ended():
            booster, model = PLUGINS[plugin]("fp32"), net()
            model, optimizer, *_ = booster.boost(model, adam(model))
            before = weights_of(model)
            if rank == last:
                optimizer.param_groups[1]["lr"] = 0.5
            booster.backward(model(batch(0)[0]).sum(), optimizer)
            with pytest.raises(
                RuntimeError, match=rf"lr of parameter group 1 is 0.002 in rank 0 and 0.5 in rank {last}"
            ):
                optimizer.step()
            assert_equal(weights_of(model), before)

    return check


def offloaded_state_is_equal(rank: int) -> None:
    """With cpu_offload weights, norms and checkpoints have the same bits, through clipping and a skipped step."""
    for stage, precision, optimizer in (
        (1, "fp32", "sgd"),
        (1, "fp16", "adam"),
        (2, "bf16", "adam"),
        (2, "bf16", "int8"),
    ):
        with ended():
            one, other = (_offloaded(stage, precision, optimizer, offloads, rank) for offloads in (True, False))
            assert_equal(one, other)


def _offloaded(stage: int, precision: str, optimizer: str, offloads: bool, rank: int) -> tuple[Any, ...]:
    plugin = LowLevelZeroPlugin(stage, precision, 4.0, max_norm=0.5, cpu_offload=offloads, hysteresis=1)
    booster, model = make(plugin=plugin), net()
    kinds = {**OPTIMIZERS, "int8": lambda model: FusedAdam(model.parameters(), 1e-3, state_format="int8")}
    parts = booster.boost(model, kinds[optimizer](model), nn.CrossEntropyLoss())
    losses = train(booster, parts, range(2), rank, dist.get_world_size())
    if precision == "fp16":
        booster.backward(parts[0](batch(0)[0]).sum() * float("inf"), parts[1])
        parts[1].step()
    losses += train(booster, parts, range(2, STEPS), rank, dist.get_world_size())
    divided = parts[1].optim
    assert (divided._host is not None) == offloads
    for state in divided._states if offloads else ():
        assert all(shard in divided._host._tensors for shard in state.shards().values())
    return losses, parts[1].get_grad_norm(), weights_of(parts[0]), whole_optimizer(parts[1])


class Adapted(nn.Linear):
    """A stand-in for a model with adapters of peft."""

    def save_pretrained(self, folder: str, safe_serialization: bool) -> None:
        torch.save((next(self.parameters()).dtype, self.state_dict()), Path(folder, "adapter_model.bin"))
        Path(folder, "adapter_config.json").touch()


def adapters_are_exact(rank: int) -> None:
    """Adapters are saved with the float32 weights that are divided among processes; the frozen weight as it is."""
    torch.manual_seed(0)
    booster, model = make(plugin=LowLevelZeroPlugin(2, "bf16")), Adapted(8, 8)
    model.weight.requires_grad_(False)
    boosted, optimizer, *_ = booster.boost(model, FusedAdam([model.bias], lr=1e-3))
    for _ in range(2):
        optimizer.backward(boosted(torch.ones(1, 8)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    exact = whole_model(boosted)
    booster.save_lora_as_pretrained(boosted, "adapters")
    dtype, saved = torch.load("adapters/adapter_model.bin", weights_only=False)
    assert (dtype, saved["bias"].dtype, saved["weight"].dtype) == (torch.float32, torch.float32, torch.bfloat16)
    assert torch.equal(saved["bias"], exact["bias"])
    assert not torch.equal(saved["bias"], model.bias)
    dist.barrier()


def other_loss_scales(rank: int) -> None:
    """Check that the first step finds a loss scale that was set in one rank only."""
    for plugin in PLUGINS:
        with ended():
            booster, model = PLUGINS[plugin]("fp16"), net()
            model, optimizer, *_ = booster.boost(model, adam(model))
            if rank == 1:
                optimizer.scaler.update(4.0)
            booster.backward(model(batch(0)[0]).sum(), optimizer)
            with pytest.raises(RuntimeError, match=r"loss scale is .* in rank 0 and 4.0 in rank 1"):
                optimizer.step()


def one_of_each(first: int) -> list[str]:
    """Return the names of checks of equality: each plugin once, and as many precisions as there are plugins."""
    chosen = (PRECISIONS[(first + number) % len(PRECISIONS)] for number in range(len(PLUGINS)))
    return [f"equal {plugin} {precision}" for plugin, precision in zip(PLUGINS, chosen, strict=True)]


SCALED = ("fp16", "fp16_apex", "fp16_naive")


def grid(kind: str, check: Callable[..., Check], cases: Iterable[tuple[str, str]]) -> dict[str, Check]:
    """Return checks by name for pairs of a plugin and a precision."""
    return {f"{kind} {plugin} {precision}": check(plugin, precision) for plugin, precision in cases}


def _equality(plugin: str, precision: str) -> Check:
    """Return a check of equality with an optimizer that depends on the precision."""
    return equality(plugin, precision, ("adam", "sgd")[PRECISIONS.index(precision) % 2])


def _resumes(plugin: str, precision: str) -> Check:
    """Return a check of resuming: sharded files in float32, asynchronous saves in float16."""
    return resumes(plugin, precision, precision == "fp32", precision == "fp16")


assert ROWS % 64 == 0  # a multiple of 16 for each of four processes, for float8
# All plugins in all precisions, for runs with other numbers of processes to choose from.
EQUAL = grid("equal", _equality, itertools.product(PLUGINS, PRECISIONS))
RESUMES = grid("resumes", _resumes, itertools.product(PLUGINS, ("fp32", *SCALED)))
# In samples each plugin has one precision here, another one in one process and another one in four.
CHECKS: dict[str, Check] = grid("equal", _equality, pairs(PLUGINS, PRECISIONS, each=1, first=2))
CHECKS["starts from the first process"] = starts_from_the_first_process
ACCUMULATING = [plugin for plugin in ("ddp", "apex ddp", "zero 1", "fsdp") if plugin in PLUGINS]
CHECKS |= grid("accumulates", adds_up, pairs(ACCUMULATING, ("fp32", *SCALED), each=1))
CHECKS |= grid("measures", measures, pairs(PLUGINS, ("fp32", *SCALED), each=1))
CHECKS |= grid("overflow", overflow, pairs(PLUGINS, SCALED, each=1))
CHECKS |= grid("resumes", _resumes, itertools.product(PLUGINS, ["fp32"]))  # "goes on elsewhere" loads their files
CHECKS |= grid("resumes", _resumes, pairs(PLUGINS, SCALED, each=1))
if needs_fsdp:
    CHECKS["equal fsdp unsharded fp32"] = equality("fsdp unsharded", "fp32", "adam")
    CHECKS |= lazy_checks.CHECKS
for index, plugin in enumerate(PLUGINS):
    boosters = functools.partial(PLUGINS[plugin], "fp32")
    optimizer = ("adam", "sgd")[index % 2]
    CHECKS[f"lazy {plugin}"] = lazy_checks.starts_and_trains(boosters, weights_of, ended, optimizer)
CHECKS |= {
    "goes on elsewhere": checkpoints_load_in_other_plugins,
    "is refused": is_refused,
    "waits for a save elsewhere": waits_for_a_save_elsewhere,
    "refuses a checkpoint together": refuses_a_checkpoint_together,
    "saves file by file": saves_file_by_file,
    "only the first process writes": only_the_first_process_writes,
    "clips by itself": clips_by_itself,
    "refuses plain backward passes": refuses_plain_backward_passes,
    "loads into a model that was trained": loads_into_a_model_that_was_trained,
    "reads data in parts": reads_data_in_parts,
    "other loss scales": other_loss_scales,
    "clips with offloaded state": offloaded_state_is_equal,
    "adapters are exact": adapters_are_exact,
    **zero_checks.CHECKS,
    **{f"ranks that differ {plugin}": ranks_that_differ(plugin) for plugin in PLUGINS},
}
