"""Reading of `torch.distributed.checkpoint` folders without executing anything that they contain.

The file `.metadata` is a pickle, and so is every saved value that is not a tensor. PyTorch reads both with an unpickler
that calls whatever they name.
"""

from __future__ import annotations

import contextlib
import io
import pathlib
import pickle
from collections.abc import Iterator
from typing import IO, Any, ClassVar

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan, filesystem, metadata
from torch.distributed.checkpoint.planner import LoadItemType

from ._damage import DamagedCheckpoint
from ._folders import MANIFEST, METADATA, Generation
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
# Objects that metadata may name: records, which call nothing, and plain values of PyTorch. Python moved its path
# classes.
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(record.__module__, record.__name__): record for record in _CLASSES},
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
    """Python's pure-Python unpickler: the C version would let a pickle set attributes of the classes that it names."""

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


def checked_metadata(generation: Generation) -> metadata.Metadata:
    """Return the metadata of a folder.

    Raises `DamagedCheckpoint` unless the metadata has only permitted objects and only names files that the manifest
    lists.
    """
    listed = generation.manifest or {}
    if listed and METADATA not in listed:
        raise ValueError(
            f"{generation.path} is no checkpoint of save_sharded: its {MANIFEST} lists no {METADATA}; the Booster's "
            "are read by its load_model, load_optimizer and resume_latest"
        )
    others: set[Any] = {METADATA} - set(listed)
    try:
        if not others:
            content = metadata_of(generation)
            others = {info.relative_path for info in content.storage_data.values()} - set(listed)
    except Exception as error:  # a pickle can fail in any way
        reason = f"{type(error).__name__}: {error}"
    else:
        if not others:
            return content
        reason = f"{METADATA} names files that {MANIFEST} does not list: {sorted(map(str, others))[:3]}"
    raise DamagedCheckpoint(f"the checkpoint {generation.path} is damaged: {reason}")


def metadata_of(generation: Generation) -> metadata.Metadata:
    """Return the metadata of a folder."""
    with generation.reading(METADATA) as file:
        contents = _Unpickler(file).load()
    if not isinstance(contents, metadata.Metadata):
        raise pickle.UnpicklingError(f"{METADATA} holds a {type(contents).__name__}")
    return contents


class Reader(FileSystemReader):
    """PyTorch's reader for the files of one `Generation`; the metadata is read once, by the restricted unpickler."""

    def __init__(self, generation: Generation, contents: metadata.Metadata | None = None) -> None:
        super().__init__(generation.folder)
        self.generation = generation
        self.contents = contents or metadata_of(generation)
        self.fs = _Files(generation)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: Any) -> None:
        self.generation.close()

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        if getattr(self.contents, "storage_meta", None) is None:
            self.contents.storage_meta = metadata.StorageMeta()
        self.contents.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
        return self.contents

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Open the needed files, and check values that are not tensors.

        All processes do this before any of them changes a tensor, and raise together.
        """
        locations = [(item, self.storage_data[item.storage_index]) for item in plan.items]
        self.generation.hold(location.relative_path for _, location in locations)
        for item, location in locations:
            if item.type == LoadItemType.BYTE_IO and not getattr(location, "transform_descriptors", None):
                with self.generation.reading(location.relative_path) as file:
                    file.seek(location.offset)
                    torch.load(io.BytesIO(file.read(location.length)), weights_only=True)
        return super().prepare_local_plan(plan)


class _Files(filesystem.FileSystem):
    """Access to the files of a generation, instead of PyTorch's access by path."""

    def __init__(self, generation: Generation) -> None:
        super().__init__()
        self._generation = generation

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[IO[bytes]]:  # type: ignore[override]
        with self._generation.reading(pathlib.Path(path).name) as file:
            yield file


class Planner(DefaultLoadPlanner):
    """PyTorch's load planner; it only gets values that are not tensors after they were read safely.

    It also reads the boxes of a `Split`.
    """

    def set_up_planner(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        # PyTorch replaces values of unknown types by None.
        splits = {key: state_dict.pop(key) for key, value in list(state_dict.items()) if isinstance(value, Split)}
        super().set_up_planner(state_dict, *args, **kwargs)
        state_dict.update(splits)
        self.state_dict.update(splits)

    def create_local_plan(self) -> LoadPlan:
        saved = self.metadata.state_dict_metadata if self.metadata is not None else {}
        for name, value in self.state_dict.items():
            entry = saved.get(name)
            if isinstance(value, torch.Tensor) and isinstance(entry, metadata.TensorStorageMetadata):
                before = entry.properties.dtype
                if not torch.can_cast(before, value.dtype):
                    raise ValueError(f"{name} is {before} in it, which {value.dtype} cannot hold")
        return super().create_local_plan()

    def lookup_tensor(self, index: metadata.MetadataIndex) -> torch.Tensor:
        value = self.state_dict[index.fqn]
        return value.to_read(index) if isinstance(value, Split) else super().lookup_tensor(index)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        plain = torch.load(value, weights_only=True)
        safe = io.BytesIO()
        torch.save(plain, safe)
        safe.seek(0)
        super().load_bytes(read_item, safe)
