"""Checkpoints of the Booster in a campaign: damage, readers and writers at once, full disks, files of the user."""

from __future__ import annotations

import errno
import functools
import json
import os
import random
import resource
import shutil
import signal
import stat
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from apex import checkpoint
from apex.booster import Booster
from apex.booster._whole_state import whole_optimizer
from tests.campaign.saves import damaged, in_threads
from tests.campaign.trials import Trials, in_child, in_children

SAVES = 4
FORMATS = [{"shard": shard, "use_safetensors": safe} for shard in (False, True) for safe in (False, True)]


def model_of(number: float) -> nn.Module:
    """Return a model whose elements are all `number`, in eight tensors."""
    model = nn.Sequential(*[nn.Linear(30, 30) for _ in range(4)])
    for param in model.parameters():
        nn.init.constant_(param, number)
    return model


def numbers_in(model: nn.Module) -> set[float]:
    return {each.item() for param in model.parameters() for each in param.unique()}


def save(path: Path, number: float, options: dict[str, Any]) -> None:
    Booster("cpu").save_model(model_of(number), path, size_per_shard=0, **options)


def damage_boosted(trials: Trials) -> None:
    """load_model raises DamagedCheckpoint and changes nothing, or gives what was saved."""
    for number, options in enumerate(FORMATS):
        save(trials.folder / f"original{number}", 7.0, options)

    def load(path: Path) -> str:
        model = model_of(1.0)
        try:
            Booster("cpu").load_model(model, path)
        except checkpoint.DamagedCheckpoint:
            assert numbers_in(model) == {1.0}, "the model was changed"
            return "noticed"
        assert numbers_in(model) == {7.0}, "other values"
        return "harmless"

    for folder in trials:
        number = trials.rng.randrange(len(FORMATS))
        path, shard = folder / "model", FORMATS[number]["shard"]
        (shutil.copytree if shard else shutil.copy)(trials.folder / f"original{number}", path)
        target = trials.rng.choice(sorted(path.iterdir())) if shard else path
        target.write_bytes(damaged(target.read_bytes(), trials.rng))
        with trials.expecting(f"{FORMATS[number]}, {target.name}, trial {trials.done}"):
            said = in_child(lambda path=path: load(path))
            assert said in ("noticed", "harmless"), said
            trials.outcomes[said] += 1


def readers(trials: Trials) -> None:
    """Threads of two processes save a model while others load it: no call fails, and no model is a mixture."""
    for folder in trials:
        options = trials.rng.choice(FORMATS)
        path = folder / "model"
        save(path, 0.0, options)
        with trials.expecting(f"{options}, trial {trials.done}"):
            both = [functools.partial(save_and_load, path, options, process) for process in (0, 1)]
            said = "".join(in_children(both))
            assert not said, said
            assert [each.name for each in folder.iterdir()] == ["model"]
            checkpoint.verify(path)
            trials.outcomes["saves"] += 4 * SAVES
            trials.outcomes["reads"] += 8 * SAVES


def save_and_load(path: Path, options: dict[str, Any], process: int) -> str:
    """Save in two threads and load in two others; return what failed."""
    failures: list[str] = []
    torch.set_num_threads(torch.get_num_threads())

    def work(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException:
            failures.append(traceback.format_exc())

    def write(thread: int) -> None:
        for index in range(SAVES):
            save(path, 1.0 + process + 2 * thread + 4 * index, options)

    def load() -> None:
        model = model_of(-1.0)
        for _ in range(2 * SAVES):
            Booster("cpu").load_model(model, path)
            assert len(numbers_in(model)) == 1, f"a mixture of {numbers_in(model)}"

    calls = [functools.partial(write, 0), functools.partial(write, 1), load, load]
    in_threads([functools.partial(work, call) for call in calls])
    return "\n".join(failures)


def full_disk_boosted(trials: Trials) -> None:
    """A file may not grow beyond a random length: OSError with number and path, and the old model stays."""
    for folder in trials:
        options, use_async = trials.rng.choice(FORMATS), trials.rng.random() < 0.5
        path, limit = folder / "model", trials.rng.randrange(3_000)
        save(path, 1.0, options)

        def work(path: Path = path, options: Any = options, use_async: bool = use_async, limit: int = limit) -> str:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            booster = Booster("cpu")
            try:
                booster.save_model(model_of(2.0), path, size_per_shard=0, use_async=use_async, **options)
                booster.wait_for_saves()
            except OSError as error:
                return "OSError" if error.errno == errno.EFBIG and str(path) in str(error) else repr(error)
            return "no error"

        with trials.expecting(f"{options}, a limit of {limit} bytes"):
            said = in_child(work)
            assert said == "OSError", said
            assert [each.name for each in folder.iterdir()] == ["model"]
            model = model_of(0.0)
            Booster("cpu").load_model(model, path)
            assert numbers_in(model) == {1.0}


def foreign(trials: Trials) -> None:
    """Files of the user in folders that are saved to: they stay, or the save is refused; so do permissions."""
    for folder in trials:
        rng, path = trials.rng, folder / "target"
        path.mkdir()
        if rng.random() < 0.5:
            put_checkpoint(path, rng)
        names = ("thesis.tex", "notes.txt", "config.json", "model.safetensors", "__0_0.distcp", "manifest.json")
        for name in rng.sample(names, rng.randint(0, 3)):
            if not (path / name).exists():
                (path / name).write_text(f"{name} {rng.random()}")
        if rng.random() < 0.5:
            (path / "folder").mkdir()
            (path / "folder" / "inside").write_text("x")
        listed = set(checkpoint_files(path))
        before = {each: each.read_bytes() for each in path.rglob("*") if each.is_file() and each.name not in listed}
        mode = rng.choice((0o700, 0o750, 0o755))
        path.chmod(mode)
        with trials.expecting(f"trial {trials.done}: {sorted(each.name for each in before)}, ours {sorted(listed)}"):
            try:
                put_checkpoint(path, rng)
                trials.outcomes["saved"] += 1
            except FileExistsError:
                trials.outcomes["refused"] += 1
            assert {each: each.read_bytes() for each in before} == before
            assert stat.S_IMODE(path.stat().st_mode) == mode
            assert os.listdir(folder) == ["target"]


def put_checkpoint(path: Path, rng: random.Random) -> None:
    if rng.random() < 0.5:
        checkpoint.save_sharded({"weights": torch.ones(3)}, path)
    else:
        save(path, 1.0, {"shard": True, "use_safetensors": rng.random() < 0.5})


def checkpoint_files(path: Path) -> list[str]:
    """Return the names of the files in a folder that saves wrote."""
    try:
        listed = json.loads((path / "manifest.json").read_text())
    except (OSError, ValueError):
        return []
    return [*listed, "manifest.json"]


def refused(trials: Trials) -> None:
    """Models and optimizers that do not fit, in random ways: refused by name, and nothing is changed."""
    for folder in trials:
        rng = trials.rng
        model = model_of(0.01)  # whose gradients are finite in half precision, times the loss scale
        booster = Booster("cpu", "fp16")
        model, optimizer, *_ = booster.boost(model, torch.optim.Adam(model.parameters()))
        booster.backward(model(torch.ones(2, 30)).float().mean(), optimizer)
        optimizer.step()
        before, state = numbers_in(model), whole_optimizer(optimizer, copies=True)
        kind = rng.choice(("shape", "missing", "scale", "moment", "options"))
        with trials.expecting(f"{kind}, trial {trials.done}"):
            try:
                if kind in ("shape", "missing"):
                    other = model_of(3.0)
                    other[3] = nn.Linear(30, 29) if kind == "shape" else nn.Identity()
                    Booster("cpu").save_model(other, folder / "model", size_per_shard=0, **rng.choice(FORMATS))
                    booster.load_model(model, folder / "model")
                else:
                    spoil(kind, state, rng)
                    checkpoint.save(state, folder / "optimizer")
                    state = whole_optimizer(optimizer, copies=True)
                    booster.load_optimizer(optimizer, folder / "optimizer")
            except (RuntimeError, ValueError):
                trials.outcomes[kind] += 1
            else:
                raise AssertionError("it was loaded")
            assert numbers_in(model) == before
            after = whole_optimizer(optimizer)
            assert after["scaler"] == state["scaler"]
            assert after["param_groups"] == state["param_groups"]
            for key, values in state["state"].items():
                assert all(torch.equal(value, after["state"][key][name]) for name, value in values.items())


def spoil(kind: str, state: dict[str, Any], rng: random.Random) -> None:
    if kind == "scale":
        state["scaler"]["scale"] = rng.choice((float("nan"), 0.0, -2.0, float("inf"), -float("inf")))
    elif kind == "moment":
        values = state["state"][rng.choice(sorted(state["state"]))]
        values[rng.choice(("exp_avg", "exp_avg_sq"))] = torch.zeros(rng.randint(1, 20))
    else:
        state["param_groups"] = [{**group} for group in state["param_groups"]]
        del state["param_groups"][0]["betas"], state["algorithm"]
