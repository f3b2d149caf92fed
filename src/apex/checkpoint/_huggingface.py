"""Checkpoints in one file, or in a folder in the layout of Hugging Face, written atomically.

model.safetensors.index.json               {"metadata": {"total_size": ...}, "weight_map": {name: file}}
model-00001-of-00002.safetensors           tensors by name; pytorch_model-00001-of-00002.bin without safetensors
pytorch_optim.bin.index.json               index of the optimizer state, by parameter number
pytorch_optim_group.bin                    parameter groups, and the loss scale
pytorch_optim-00001.bin
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import filecmp
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from .._atomic import atomic_file, make_folder, replacing, sync_file, sync_folder, unfinished_folder
from ..ops._host import HOST
from ._damage import DamagedCheckpoint
from ._files import check_file, opened, read, shapes_in, write_state
from ._folders import Generation, check_names, is_plain_name, prepare, publish, size_and_checksum
from ._safetensors import ENDING as _SAFE

_MODEL, _SAFE_MODEL = "pytorch_model.bin", "model.safetensors"
_OPTIMIZER, _GROUPS = "pytorch_optim.bin", "pytorch_optim_group.bin"
_INDEX, _CARD = ".index.json", "README.md"
# Length of the end of a file that holds the archive's directory: about 100 bytes for each tensor.
_TAIL_BYTES = 1 << 18


def write_file(path: Path, state: Any, use_safetensors: bool) -> None:
    """Write one file, in the format of safetensors or of `torch.save`."""
    make_folder(path.parent)
    with replacing(path) as temporary:
        write_state(state, temporary, use_safetensors)


def write_model(
    path: Path,
    keys: list[list[str]],
    states: Iterator[dict[str, Tensor]],
    total: int,
    prefix: str | None,
    use_safetensors: bool,
    config: Any,
) -> None:
    """Write a folder with a model, and with its configuration if it has `save_pretrained`, as in transformers.

    `states` yields the tensors of one file after the other, whose names are `keys`, and whose size is `total` bytes.
    """
    name = _named(_SAFE_MODEL if use_safetensors else _MODEL, prefix)
    stem, ending = name.rsplit(".", 1)
    names = [f"{stem}-{number:05d}-of-{len(keys):05d}.{ending}" for number in range(1, len(keys) + 1)]
    weight_map = {key: file for part, file in zip(keys, names, strict=True) for key in part}

    def fill(folder: Path) -> None:
        for file in names:
            write_state(next(states), folder / file, use_safetensors)
        _write_index(folder / f"{name}{_INDEX}", {"total_size": total}, weight_map)
        if hasattr(config, "save_pretrained"):
            _write_config(config, folder, path)

    _replace(path, [*names, f"{name}{_INDEX}"], fill, _is_model)


def _is_model(file: str) -> bool:
    """Return True if a file is a part or an index of a model, with any prefix."""
    return any(f"{name}-" in file or f"{name}." in file for name in ("pytorch_model", "model")) and file.endswith(
        (".bin", _SAFE, _INDEX)
    )


def write_optimizer(
    path: Path,
    keys: list[list[int]],
    states: Iterator[dict[int, Any]],
    total: int,
    prefix: str | None,
    rest: dict[str, Any],
) -> None:
    """Write a folder with an optimizer's state: its tensors as in `write_model`, and the `rest` in a file of groups."""
    name, groups = _named(_OPTIMIZER, prefix), _named(_GROUPS, prefix)
    names = [f"{name[:-4]}-{number:05d}.bin" for number in range(1, len(keys) + 1)]
    weight_map = {str(key): file for part, file in zip(keys, names, strict=True) for key in part}

    def fill(folder: Path) -> None:
        for file in names:
            write_state(next(states), folder / file)
        write_state(rest, folder / groups)
        _write_index(folder / f"{name}{_INDEX}", {"total_size": total, "param_groups": groups}, weight_map)

    _replace(path, [*names, groups, f"{name}{_INDEX}"], fill, _is_optimizer)


def write_adapters(path: Path, save: Callable[[Path], None]) -> None:
    """Write a folder with the files that `save(folder)` makes: adapters of peft, and their configuration.

    A model card of the user stays, which adapters do not need. Adapters with a name are in a folder of that name.
    """

    def fill(folder: Path) -> None:
        save(folder)
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


def _write_index(path: Path, metadata: dict[str, Any], weight_map: dict[str, str]) -> None:
    with atomic_file(path, "w") as file:
        json.dump({"metadata": metadata, "weight_map": weight_map}, file, indent=2)


def _write_config(config: Any, folder: Path, target: Path) -> None:
    """Write a model's configuration to `folder`, without files that `target` already has with the same content."""
    old_names = {file.name for file in folder.iterdir()}
    config.save_pretrained(folder)
    for file in list(folder.iterdir()):
        old = target / file.name
        if file.name not in old_names and old.is_file() and filecmp.cmp(file, old, shallow=False):
            with contextlib.suppress(FileExistsError):
                check_names(target, [file.name])
                continue
            file.unlink()


def _replace(path: Path, names: Iterable[str], fill: Callable[[Path], None], ours: Callable[[str], bool]) -> None:
    """Fill a new folder under a temporary name, and replace the old folder by it.

    Files of earlier saves that are `ours` are deleted. Everything else in the folder, such as an optimizer beside a
    model or a tokenizer, is carried over. A user's file with one of the `names` is an error.
    """
    make_folder(path.parent)
    prepare(path, names)
    with unfinished_folder(path) as temporary:
        fill(temporary)
        for file in temporary.rglob("*"):
            (sync_file if file.is_file() else sync_folder)(file)
        written = {file.name: size_and_checksum(file) for file in temporary.iterdir() if file.is_file()}
        publish(temporary, path, written, ours)


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
        """Raise DamagedCheckpoint unless files are intact, by the manifest or, if it lacks them, by themselves."""
        listed = (self._folder.manifest if self._folder is not None else None) or {}
        for name in files:
            if name in listed:
                self._generation().check([name])
            else:
                with self._reading(name) as file:
                    check_file(file, f"the checkpoint {self.path if self._folder is None else self.path / name}")
        return files

    def _index(self, names: tuple[str, ...]) -> dict[str, Any] | None:
        """Return the index of a model or optimizer, preferably the one that a save wrote, or None if there is none."""
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
