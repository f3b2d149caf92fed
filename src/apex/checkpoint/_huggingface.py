"""Checkpoints in one file, or in a folder in the layout of Hugging Face, written atomically.

model.safetensors.index.json               {"metadata": {"total_size": ...}, "weight_map": {name: file}}
model-00001-of-00002.safetensors           tensors by name; pytorch_model-00001-of-00002.bin without safetensors
pytorch_optim.bin.index.json               index of the optimizer state, by parameter number
pytorch_optim_group.bin                    parameter groups, and the loss scale
pytorch_optim-00001.bin
training.pt                                in a checkpoint of a series: scheduler, loader, random numbers
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from .._atomic import atomic_file, make_folder, replacing, sync_file, sync_folder, unfinished_folder
from ..ops._host import HOST
from ._damage import DamagedCheckpoint
from ._files import check_file, opened, read, shapes_in, write_state
from ._folders import Generation, check_names, is_plain_name, prepare, publish, size_and_checksum
from ._ranks import raise_everywhere
from ._safetensors import ENDING as _SAFE

_MODEL, _SAFE_MODEL = "pytorch_model.bin", "model.safetensors"
_OPTIMIZER, _GROUPS = "pytorch_optim.bin", "pytorch_optim_group.bin"
_INDEX, _CARD = ".index.json", "README.md"
TRAINING = "training.pt"
# Length of the end of a file that holds the archive's directory: about 100 bytes for each tensor.
_TAIL_BYTES = 1 << 18


@dataclass
class OneFile:
    """A checkpoint in one file, in the format of safetensors or of `torch.save`. `states` has one item."""

    states: Iterable[Any]
    use_safetensors: bool = False
    rest: dict[str, Any] | None = None

    def write(self, path: Path) -> None:
        """Write the file. An optimizer's state goes with the `rest`, its groups and the loss scale."""
        make_folder(path.parent)
        state = next(iter(self.states))
        with replacing(path) as temporary:
            write_state(state if self.rest is None else {"state": state, **self.rest}, temporary, self.use_safetensors)


@dataclass
class ModelFolder:
    """A folder with a model, and with the configuration files of its class, as transformers writes them.

    `states` yields the tensors of one file after the other, whose names are `keys`, and whose size is `total` bytes.
    """

    keys: list[list[str]]
    states: Iterable[dict[str, Tensor]]
    total: int
    prefix: str | None
    use_safetensors: bool
    config: dict[str, bytes]

    def names(self) -> list[str]:
        """Return the names of the files with tensors, and of their index."""
        name = _named(_SAFE_MODEL if self.use_safetensors else _MODEL, self.prefix)
        stem, ending = name.rsplit(".", 1)
        count = len(self.keys)
        return [*(f"{stem}-{i:05d}-of-{count:05d}.{ending}" for i in range(1, count + 1)), f"{name}{_INDEX}"]

    def fill(self, folder: Path, target: Path) -> None:
        """Write all files to `folder`, which will replace `target`."""
        *files, index = self.names()
        states = iter(self.states)
        for file in files:
            write_state(next(states), folder / file, self.use_safetensors)  # one file's tensors at a time
        _write_index(folder / index, {"total_size": self.total}, self.keys, files)
        _write_config(self.config, folder, target)

    def write(self, path: Path) -> None:
        """Write the folder; an optimizer in it stays."""
        _replace(path, self.names(), lambda folder: self.fill(folder, path), _is_model)


@dataclass
class OptimizerFolder:
    """A folder with an optimizer's state: its tensors as in a `ModelFolder`, and the `rest` in a file of groups."""

    keys: list[list[int]]
    states: Iterable[dict[int, Any]]
    total: int
    prefix: str | None
    rest: dict[str, Any]

    def names(self) -> list[str]:
        """Return the names of the files with tensors, of their index and of the file of groups."""
        name = _named(_OPTIMIZER, self.prefix)
        files = [f"{name[:-4]}-{number:05d}.bin" for number in range(1, len(self.keys) + 1)]
        return [*files, f"{name}{_INDEX}", _named(_GROUPS, self.prefix)]

    def fill(self, folder: Path, target: Path) -> None:
        """Write all files to `folder`."""
        *files, index, groups = self.names()
        states = iter(self.states)
        for file in files:
            write_state(next(states), folder / file)  # one file's tensors at a time
        write_state(self.rest, folder / groups)
        _write_index(folder / index, {"total_size": self.total, "param_groups": groups}, self.keys, files)

    def write(self, path: Path) -> None:
        """Write the folder; a model in it stays."""
        _replace(path, self.names(), lambda folder: self.fill(folder, path), _is_optimizer)


@dataclass
class TrainingFolder:
    """A checkpoint of a series with a model, an optimizer and other state in one folder, published at once."""

    parts: list[ModelFolder | OptimizerFolder]
    values: dict[str, Any]
    then: Callable[[], None]

    def write(self, path: Path) -> None:
        """Write the folder, which must be new or a checkpoint; then call `then`."""

        def fill(folder: Path) -> None:
            for part in self.parts:
                part.fill(folder, path)
            write_state(self.values, folder / TRAINING)

        names = [TRAINING, *(name for part in self.parts for name in part.names())]
        _replace(path, names, fill, lambda name: True, only_checkpoints=True)
        self.then()


def write_staged(path: Path, _: None, files: Any) -> None:
    """Write a checkpoint of this module (`OneFile`, `ModelFolder`, ...) that another process has staged."""
    try:
        files.write(path)
    except Exception as error:
        raise_everywhere(error, f"the checkpoint {path} could not be written", alone=True)


def config_files(config: Any) -> dict[str, bytes]:
    """Return the configuration files of a model of transformers by name; none for other models."""
    if not hasattr(config, "save_pretrained"):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}


def _is_model(file: str) -> bool:
    """Return True if a file is a part or an index of a model, with any prefix."""
    return any(f"{name}-" in file or f"{name}." in file for name in ("pytorch_model", "model")) and file.endswith(
        (".bin", _SAFE, _INDEX)
    )


@dataclass
class AdapterFolder:
    """A folder with the files that `save(folder)` makes: adapters of peft, and their configuration."""

    save: Callable[[Path], None]

    def write(self, path: Path) -> None:
        """Write the folder. A model card of the user stays. Adapters with a name are in a folder of that name."""

        def fill(folder: Path) -> None:
            self.save(folder)
            try:
                check_names(path, [_CARD])
            except FileExistsError:
                (folder / _CARD).unlink(missing_ok=True)

        _replace(path, ["adapter_config.json"], fill, _is_adapter)


def _is_adapter(file: str) -> bool:
    """Return whether a file belongs to adapters."""
    return file.startswith("adapter_") or file == _CARD


def _is_optimizer(file: str) -> bool:
    """Return True if a file is a part or an index of an optimizer, with any prefix."""
    return "pytorch_optim" in file


def _named(name: str, prefix: str | None) -> str:
    return name if not prefix else f"{prefix}.{name}"


def _write_index(path: Path, metadata: dict[str, Any], keys: list[list[Any]], files: list[str]) -> None:
    """Write an index of files; `keys` has the names of each file's tensors."""
    weight_map = {str(key): file for part, file in zip(keys, files, strict=True) for key in part}
    with atomic_file(path, "w") as file:
        json.dump({"metadata": metadata, "weight_map": weight_map}, file, indent=2)


def _write_config(config: dict[str, bytes], folder: Path, target: Path) -> None:
    """Write configuration files to `folder`, except files of the user in `target` that have the same content."""
    for name, content in config.items():
        old = target / name
        if old.is_file() and old.read_bytes() == content:
            try:
                check_names(target, [name])
            except FileExistsError:
                continue
        (folder / name).write_bytes(content)


def _replace(
    path: Path,
    names: Iterable[str],
    fill: Callable[[Path], None],
    ours: Callable[[str], bool],
    only_checkpoints: bool = False,
) -> None:
    """Fill a new folder under a temporary name, and replace the old folder by it.

    Files of earlier saves that are `ours` are deleted. Everything else in the folder, such as an optimizer beside a
    model or a tokenizer, is carried over. A user's file with one of the `names` is an error.
    """
    make_folder(path.parent)
    prepare(path, names, only_checkpoints)
    with unfinished_folder(path) as temporary:
        fill(temporary)
        for file in temporary.rglob("*"):
            (sync_file if file.is_file() else sync_folder)(file)
        written = {file.name: size_and_checksum(file) for file in temporary.iterdir() if file.is_file()}
        publish(temporary, path, written, ours, only_checkpoints)


class Checkpoint:
    """A file or a snapshot of a folder, held open, so that the checked bytes are the bytes read later."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._closing = contextlib.ExitStack()
        self._file: IO[bytes] | None = None
        self._folder: Generation | None = None
        if path.is_file():
            self._file = self._closing.enter_context(opened(path))
        else:
            self._folder = self._closing.enter_context(Generation(path, hold=_is_part))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: Any) -> None:
        self._closing.close()

    def files_of_model(self) -> list[str]:
        """Check all bytes of the files of a model, and return their names."""
        if self._folder is None:
            return self._checked([self.path.name])
        index = self._index((_SAFE_MODEL, _MODEL))
        if index is not None:
            return self._checked(_files_in(self.path, index))
        names = [name for name in (_SAFE_MODEL, _MODEL) if name in self._folder.names][:1]
        if not names:
            raise FileNotFoundError(
                f"the folder {self.path} has neither an index of a model nor {_SAFE_MODEL} nor {_MODEL}"
            )
        return self._checked(names)

    def files_of_optimizer(self) -> list[str]:
        """Check all bytes of the files of an optimizer's state, and return their names."""
        if self._folder is None:
            return self._checked([self.path.name])
        index = self._index((_OPTIMIZER,))
        if index is None:
            raise FileNotFoundError(f"the folder {self.path} has no index of an optimizer, *{_OPTIMIZER}{_INDEX}")
        groups = index.get("metadata", {}).get("param_groups")
        return self._checked(_files_in(self.path, index, groups))

    def optimizer(self, files: list[str], threads: int) -> dict[str, Any]:
        """Return the optimizer's state from these files."""
        groups, *parts = self.parts(files, max(1, threads))
        if self._folder is None:
            return groups
        return {**groups, "state": {key: value for part in parts for key, value in part.items()}}

    def fingerprint(self, files: list[str]) -> int:
        """Return a checksum of the beginnings and ends of files, where the formats store checksums of the rest."""
        checksum = 0
        for name in files:
            with self._reading(name) as file:
                for start in (0, max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES)):
                    file.seek(start)
                    checksum = zlib.crc32(file.read(_TAIL_BYTES), checksum)
        return checksum

    def shapes(self, files: list[str]) -> dict[Any, torch.Size | None]:
        """Return the shapes of all tensors in the files by name; None for values that are not tensors."""
        shapes: dict[Any, torch.Size | None] = {}
        for name in files:
            with self._reading(name) as file:
                shapes.update(shapes_in(file, f"the checkpoint {self.path}: {name}"))
        return shapes

    def parts(self, files: list[str], threads: int) -> Iterator[Any]:
        """Yield the contents of the files in order, read by `threads` threads."""
        if threads == 1:
            yield from map(self._read, files)
            return
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            yield from pool.map(self._read, files)

    def _reading(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        return contextlib.nullcontext(self._file) if self._file is not None else self._generation().reading(name)

    def _generation(self) -> Generation:
        assert self._folder is not None
        return self._folder

    def _read(self, name: str) -> Any:
        with self._reading(name) as file:
            return read(file, f"the checkpoint {self.path}: {name}", map_location=HOST)

    def _checked(self, files: list[str]) -> list[str]:
        """Raise DamagedCheckpoint unless files have the manifest's checksums, or else the checksums in themselves."""
        listed = (self._folder.manifest if self._folder is not None else None) or {}
        for name in files:
            if name in listed:
                self._generation().check([name])
            else:
                with self._reading(name) as file:
                    check_file(file, f"the checkpoint {self.path if self._folder is None else self.path / name}")
        return files

    def _index(self, names: tuple[str, ...]) -> dict[str, Any] | None:
        """Return the index of a model or optimizer, preferably one that a save wrote; None if the folder has none."""
        folder = self._generation()
        listed = folder.manifest or {}
        candidates = [file for name in names for file in folder.names if file.endswith(f"{name}{_INDEX}")]
        for name in sorted(candidates, key=lambda file: file not in listed)[:1]:
            if name in listed:
                folder.check([name])
            damaged = f"the checkpoint {self.path} is damaged: {name}"
            try:
                with folder.reading(name) as opened_file:
                    index = json.loads(opened_file.read())
                files = _files_in(self.path, index)
            except (ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
                raise DamagedCheckpoint(f"{damaged} in it is no index: {type(error).__name__}: {error}") from error
            if name in listed and not set(files) <= set(listed):
                raise DamagedCheckpoint(f"{damaged} names files that the manifest does not list")
            return index
        return None


def _is_part(name: str) -> bool:
    """Return True if a file may be a part of a model or of an optimizer."""
    return name.endswith((".bin", _SAFE, _INDEX))


def _files_in(path: Path, index: Any, *others: Any) -> list[str]:
    """Return the files that an index names, each once; raise DamagedCheckpoint if one is outside its folder."""
    files = list(dict.fromkeys([*others, *index["weight_map"].values()]))
    for name in files:
        if not is_plain_name(name):
            raise DamagedCheckpoint(
                f"the checkpoint {path} is damaged: its index names the file {name!r}, which is not in the folder"
            )
    return files
