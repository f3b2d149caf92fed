"""Files of checkpoints: one file, or a folder in the layout of Hugging Face, each there whole or not at all.

model.safetensors.index.json               {"metadata": {"total_size": ...}, "weight_map": {name: file}}
model-00001-of-00002.safetensors           tensors by name; pytorch_model-00001-of-00002.bin without safetensors
pytorch_optim.bin.index.json               the same for the state of parameters, by their numbers
pytorch_optim_group.bin                    parameter groups, and the loss scale
pytorch_optim-00001.bin
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._atomic import atomic_file, make_folder, replacing, unfinished_folder
from ..ops._host import HOST
from ._files import load
from ._sharded import _publish, restore_backup, size_and_checksum

_MODEL, _SAFE_MODEL = "pytorch_model.bin", "model.safetensors"
_OPTIMIZER, _GROUPS = "pytorch_optim.bin", "pytorch_optim_group.bin"
_INDEX = ".index.json"
_SAFE = ".safetensors"


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("use_safetensors=True needs the package safetensors: pip install safetensors") from error
    return safetensors.torch


def write_file(path: Path, state: Any, use_safetensors: bool) -> None:
    """One file, of safetensors or of `torch.save`."""
    make_folder(path.parent)
    with replacing(path) as temporary:
        _put(temporary, state, use_safetensors)


def _put(path: Path, state: Any, use_safetensors: bool) -> None:
    if use_safetensors:
        _safetensors().save_file(_untied(state), path, metadata={"format": "pt"})
    else:
        torch.save(state, path)


def _untied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first name alone of each tensor that has several: the format has no two names for one tensor."""
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    found = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() == 0 or key not in seen:
            found[name] = tensor.contiguous()
        seen.add(key)
    return found


def write_model(
    path: Path, state: dict[str, Tensor], prefix: str | None, size: int, use_safetensors: bool, config: Any
) -> None:
    """A folder with a model, and with its configuration where it has one as those of transformers have."""
    name = _named(_SAFE_MODEL if use_safetensors else _MODEL, prefix)
    state = _untied(state) if use_safetensors else state
    parts = list(_parts(state, size))
    stem, ending = name.rsplit(".", 1)
    names = [f"{stem}-{number:05d}-of-{len(parts):05d}.{ending}" for number in range(1, len(parts) + 1)]
    total = sum(tensor.nbytes for tensor in state.values())
    weight_map = {key: file for part, file in zip(parts, names, strict=True) for key in part}

    def fill(folder: Path) -> None:
        for part, file in zip(parts, names, strict=True):
            _put(folder / file, part, use_safetensors)
        _write_index(folder / f"{name}{_INDEX}", {"total_size": total}, weight_map)
        if hasattr(config, "save_pretrained"):
            config.save_pretrained(folder)

    _replace(path, fill, _is_model)


def _is_model(file: str) -> bool:
    """Whether a file is a part of a model, whatever its prefix, or its index."""
    return any(f"{name}-" in file or f"{name}." in file for name in ("pytorch_model", "model")) and file.endswith(
        (".bin", _SAFE, _INDEX)
    )


def write_optimizer(path: Path, state: dict[str, Any], prefix: str | None, size: int) -> None:
    """A folder with an optimizer's state."""
    name, groups = _named(_OPTIMIZER, prefix), _named(_GROUPS, prefix)
    parts = list(_parts(state["state"], size))
    names = [f"{name[:-4]}-{number:05d}.bin" for number in range(1, len(parts) + 1)]
    weight_map = {str(key): file for part, file in zip(parts, names, strict=True) for key in part}
    total = sum(map(_bytes, state["state"].values()))

    def fill(folder: Path) -> None:
        for part, file in zip(parts, names, strict=True):
            torch.save(part, folder / file)
        torch.save({key: value for key, value in state.items() if key != "state"}, folder / groups)
        _write_index(folder / f"{name}{_INDEX}", {"total_size": total, "param_groups": groups}, weight_map)

    _replace(path, fill, lambda file: "pytorch_optim" in file)


def _named(name: str, prefix: str | None) -> str:
    return name if not prefix else f"{prefix}.{name}"


def _bytes(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_bytes, value.values()))
    return value.nbytes if isinstance(value, Tensor) else 0


def _parts(state: dict[Any, Any], size: int) -> Iterator[dict[Any, Any]]:
    """Pieces of at most `size` MB, or of one entry where that is larger; at least one."""
    part: dict[Any, Any] = {}
    filled = 0
    for key, value in state.items():
        if part and filled + _bytes(value) > size * 1024**2:
            yield part
            part, filled = {}, 0
        part[key] = value
        filled += _bytes(value)
    yield part


def _write_index(path: Path, metadata: dict[str, Any], weight_map: dict[str, str]) -> None:
    with atomic_file(path, "w") as file:
        json.dump({"metadata": metadata, "weight_map": weight_map}, file, indent=2)


def _replace(path: Path, fill: Callable[[Path], None], ours: Callable[[str], bool]) -> None:
    """Makes a folder anew under another name, and puts it in the place of the one that was there.

    What that had besides files that are `ours` (an optimizer beside a model, a tokenizer) is in the new one too.
    """
    restore_backup(path)
    make_folder(path.parent)
    with unfinished_folder(path) as temporary:
        for each in path.iterdir() if path.is_dir() else ():
            if each.is_dir():
                shutil.copytree(each, temporary / each.name, copy_function=_link)
            elif each.name != "manifest.json" and not ours(each.name):
                _link(each, temporary / each.name)
        fill(temporary)
        written = [file for file in temporary.iterdir() if file.is_file()]
        for file in written:
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
        _publish(temporary, path, {file.name: size_and_checksum(file) for file in written})


def _link(source: Any, target: Any) -> Any:
    """A second name for a file, or a copy where the disk has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def read_model(path: Path, one_by_one: bool, threads: int) -> Iterator[dict[str, Tensor]]:
    """Tensors by name, file by file: of a file, or of a folder with an index or with one file."""
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    if path.is_file():
        names = [path]
    else:
        index = _index_of(path, (_SAFE_MODEL, _MODEL))
        if index is not None:
            names = [path / file for file in dict.fromkeys(index["weight_map"].values())]
        else:
            names = [path / name for name in (_SAFE_MODEL, _MODEL) if (path / name).is_file()][:1]
    if not names:
        raise FileNotFoundError(f"the folder {path} has neither an index of a model nor {_SAFE_MODEL} nor {_MODEL}")
    return _read_all(names, 1 if one_by_one and threads == 1 else max(threads, 2))


def _read_all(names: Iterable[Path], threads: int) -> Iterator[Any]:
    if threads == 1:
        yield from map(_read, names)
        return
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        yield from pool.map(_read, names)


def _read(path: Path) -> Any:
    if path.name.endswith(_SAFE) or _has_header(path):
        return _safetensors().load_file(path)
    return load(path, map_location=HOST)


def _has_header(path: Path) -> bool:
    """Whether a file is of safetensors, whatever its name: it begins with a length and a brace."""
    with open(path, "rb") as file:
        return file.read(9)[8:] == b"{"


def _index_of(path: Path, names: tuple[str, ...]) -> dict[str, Any] | None:
    for name in names:
        for found in sorted(path.glob(f"*{name}{_INDEX}")):
            return json.loads(found.read_text())
    return None


def read_optimizer(path: Path, threads: int) -> dict[str, Any]:
    """What `write_optimizer` or `write_file` wrote."""
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    if path.is_file():
        return _read(path)
    index = _index_of(path, (_OPTIMIZER,))
    if index is None:
        raise FileNotFoundError(f"the folder {path} has no index of an optimizer, *{_OPTIMIZER}{_INDEX}")
    found = dict(_read(path / index["metadata"]["param_groups"]))
    found["state"] = {}
    for part in _read_all([path / file for file in dict.fromkeys(index["weight_map"].values())], max(1, threads)):
        found["state"].update(part)
    return found
