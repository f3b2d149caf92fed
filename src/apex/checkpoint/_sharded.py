"""A checkpoint that is a folder, in the format of `torch.distributed.checkpoint`: each process writes what it has."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .._atomic import atomic_file, make_folder, sync_folder, unfinished_folder
from .._failures import explained
from ._files import MANIFEST, DamagedCheckpoint, checksum_of, disk_error, verify
from ._ranks import from_first, is_connected, is_first, raise_everywhere, this_rank

if TYPE_CHECKING:
    from ._reading import Reader

# How often a folder is moved away for a new one before others that do the same are given way to.
_TRIES = 100


def save_sharded(state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes `state` to a folder that all processes see; called in all of them, and returns when it is there.

    Each writes its part of sharded tensors. The folder is written under another name, with the lengths and checksums
    of its files, and renamed when all is on the disk.
    """
    from torch.distributed import checkpoint

    from ._split import SavePlanner

    path = Path(path)
    failed = f"the checkpoint {path} could not be written"
    # Rank 0 holds the folder, and removes it if anything fails.
    with contextlib.ExitStack() as held:
        temporary: Path | None = None
        with raising_everywhere(failed):
            if is_first():
                restore_backup(path)
                make_folder(path.parent)
                temporary = held.enter_context(unfinished_folder(path))
        temporary = Path(from_first(temporary))
        facts: dict[str, tuple[int, int]] = {}
        with raising_everywhere(failed, temporary), _without_warning_of_one_process():
            checkpoint.save(state, checkpoint_id=temporary, planner=SavePlanner())
            facts = {
                name: size_and_checksum(temporary / name)
                for name in _names(temporary)
                if _writer_of(name) == this_rank()
            }
        everything = [facts]
        if is_connected():
            everything = [{}] * dist.get_world_size()
            with explained("gathering what all ranks have written"):
                dist.all_gather_object(everything, facts)
        with raising_everywhere(failed):
            if is_first():
                _publish(temporary, path, {name: fact for each in everything for name, fact in each.items()})


def load_sharded(state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Fills the tensors of `state` from a folder of `save_sharded`, whatever number of processes wrote it.

    Called in all processes. Before anything is changed it raises, in all, `FileNotFoundError` if there is none, and
    `DamagedCheckpoint` if it is not whole, or its metadata holds anything but that. Nothing in it is run: values that
    are no tensors may be what `torch.load` takes with `weights_only=True`. It raises a RuntimeError when it meets
    anything else, or if `state` does not fit; part of `state` may have been filled then.
    """
    fill(state, checked(path))


def checked(path: str | os.PathLike[str]) -> Reader:
    """What reads a checkpoint, after all of it was checked; raises in all processes as `load_sharded` says."""
    from ._reading import Reader, check_metadata

    failure: tuple[type[Exception], str] | None = None
    path = Path(path)
    if is_first():
        try:
            path = path_or_backup(path)
            verify(path)
            check_metadata(path)
        except FileNotFoundError as error:
            failure = FileNotFoundError, str(error)
        except (DamagedCheckpoint, OSError) as error:
            failure = DamagedCheckpoint, str(error)
    failure, path = from_first((failure, path))
    if failure is not None:
        kind, reason = failure
        raise kind(reason)
    with raising_everywhere(f"the checkpoint {path} could not be loaded"):
        return Reader(Path(path))


def fill(state: dict[str, Any], reader: Reader) -> None:
    """Reads what `state` names; called in all processes."""
    from torch.distributed import checkpoint

    from ._reading import Planner

    with raising_everywhere(f"the checkpoint {reader.path} could not be loaded"), _without_warning_of_one_process():
        checkpoint.load(state, storage_reader=reader, planner=Planner())


@contextlib.contextmanager
def raising_everywhere(what: str, written_to: Path | None = None) -> Iterator[None]:
    """Raises in all processes what goes wrong inside in any of them."""
    from torch.distributed.checkpoint.api import CheckpointException

    failure: BaseException | None = None
    try:
        yield
    except CheckpointException as error:  # of all ranks, and no Exception: it would end a loop that goes on after one
        failure = error.failures[this_rank()][0] if this_rank() in error.failures else None
    except Exception as error:
        failure = error
    if written_to is not None and isinstance(failure, RuntimeError):
        failure = disk_error(written_to) or failure
    raise_everywhere(failure, what)


@contextlib.contextmanager
def _without_warning_of_one_process() -> Iterator[None]:
    """PyTorch warns a process that saves alone."""
    with warnings.catch_warnings():
        if not is_connected():
            warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        yield


def size_and_checksum(path: Path) -> tuple[int, int]:
    """Length and checksum of a file."""
    return path.stat().st_size, checksum_of(path)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def _writer_of(name: str) -> int:
    """Files are called __RANK_NUMBER.distcp; that of all, .metadata, is rank 0's."""
    parts = name.split("_")
    return int(parts[2]) if name.startswith("__") and parts[2].isdigit() else 0


def backup_of(path: Path) -> Path:
    """Where the folder at `path` is moved while a new one takes its place."""
    return path.with_name(f".{path.name}.replaced")


def path_or_backup(path: Path) -> Path:
    """The folder, or its backup where a process was killed before the new folder was in place."""
    before = backup_of(path)
    return before if not path.exists() and before.exists() else path


def restore_backup(path: Path) -> None:
    """Cleans up after a process that was killed: its backup becomes `path`, or is removed if there is a `path`."""
    before = backup_of(path)
    if path.exists():
        shutil.rmtree(before, ignore_errors=True)
    elif before.exists():
        with contextlib.suppress(OSError):  # another thread is about to put a new one there
            os.rename(before, path)


def _publish(temporary: Path, path: Path, manifest: dict[str, tuple[int, int]]) -> None:
    with atomic_file(temporary / MANIFEST, "w") as file:
        json.dump(manifest, file)
    sync_folder(temporary)
    replaced = backup_of(path)
    for _ in range(_TRIES):
        try:
            os.rename(temporary, path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                restore_backup(path)
                raise
        else:
            break
        # A folder with something in it cannot be renamed to. Others may do the same at the same time.
        shutil.rmtree(replaced, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rename(path, replaced)
    else:
        raise OSError(errno.EEXIST, f"{path} could not be moved to {replaced} for the new one")
    shutil.rmtree(replaced, ignore_errors=True)
    sync_folder(path.parent)
