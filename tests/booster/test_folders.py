"""Folders and files that the Booster writes: beside users' files, by several writers, under a reader, on full disks."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from apex import checkpoint
from apex.booster import checkpoint_io
from tests.checkpoint.test_writers import in_child, in_threads
from tests.parallel.processes import environment
from tests.support.warm import run_python

from .problem import adam, net
from .problem import booster as make
from .test_refused_loads import FORMATS

WRITTEN = {"model-00001-of-00001.safetensors", "model.safetensors.index.json"}


def constant(value: float) -> nn.Module:
    """Return a model of several tensors whose elements all have one value."""
    model = nn.Sequential(*[nn.Linear(40, 40) for _ in range(4)])
    for param in model.parameters():
        nn.init.constant_(param, value)
    return model


def value_of(model: nn.Module) -> float:
    (value,) = {each.item() for param in model.parameters() for each in param.unique()}
    return value


class Config:
    """A `config` like the ones of transformers."""

    def __init__(self, text: str) -> None:
        self.text = text

    def save_pretrained(self, folder: Path) -> None:
        (Path(folder) / "config.json").write_text(self.text)


def test_the_manifest_lists_saved_files(tmp_path: Path) -> None:
    booster, model = make(), net()
    _, optimizer, *_ = booster.boost(model, adam(model))
    for name in ("tokenizer.json", "notes.txt"):
        (tmp_path / name).write_text("mine")
    booster.save_model(model, tmp_path, shard=True, use_safetensors=True)
    assert set(json.loads((tmp_path / "manifest.json").read_text())) == WRITTEN
    booster.save_optimizer(optimizer, tmp_path, shard=True)
    booster.save_model(model, tmp_path, shard=True, use_safetensors=True)
    (tmp_path / "notes.txt").write_text("other")
    checkpoint.verify(tmp_path)
    listed = set(json.loads((tmp_path / "manifest.json").read_text()))
    assert listed - WRITTEN == {"pytorch_optim-00001.bin", "pytorch_optim.bin.index.json", "pytorch_optim_group.bin"}
    assert [(tmp_path / name).read_text() for name in ("tokenizer.json", "notes.txt")] == ["mine", "other"]


class Adapted(nn.Linear):
    """A stand-in for a model with adapters of peft, of which it writes two, one under a name of its own."""

    def __init__(self, text: str, fails: bool = False) -> None:
        super().__init__(2, 2)
        self.text, self.fails = text, fails

    def save_pretrained(self, folder: str, safe_serialization: bool) -> None:
        path = Path(folder)
        (path / "named").mkdir(exist_ok=True)
        for name in ("adapter_config.json", "README.md", "named/adapter_model.bin"):
            (path / name).write_text(self.text)
        if self.fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        (path / ("adapter_model.safetensors" if safe_serialization else "adapter_model.bin")).write_text(self.text)


def test_adapters_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    folder.mkdir()
    (folder / "README.md").write_text("mine")
    (folder / "named").mkdir()
    (folder / "named" / "notes").write_text("mine")
    make().save_lora_as_pretrained(Adapted("old"), folder)

    def contents() -> dict[str, str]:
        files = (each for each in folder.rglob("*") if each.is_file() and each.name != "manifest.json")
        return {each.relative_to(folder).as_posix(): each.read_text() for each in files}

    mine = {"README.md": "mine", "named/notes": "mine"}
    common = ("adapter_config.json", "named/adapter_model.bin")
    assert contents() == {**mine, **dict.fromkeys((*common, "adapter_model.bin"), "old")}
    with pytest.raises(OSError, match="No space left"):
        make().save_lora_as_pretrained(Adapted("new", fails=True), folder)
    assert contents() == {**mine, **dict.fromkeys((*common, "adapter_model.bin"), "old")}
    make().save_lora_as_pretrained(Adapted("new"), folder, use_safetensors=True)
    assert contents() == {**mine, **dict.fromkeys((*common, "adapter_model.safetensors"), "new")}
    checkpoint.verify(folder)
    assert [each.name for each in tmp_path.iterdir()] == ["adapters"]
    with pytest.raises(TypeError, match="model must be one with adapters, from enable_lora, not a Net"):
        make().save_lora_as_pretrained(net(), folder)


@pytest.mark.parametrize("name", [*sorted(WRITTEN), "manifest.json", "config.json"])
def test_a_foreign_file_under_a_needed_name(name: str, tmp_path: Path) -> None:
    """Save into a folder with files from Hugging Face."""
    model = net()
    model.config = Config("{}")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / name).write_text("theirs")
    with pytest.raises(FileExistsError, match=f"{name} was not written by a save to this folder"):
        make().save_model(model, folder, shard=True, use_safetensors=True)
    assert {each: each.read_text() for each in tmp_path.rglob("*") if each.is_file()} == {folder / name: "theirs"}


def test_a_folder_of_hugging_face(tmp_path: Path) -> None:
    """Its files stay, the index that we wrote is read, and an equal configuration is not replaced."""
    model, booster = constant(1.0), make()
    model.config = Config("{}")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("theirs")
    (tmp_path / "a.model.safetensors.index.json").write_text("theirs")
    (tmp_path / "pytorch_model-00001-of-00001.bin").write_text("theirs")
    for _ in range(2):
        booster.save_model(model, tmp_path, shard=True, use_safetensors=True)
    assert set(json.loads((tmp_path / "manifest.json").read_text())) == WRITTEN
    assert (tmp_path / "model.safetensors").read_text() == "theirs"
    other = constant(2.0)
    booster.load_model(other, tmp_path)
    assert value_of(other) == 1.0
    (tmp_path / "config.json").unlink()
    booster.save_model(model, tmp_path, shard=True, use_safetensors=True)
    model.config = Config('{"now": "ours"}')
    booster.save_model(model, tmp_path, shard=True, use_safetensors=True)
    assert (tmp_path / "config.json").read_text() == '{"now": "ours"}'


@pytest.mark.parametrize(("shard", "use_safetensors"), FORMATS)
def test_threads_that_save_to_one_path(shard: bool, use_safetensors: bool, tmp_path: Path) -> None:
    path = tmp_path / "model"

    def work(number: int) -> None:
        model = constant(float(number))
        for _ in range(8):
            make().save_model(model, path, shard=shard, use_safetensors=use_safetensors, size_per_shard=0)

    in_threads(3, work)
    checkpoint.verify(path)
    model = constant(9.0)
    make().load_model(model, path)
    assert value_of(model) in (0.0, 1.0, 2.0)
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("use_safetensors", [False, True])
def test_a_folder_that_is_replaced_while_it_is_read(
    use_safetensors: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader gets the model of one save, not some tensors of one and some of another."""
    path = tmp_path / "model"
    options: Any = {"shard": True, "use_safetensors": use_safetensors, "size_per_shard": 0}
    make().save_model(constant(0.0), path, **options)
    load_tensors = checkpoint_io.load_tensors

    def load_slowly(model: Any, parts: Iterable[Any], *others: Any) -> None:
        def replaced_after_the_first() -> Iterator[Any]:
            for number, part in enumerate(parts):
                if number == 1:
                    make().save_model(constant(1.0), path, **options)
                yield part

        load_tensors(model, replaced_after_the_first(), *others)

    monkeypatch.setattr(checkpoint_io, "load_tensors", load_slowly)
    model = constant(9.0)
    make().load_model(model, path)
    assert value_of(model) == 0.0
    monkeypatch.undo()
    make().load_model(model, path)
    assert value_of(model) == 1.0


@pytest.mark.parametrize("use_safetensors", [False, True])
def test_the_renamed_file_was_flushed_and_locked(
    use_safetensors: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check also that a new file has default permissions and that an existing one keeps its own."""
    path, flushed = tmp_path / "model", set[int]()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (flushed.add(os.fstat(file).st_ino), fsync(file)))
    make().save_model(constant(0.0), path, use_safetensors=use_safetensors)
    assert path.stat().st_ino in flushed
    (tmp_path / "plain").write_text("")
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    path.chmod(0o640)
    make().save_model(constant(0.0), path, use_safetensors=use_safetensors)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a limit is for a process of its own")
@pytest.mark.usefixtures("forked_writers")
@pytest.mark.parametrize(("shard", "use_safetensors"), FORMATS)
def test_a_save_that_is_cut_off(shard: bool, use_safetensors: bool, tmp_path: Path) -> None:
    """The error names the system's reason and the path, also of an asynchronous save; the old checkpoint stays."""
    path = tmp_path / "model"
    make().save_model(constant(1.0), path, shard=shard, use_safetensors=use_safetensors)

    def save(use_async: bool) -> None:
        booster = make()
        booster.save_model(nn.Linear(200, 200), path, shard=shard, use_safetensors=use_safetensors, use_async=use_async)
        booster.wait_for_saves()

    for use_async in (False, True):
        said = in_child(lambda use_async=use_async: save(use_async))
        assert said.startswith(f"OSError {errno.EFBIG} "), said
        assert f"the checkpoint {path} could not be written; rank 0 had OSError: [Errno {errno.EFBIG}]" in said
    model = constant(2.0)
    make().load_model(model, path)
    assert value_of(model) == 1.0
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_an_asynchronous_save_that_fails_ends_the_process_with_an_error(tmp_path: Path) -> None:
    """Nobody waits for the save, and the Booster no longer exists. The writer is a fork, which imports nothing anew."""
    script = """
        import sys
        from torch import nn
        from apex.booster import Booster
        from apex.checkpoint import _background
        from tests.support.forked_writer import ForkedWriter
        _background.start_process = ForkedWriter
        def main(path):
            Booster("cpu").save_model(nn.Linear(2, 2), path, use_async=True)
        main(sys.argv[1])
        print("the end")
    """
    code = "\n".join(line[8:] for line in script.splitlines())
    (tmp_path / "file").write_text("in the way")
    results = {
        name: run_python("-c", code, str(tmp_path / name), cwd=tmp_path, environment=environment(), timeout=100)
        for name in ("file/model", "model")
    }
    failed, worked = results["file/model"], results["model"]
    assert failed.returncode == 1, failed.stderr
    assert "file/model could not be written" in failed.stderr
    assert failed.stdout.strip() == "the end"
    assert (worked.returncode, worked.stderr) == (0, "")
