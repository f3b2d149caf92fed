"""A checkpoint that is a folder, in the format of `torch.distributed.checkpoint`: each process writes what it has."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .._atomic import atomic_file, make_folder, sync_folder, temporary_beside
from .._failures import explained
from ._files import MANIFEST, DamagedCheckpoint, checksum_of, verify
from ._ranks import from_first, is_connected, is_first, raise_everywhere


def save_sharded(state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes `state` to a folder that all processes see; called in all of them, and returns when it is there.

    Each writes its part of sharded tensors. The folder is written under another name, with the lengths and checksums
    of its files, and renamed when all is on the disk.
    """
    from torch.distributed import checkpoint

    path = Path(path)
    temporary = temporary_beside(path)
    _on_first(lambda: _begin(temporary, path), f"the checkpoint {path} could not be begun")
    failure: Exception | None = None
    facts: dict[str, tuple[int, int]] = {}
    try:
        with _quiet_alone():
            checkpoint.save(state, checkpoint_id=temporary)
        rank = dist.get_rank() if is_connected() else 0
        facts = {name: facts_of(temporary / name) for name in _names(temporary) if _writer_of(name) == rank}
    except Exception as error:
        failure = error
    raise_everywhere(failure, f"the checkpoint {path} could not be written")
    everything = [facts]
    if is_connected():
        everything = [{}] * dist.get_world_size()
        with explained("gathering what all ranks have written"):
            dist.all_gather_object(everything, facts)
    manifest = {name: fact for each in everything for name, fact in each.items()}
    _on_first(lambda: _publish(temporary, path, manifest), f"the checkpoint {path} could not be finished")


def load_sharded(state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Fills the tensors of `state` from a folder of `save_sharded`, whatever number of processes wrote it.

    Called in all processes. Before anything is changed it raises, in all, `DamagedCheckpoint` if the checkpoint is not
    whole, `FileNotFoundError` if there is none.
    """
    from torch.distributed import checkpoint

    failure: tuple[type[Exception], str] | None = None
    path = Path(path)
    if is_first():
        try:
            path = standing(path)
            verify(path)
        except FileNotFoundError as error:
            failure = FileNotFoundError, str(error)
        except (DamagedCheckpoint, OSError) as error:
            failure = DamagedCheckpoint, str(error)
    failure, path = from_first((failure, path))
    if failure is not None:
        kind, reason = failure
        raise kind(reason)
    with _quiet_alone():
        checkpoint.load(state, checkpoint_id=path)


@contextlib.contextmanager
def _quiet_alone() -> Iterator[None]:
    """PyTorch warns a process that saves alone."""
    with warnings.catch_warnings():
        if not is_connected():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def facts_of(path: Path) -> tuple[int, int]:
    """Length and checksum."""
    return path.stat().st_size, checksum_of(path)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def _writer_of(name: str) -> int:
    """Files are called __RANK_NUMBER.distcp; that of all, .metadata, is rank 0's."""
    parts = name.split("_")
    return int(parts[2]) if name.startswith("__") and parts[2].isdigit() else 0


def _on_first(action: Any, what: str) -> None:
    failure: Exception | None = None
    if is_first():
        try:
            action()
        except Exception as error:
            failure = error
    raise_everywhere(failure, what)


def replaced_by(path: Path) -> Path:
    """Where the folder that was `path` waits for the one that takes its place."""
    return temporary_beside(path.with_name(path.name + ".replaced"))


def standing(path: Path) -> Path:
    """The folder, or the one before it where a process was killed when it had moved that away for the new one."""
    before = replaced_by(path)
    return before if not path.exists() and before.exists() else path


def _begin(temporary: Path, path: Path) -> None:
    """An unfinished checkpoint of that name was left by processes that are gone."""
    if (found := standing(path)) != path:
        os.rename(found, path)
    shutil.rmtree(temporary, ignore_errors=True)
    make_folder(path.parent)
    temporary.mkdir()


def _publish(temporary: Path, path: Path, manifest: dict[str, tuple[int, int]]) -> None:
    with atomic_file(temporary / MANIFEST, "w") as file:
        json.dump(manifest, file)
    sync_folder(temporary)
    if path.exists():  # a folder with something in it cannot be renamed to
        replaced = replaced_by(path)
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(path, replaced)
        try:
            os.rename(temporary, path)
        except OSError:
            os.rename(replaced, path)
            raise
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        os.rename(temporary, path)
    sync_folder(path.parent)
