"""Reading a folder of `torch.distributed.checkpoint` without running anything that is in it.

Its file `.metadata` is a pickle, and so is every value in it that is no tensor. PyTorch reads both with the unpickler
that calls whatever they name.
"""

from __future__ import annotations

import io
import json
import pathlib
import pickle
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, filesystem, metadata

from ._files import MANIFEST, METADATA, DamagedCheckpoint
from ._split import Split

_CLASSES: tuple[type, ...] = (
    filesystem._StorageInfo,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    metadata._MEM_FORMAT_ENCODING,
)
# What metadata may name: records, which call nothing, and plain values of PyTorch. Python has moved its paths.
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(each.__module__, each.__name__): each for each in _CLASSES},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **{
        (module, name): pathlib.PurePath
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")
    },
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}


class _Unpickler(pickle._Unpickler):  # type: ignore[misc, name-defined]
    """Python's in Python: the one in C would let a pickle set attributes of the classes that it names."""

    def load_build(self) -> None:
        target = self.stack[-2]  # type: ignore[attr-defined]
        if type(target) not in _CLASSES:
            raise pickle.UnpicklingError(f"{METADATA} may not set attributes of {target!r}")
        super().load_build()  # type: ignore[misc]

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}  # type: ignore[attr-defined]

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is nothing that {METADATA} may name") from None


def check_metadata(path: pathlib.Path) -> None:
    """Raises `DamagedCheckpoint` unless the metadata of a folder is such, and of files that its manifest lists."""
    try:
        found = metadata_of(path)
        listed = json.loads((path / MANIFEST).read_text())
        others = {info.relative_path for info in found.storage_data.values()} - set(listed)
    except Exception as error:  # a pickle can fail in any way
        reason = f"{type(error).__name__}: {error}"
    else:
        if not others:
            return
        reason = f"{METADATA} names files that {MANIFEST} does not list: {sorted(map(str, others))[:3]}"
    raise DamagedCheckpoint(f"the checkpoint {path} is damaged: {reason}")


def metadata_of(path: pathlib.Path) -> metadata.Metadata:
    """What a folder holds, by name."""
    with open(path / METADATA, "rb") as file:
        found = _Unpickler(file).load()
    if not isinstance(found, metadata.Metadata):
        raise pickle.UnpicklingError(f"{METADATA} holds a {type(found).__name__}")
    return found


class Reader(FileSystemReader):
    """PyTorch's, with the metadata read as above, once."""

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__(path)
        self.found = metadata_of(path)

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        if getattr(self.found, "storage_meta", None) is None:
            self.found.storage_meta = metadata.StorageMeta()
        self.found.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
        return self.found


class Planner(DefaultLoadPlanner):
    """PyTorch's, which is given values that are no tensors only after they were read without running anything.

    It reads the boxes of a `Split`, too.
    """

    def set_up_planner(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        # PyTorch puts None in the place of what it does not know.
        splits = {key: state_dict.pop(key) for key, value in list(state_dict.items()) if isinstance(value, Split)}
        super().set_up_planner(state_dict, *args, **kwargs)
        state_dict.update(splits)
        self.state_dict.update(splits)

    def lookup_tensor(self, index: metadata.MetadataIndex) -> torch.Tensor:
        found = self.state_dict[index.fqn]
        return found.to_read(index) if isinstance(found, Split) else super().lookup_tensor(index)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        plain = torch.load(value, weights_only=True)
        ours = io.BytesIO()
        torch.save(plain, ours)
        ours.seek(0)
        super().load_bytes(read_item, ours)
