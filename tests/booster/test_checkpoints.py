"""Files of checkpoints: whole or not at all, in the layout of Hugging Face, beside others, asynchronous, damaged."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from apex.booster import Booster
from apex.booster._whole_state import Parts, whole_model, whole_optimizer
from apex.checkpoint import DamagedCheckpoint, SaveInProgress, Series, _background

from .problem import adam, assert_equal, net, train
from .problem import booster as make

pytestmark = pytest.mark.usefixtures("forked_writers")


def trained(seed: int = 0, precision: Any = None) -> tuple[Booster, tuple[Any, ...]]:
    booster, model = make(precision), net(seed)
    parts = booster.boost(model, adam(model), nn.CrossEntropyLoss())
    train(booster, parts, range(2))
    return booster, parts


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("use_safetensors", [False, True])
@pytest.mark.parametrize("use_async", [False, True])
def test_every_format_gives_back_the_bits(shard: bool, use_safetensors: bool, use_async: bool, tmp_path: Path) -> None:
    booster, parts = trained()
    path = tmp_path / "new" / "model"
    options = {"shard": shard, "use_async": use_async, "size_per_shard": 0}
    booster.save_model(parts[0], path, use_safetensors=use_safetensors, **options)
    booster.save_optimizer(parts[1], tmp_path / "optimizer", **options)
    expected = whole_model(parts[0], copies=True), whole_optimizer(parts[1], copies=True)
    train(booster, parts, range(2, 3))  # the save in progress must not see this
    booster.wait_for_saves()
    other, loaded = trained(seed=1)
    other.load_model(loaded[0], path, low_cpu_mem_mode=not shard, num_threads=1 + use_async)
    other.load_optimizer(loaded[1], tmp_path / "optimizer", num_threads=2)
    assert_equal((whole_model(loaded[0]), whole_optimizer(loaded[1])), expected)
    if shard:
        kind = "model.safetensors" if use_safetensors else "pytorch_model.bin"
        index = json.loads((path / f"{kind}.index.json").read_text())
        count = len(expected[0])
        stem, ending = kind.rsplit(".", 1)
        names = [f"{stem}-{number:05d}-of-{count:05d}.{ending}" for number in range(1, count + 1)]
        assert list(index["weight_map"].items()) == list(zip(expected[0], names, strict=True))
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected[0].values())
        assert (tmp_path / "optimizer" / "pytorch_optim_group.bin").exists()


def test_sizes_and_prefixes(tmp_path: Path) -> None:
    booster, parts = trained()
    booster.save_model(parts[0], tmp_path, shard=True, prefix="large")
    assert {path.name for path in tmp_path.iterdir()} == {
        "large.pytorch_model-00001-of-00001.bin",
        "large.pytorch_model.bin.index.json",
        "manifest.json",
    }
    other = trained(seed=1)[1]
    booster.load_model(other[0], tmp_path)
    assert_equal(whole_model(other[0]), whole_model(parts[0]))
    sizes = {"a": 2**20, "b": 4, "c": 4, "d": 2**21}
    assert Parts(sizes, 1, lambda keys: {}).keys == [["a"], ["b", "c"], ["d"]]
    assert Parts(sizes, None, lambda keys: {}).keys == [["a", "b", "c", "d"]]


def test_other_files_of_a_folder_stay(tmp_path: Path) -> None:
    """A model, its optimizer and a tokenizer in one folder; the model's old files go."""
    booster, parts = trained()
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "words").write_text("the of and")
    (tmp_path / "notes.bin").write_text("mine")
    booster.save_optimizer(parts[1], tmp_path, shard=True)
    booster.save_model(parts[0], tmp_path, shard=True, size_per_shard=0)
    booster.save_model(parts[0], tmp_path, shard=True, use_safetensors=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "manifest.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "notes.bin",
        "pytorch_optim-00001.bin",
        "pytorch_optim.bin.index.json",
        "pytorch_optim_group.bin",
        "tokenizer",
    ]
    assert (tmp_path / "tokenizer" / "words").read_text() == "the of and"
    booster.load_model(parts[0], tmp_path)
    booster.load_optimizer(parts[1], tmp_path)


@pytest.mark.parametrize("shard", [False, True])
def test_a_failed_save_keeps_the_old_checkpoint(shard: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    booster, parts = trained()
    path = tmp_path / "model"
    booster.save_model(parts[0], path, shard=shard, size_per_shard=0)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    saves = iter([torch.save])

    def failing(*arguments: Any) -> None:
        next(saves, lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))(*arguments)

    if not shard:
        next(saves)
    monkeypatch.setattr(torch, "save", failing)
    train(booster, parts, range(2, 3))
    with pytest.raises(OSError, match="No space left"):
        booster.save_model(parts[0], path, shard=shard, size_per_shard=0)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_an_asynchronous_failure_is_raised_later(tmp_path: Path) -> None:
    booster, parts = make(), [nn.Linear(2, 2)]
    (tmp_path / "file").write_text("in the way")
    booster.save_model(parts[0], tmp_path / "file" / "model", use_async=True)
    with pytest.raises(OSError, match="file"):
        booster.wait_for_saves()
    booster.wait_for_saves()
    booster.save_model(parts[0], tmp_path / "model", use_async=True)
    with torch.no_grad():
        parts[0].weight.zero_()
    booster.load_model(parts[0], tmp_path / "model")  # waits
    assert parts[0].weight.count_nonzero()


def test_a_second_save_waits_or_refuses(tmp_path: Path) -> None:
    booster, model = make(), nn.Linear(2, 2)
    booster.save_model(model, tmp_path / "a", use_async=True)
    booster.wait_for_saves()
    writer = _background._writer_of_process._process.pid
    os.kill(writer, signal.SIGSTOP)
    try:
        booster.save_model(model, tmp_path / "b", use_async=True)
        with pytest.raises(SaveInProgress, match="c was not saved"):
            booster.save_model(model, tmp_path / "c", use_async=True, if_busy="raise")
    finally:
        os.kill(writer, signal.SIGCONT)
    booster.save_model(model, tmp_path / "c")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c"}


def test_checkpoints_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    booster, parts = trained()
    booster.save_model(parts[0], tmp_path / "model")
    booster.save_optimizer(parts[1], tmp_path / "optimizer")
    other = nn.Sequential(nn.Linear(16, 32))
    with pytest.raises(RuntimeError, match=r"missing \['0.bias', '0.weight'\], unexpected \['blocks.0.bias'"):
        booster.load_model(other, tmp_path / "model")
    booster.load_model(other, tmp_path / "model", strict=False)
    _, optimizer, *_ = booster.boost(other, torch.optim.Adam(other.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"the checkpoint has groups of \[4, 6\] parameters, the optimizer of \[2\]"):
        booster.load_optimizer(optimizer, tmp_path / "optimizer")
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        booster.load_model(other, tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="neither an index of a model nor"):
        booster.load_model(other, tmp_path / "empty")
    with pytest.raises(NotImplementedError, match=r"apex\.checkpoint\.save_sharded"):
        booster.save_model(other, tmp_path / "x", gather_dtensor=False)
    (tmp_path / "model").write_bytes((tmp_path / "model").read_bytes()[:-100])
    with pytest.raises(DamagedCheckpoint):
        booster.load_model(parts[0], tmp_path / "model")


def test_tied_weights(tmp_path: Path) -> None:
    """safetensors has one name for a tensor; the model has two."""

    def tied(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        for layer in model:
            layer.register_buffer("table", torch.rand(3) if layer is model[0] else model[0].table)
        return model

    booster, model = make(), tied(0)
    for number, options in enumerate(({"use_safetensors": True}, {}, {"use_safetensors": True, "shard": True})):
        booster.save_model(model, tmp_path / str(number), **options)
        other = tied(1)
        booster.load_model(other, tmp_path / str(number))
        assert_equal(dict(other.state_dict()), dict(model.state_dict()))
        assert other[0].weight is other[1].weight
    for use_safetensors in (True, False):
        folder = tmp_path / f"folder {use_safetensors}"
        booster.save_model(model, folder, shard=True, use_safetensors=use_safetensors)
        (index,) = folder.glob("*.index.json")
        assert ("1.weight" in json.loads(index.read_text())["weight_map"]) is not use_safetensors


def test_a_missing_buffer_among_distributed_ones(tmp_path: Path) -> None:
    """DTensors all have the address 0, and must not be taken for one tensor."""
    from torch.distributed.tensor import DeviceMesh, distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        model = nn.Linear(2, 2)
        for name, value in (("mean", torch.zeros(3)), ("variance", torch.ones(3))):
            model.register_buffer(name, distribute_tensor(value, mesh))
        model.register_buffer("same", model.mean)
        booster = make()
        booster.save_model(model, tmp_path / "tied", use_safetensors=True)
        booster.load_model(model, tmp_path / "tied")
        torch.save({"weight": model.weight, "bias": model.bias, "mean": torch.zeros(3)}, tmp_path / "less")
        with pytest.raises(RuntimeError, match=r"missing \['variance'\], unexpected \[\]"):
            booster.load_model(model, tmp_path / "less")
    finally:
        torch.distributed.destroy_process_group()


def test_buffers_of_several_chunks() -> None:
    """State dicts of chunks do not live at the same time, so that ids of tensors may repeat."""
    model = SimpleNamespace(chunks=[nn.ModuleDict({str(index): nn.BatchNorm1d(2)}) for index in range(8)])
    for index, chunk in enumerate(model.chunks):
        chunk[str(index)].running_mean.fill_(index)
        chunk[str(index)].running_var.fill_(10 + index)
    found = whole_model(model)
    assert [found[f"{index}.running_mean"].tolist() for index in range(8)] == [[index] * 2 for index in range(8)]
    assert [found[f"{index}.running_var"].tolist() for index in range(8)] == [[10 + index] * 2 for index in range(8)]


def test_the_package_safetensors_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    make().save_model(net(), tmp_path / "model", use_safetensors=True)
    other = net(1)
    make().load_model(other, tmp_path / "model")
    assert_equal(dict(other.state_dict()), dict(net().state_dict()))


@pytest.mark.parametrize("precision", ["fp16_naive", "fp16"])
def test_models_are_saved_in_float32_and_masters_follow_what_is_loaded(precision: str, tmp_path: Path) -> None:
    """Masters are set even if the optimizer's state is not loaded: else they would write the old weights back."""
    booster, parts = trained(0, precision)
    booster.save_model(parts[0], tmp_path / "model")
    saved = torch.load(tmp_path / "model")
    assert {value.dtype for value in saved.values()} == {torch.float32}
    other, loaded = trained(1, precision)
    other.load_model(loaded[0], tmp_path / "model")
    assert_equal(dict(whole_model(loaded[0])), dict(saved))
    loaded[1].zero_grad()
    loaded[1].param_groups[0]["lr"] = loaded[1].param_groups[1]["lr"] = 0.0
    train(other, loaded, range(1))
    assert_equal(dict(whole_model(loaded[0])), dict(saved))


def test_the_loss_scale_is_saved_with_the_optimizer(tmp_path: Path) -> None:
    booster, parts = trained(0, "fp16")
    parts[1].scaler.update(4096.0)
    booster.save_optimizer(parts[1], tmp_path / "optimizer")
    other, loaded = trained(1, "fp16")
    other.load_optimizer(loaded[1], tmp_path / "optimizer")
    assert loaded[1].scaler.get_scale() == 4096.0


def test_a_training_is_one_checkpoint_of_a_series(tmp_path: Path) -> None:
    booster, parts = trained()
    series = Series(tmp_path, keep=2, sharded=True)
    assert booster.resume_latest(series, *parts[:2]) == (0, {})
    for step in range(1, 4):
        train(booster, parts, range(step, step + 1))
        path = booster.save_training(series, step, *parts[:2], use_async=step > 1, note=step)
    expected = whole_model(parts[0], copies=True), whole_optimizer(parts[1], copies=True)
    train(booster, parts, range(4, 5))  # the save in progress must not see this
    assert series.latest() == path == series.path_of(3)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    other, loaded = trained(seed=1)
    assert other.resume_latest(series, *loaded[:2]) == (3, {"note": 3})
    assert_equal((whole_model(loaded[0]), whole_optimizer(loaded[1])), expected)
    other.load_model(loaded[0], path)  # it is a folder in the layout of Hugging Face as well
    # A damaged one is not the newest.
    part = next(path.glob("pytorch_optim-*"))
    part.write_bytes(part.read_bytes()[:-1])
    assert other.resume_latest(series, *loaded[:2])[0] == 2


def test_trainings_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    booster, model = make(), net()
    scheduler_of = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    model, optimizer, *_ = booster.boost(model, adam(model))
    series = Series(tmp_path, sharded=True)
    booster.save_training(series, 1, model, optimizer, scheduler_of(optimizer.optim))
    other = nn.Linear(2, 2)
    other, other_optimizer, *_ = booster.boost(other, torch.optim.AdamW(other.parameters()))
    scheduler = scheduler_of(other_optimizer.optim)
    scheduler.last_epoch = 7
    before = whole_model(other, copies=True), random.getstate()
    with pytest.raises(RuntimeError, match="does not fit the model"):
        booster.resume_latest(series, other, other_optimizer, scheduler)
    with pytest.raises(ValueError, match=r"the checkpoint .* has no state of loader"):
        booster.resume_latest(series, other, other_optimizer, scheduler, loader=scheduler)
    assert scheduler.last_epoch == 7
    assert_equal((whole_model(other), random.getstate()), before)
    with pytest.raises(ValueError, match=r"in a sharded series: Series\(folder, sharded=True\)"):
        booster.save_training(Series(tmp_path / "files"), 1, model)
    with pytest.raises(ValueError, match=r"in a sharded series"):
        booster.resume_latest(Series(tmp_path / "files"), model)
    with pytest.raises(TypeError, match=r"note holds what torch.load\(weights_only=True\) refuses"):
        booster.save_training(series, 2, model, note=Booster)
    with pytest.raises(TypeError, match=r"note cannot be saved"):
        booster.save_training(series, 2, model, note=lambda: None)
    with pytest.raises(TypeError, match=r"note must have load_state_dict, got str; plain values are returned"):
        booster.resume_latest(series, model, optimizer, note="a value")
    other_series = Series(tmp_path / "other", sharded=True)
    other_series.save({"x": torch.ones(2)}, 1)
    with pytest.raises(ValueError, match="is not one of save_training"):
        booster.resume_latest(other_series, model, optimizer)
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000003" / "mine.txt").write_text("a user's file")
    with pytest.raises(OSError, match="holds files and is no checkpoint"):
        booster.save_training(series, 3, model)
    assert series.latest() == series.path_of(1)
