"""A checkpoint that is a folder, in the format of `torch.distributed.checkpoint`: each process writes what it has."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .._atomic import make_folder, sync_file, unfinished_folder
from .._failures import explained
from ._damage import DamagedCheckpoint
from ._files import disk_error
from ._folders import METADATA, Generation, prepare, publish, size_and_checksum
from ._ranks import from_first, is_connected, is_first, raise_everywhere, this_rank

if TYPE_CHECKING:
    from ._reading import Reader


def save_sharded(state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes `state` to a folder that all processes see; called in all of them, and returns when it is there.

    Each writes its part of sharded tensors. The folder is written under another name, with the lengths and checksums
    of its files, and renamed when all is on the disk. An older checkpoint at `path` is replaced; files in it that no
    save wrote stay. A folder with files that is no checkpoint raises FileExistsError.
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
                make_folder(path.parent)
                prepare(path, [METADATA, f"__{this_rank()}_0.distcp"], only_checkpoints=True)
                temporary = held.enter_context(unfinished_folder(path))
        temporary = Path(from_first(temporary))
        facts: dict[str, tuple[int, int]] = {}
        with raising_everywhere(failed, temporary), _without_warning_of_one_process():
            checkpoint.save(state, checkpoint_id=temporary, planner=SavePlanner())
            if is_first():  # PyTorch flushes this file while its bytes are still in a buffer of Python's
                sync_file(temporary / METADATA)
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
                written = {name: fact for each in everything for name, fact in each.items()}
                publish(temporary, path, written, _is_part, only_checkpoints=True)


def load_sharded(state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Fills the tensors of `state` from a folder of `save_sharded`, whatever number of processes wrote it.

    Called in all processes. Before anything is changed it raises, in all, `FileNotFoundError` if there is none, and
    `DamagedCheckpoint` if it is not whole, or its metadata holds anything but that. Nothing in it is run: values that
    are no tensors may be what `torch.load` takes with `weights_only=True`. It raises a RuntimeError if there is
    anything else, or if `state` does not fit, before `state` is changed.
    """
    with open_checked(path) as reader:
        fill(state, reader)


def open_checked(path: str | os.PathLike[str]) -> Reader:
    """Return what reads a checkpoint, after all of it was checked; raise in all processes as `load_sharded` says.

    Rank 0 holds the files of the folder open. Other ranks open those that they need before any rank changes a tensor,
    and raise an error if the folder is no longer the one that rank 0 has checked.
    """
    from ._reading import Reader, checked_metadata

    failure: tuple[type[Exception], str] | None = None
    generation: Generation | None = None
    folder, manifest = Path(path), None
    if is_first():
        try:
            generation = Generation(folder)
            generation.check()
            checked_metadata(generation)
            manifest = generation.manifest
        except FileNotFoundError as error:
            failure = FileNotFoundError, str(error)
        except (DamagedCheckpoint, OSError) as error:
            failure = DamagedCheckpoint, str(error)
    failure, folder, manifest = from_first((failure, folder, manifest))
    if failure is not None:
        kind, reason = failure
        raise kind(reason)
    with raising_everywhere(f"the checkpoint {folder} could not be loaded"):
        generation = generation or Generation(folder, hold=lambda name: False)
        if generation.manifest != manifest:
            raise RuntimeError(f"the checkpoint {folder} was replaced while it was read; load it again")
        return Reader(generation)


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


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def _writer_of(name: str) -> int:
    """Files are called __RANK_NUMBER.distcp; that of all, .metadata, is rank 0's."""
    parts = name.split("_")
    return int(parts[2]) if name.startswith("__") and parts[2].isdigit() else 0


def _is_part(name: str) -> bool:
    """Return whether a file of this name is part of a sharded checkpoint."""
    return name == METADATA or (name.startswith("__") and name.endswith(".distcp"))
