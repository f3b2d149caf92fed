"""Checkpoints in a folder in the format of `torch.distributed.checkpoint`: each process writes its own part."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from .._atomic import make_folder, sync_file, unfinished_folder
from .._distributed.collectives import gather_objects
from ._background import check_options, submit, wait
from ._damage import DamagedCheckpoint
from ._files import disk_error
from ._folders import METADATA, Generation, prepare, publish, size_and_checksum
from ._ranks import from_first, is_connected, is_first, raise_everywhere, this_rank

if TYPE_CHECKING:
    from ._reading import Reader

# The function that writer processes call. Importing its module imports `torch.distributed.checkpoint`.
_WRITE_STAGED = "apex.checkpoint._staged:write_staged"


def save_sharded(
    state: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    use_async: bool = False,
    staging: Literal["host", "device"] = "host",
    if_busy: Literal["wait", "raise"] = "wait",
) -> None:
    """Write `state` to a folder on a shared disk; all processes call it, and it returns when the folder is complete.

    Each process writes its part of sharded tensors. The folder is written under a temporary name, with a manifest of
    lengths and checksums, and renamed when everything is on the disk. An older checkpoint at `path` is replaced; files
    in it that no save wrote stay. A folder with files that is not a checkpoint raises FileExistsError.

    With `use_async` the call returns when copies of the tensors have been started; a background process writes them.
    Device tensors are copied to pinned host memory on a side stream:

    - `staging="host"`: at once. The next optimizer step, or replay of a captured step, waits on the device until they
      are copied; nothing else may change tensors of more than 1 MB before it.
    - `staging="device"`: from a clone on the device, which needs as much device memory as the state until it is copied.
      The training may change everything at once.

    At most one save is in flight: the next one waits for it, or raises `SaveInProgress` with `if_busy="raise"`. Its
    error is raised by the next save or load, or by `wait`. If nothing waits for it, the process ends with status 1.
    """
    start_save(state, Path(path), use_async, staging, if_busy)


def start_save(
    state: dict[str, Any],
    path: Path,
    use_async: bool,
    staging: str = "host",
    if_busy: str = "wait",
    then: Callable[[], None] | None = None,
) -> None:
    """Save as `save_sharded` does; after a success rank 0 calls `then`, which must be picklable for `use_async`."""
    from ._split import SavePlanner

    check_options(staging, if_busy)
    check_state(state)
    if not use_async:
        wait()
        write(path, state, SavePlanner(), then)
        return

    def prepare() -> tuple[Any, Any]:
        planner = SavePlanner()
        values = {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in state.items()}
        planner.set_up_planner(values, is_coordinator=is_first())
        plan = planner.create_local_plan()
        data = [planner.resolve_data(item) for item in plan.items]
        # The planner returns values that are not tensors as BytesIO.
        return (plan, then), [value.getvalue() if isinstance(value, io.BytesIO) else value for value in data]

    path = path.absolute()  # the writer process keeps the working directory of its start
    submit(_WRITE_STAGED, path, prepare, staging, if_busy)


def check_state(state: Any) -> None:
    """Raise TypeError unless `state` is a dict."""
    if not isinstance(state, Mapping):
        raise TypeError(f'state must be a dict, such as {{"model": model.state_dict()}}, not a {type(state).__name__}')


def write(path: Path, state: dict[str, Any], planner: Any, then: Callable[[], None] | None = None) -> None:
    """Write a checkpoint and publish it; all processes call it, and return when it is complete."""
    from torch.distributed import checkpoint

    failed = f"the checkpoint {path} could not be written"
    # Rank 0 owns the folder, and removes it if anything fails.
    with contextlib.ExitStack() as stack:
        temporary: Path | None = None
        with raising_everywhere(failed):
            if is_first():
                make_folder(path.parent)
                prepare(path, [METADATA, f"__{this_rank()}_0.distcp"], only_checkpoints=True)
                temporary = stack.enter_context(unfinished_folder(path))
        temporary = Path(from_first(temporary))
        checksums: dict[str, tuple[int, int]] = {}
        with raising_everywhere(failed, temporary), _without_warning_of_one_process():
            checkpoint.save(state, checkpoint_id=temporary, planner=planner)
            if is_first():  # PyTorch flushes this file while its bytes are still in a buffer of Python's
                sync_file(temporary / METADATA)
            checksums = {
                name: size_and_checksum(temporary / name)
                for name in _names(temporary)
                if _writer_of(name) == this_rank()
            }
        checksums_by_rank = gather_objects(checksums, "gathering what all ranks have written")
        with raising_everywhere(failed):
            if is_first():
                written = {
                    name: checksum for rank_checksums in checksums_by_rank for name, checksum in rank_checksums.items()
                }
                publish(temporary, path, written, _is_part, only_checkpoints=True)
                if then is not None:
                    then()


def load_sharded(state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Fill the tensors of `state` from a folder of `save_sharded`, written by any number of processes.

    All processes call it. All of them raise `FileNotFoundError` if the folder is missing, and `DamagedCheckpoint` if it
    is damaged or its metadata has any other content. Nothing in it is executed: values that are not tensors
    must be readable by `torch.load(weights_only=True)`. Raises a RuntimeError if they are not, or if `state` does not
    fit: other shapes, an integer tensor for floating-point numbers, or an optimizer that has no state to read the
    saved state into. All errors come before `state` is changed.
    """
    check_state(state)
    with open_checked(path) as reader:
        with raising_everywhere(f"the checkpoint {reader.path} could not be loaded"):
            _refuse_new_optimizers(state, set(reader.contents.state_dict_metadata))
        fill(state, reader)


def _refuse_new_optimizers(state: Mapping[Any, Any], saved: set[str], path: str = "") -> None:
    """Raise a ValueError if an optimizer in `state` has no state, and the one in the checkpoint has.

    PyTorch reads the entries that `state` names, so that the optimizer would go on without its moments.
    """
    for key, value in state.items():
        content = value.state_dict() if isinstance(value, torch.optim.Optimizer) else value
        if not isinstance(content, Mapping):
            continue
        name, own = f"{path}{key}", content.get("state")
        is_new = "param_groups" in content and isinstance(own, Mapping) and not own
        if is_new and any(entry.startswith(f"{name}.state.") for entry in saved):
            raise ValueError(
                f"the optimizer {name!r} has taken no step, so it has no state to read the saved state into. Save and "
                "load get_optimizer_state_dict(model, optimizer) of torch.distributed.checkpoint.state_dict, which "
                "makes it, or take a step with gradients of zero first"
            )
        _refuse_new_optimizers(content, saved, f"{name}.")


def open_checked(path: str | os.PathLike[str]) -> Reader:
    """Check a checkpoint completely and return a reader of it; raise in all processes as `load_sharded` says.

    Rank 0 holds the files of the folder open. Other ranks open the files that they need before any rank changes a
    tensor, and raise an error if the folder is no longer the one that rank 0 has checked.
    """
    from ._reading import Reader, checked_metadata

    wait()
    failure: tuple[type[Exception], str] | None = None
    generation: Generation | None = None
    folder, manifest, contents = Path(path), None, None
    if is_first():
        try:
            generation = Generation(folder)
            generation.check()
            contents = checked_metadata(generation)
            manifest = generation.manifest
        except FileNotFoundError as error:
            hint = ", but a file of this name, which apex.checkpoint.load reads" if folder.is_file() else ""
            failure = FileNotFoundError, f"{error}{hint}"
        except ValueError as error:
            failure = ValueError, str(error)
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
        return Reader(generation, contents)


def fill(state: dict[str, Any], reader: Reader) -> None:
    """Read the entries that `state` names into it; all processes call it."""
    from torch.distributed import checkpoint

    from ._reading import Planner

    with raising_everywhere(f"the checkpoint {reader.path} could not be loaded"), _without_warning_of_one_process():
        checkpoint.load(state, storage_reader=reader, planner=Planner())


@contextlib.contextmanager
def raising_everywhere(description: str, written_to: Path | None = None) -> Iterator[None]:
    """Raise in all processes if the block fails in any of them."""
    from torch.distributed.checkpoint.api import CheckpointException

    failure: BaseException | None = None
    try:
        yield
    except CheckpointException as error:  # derives from BaseException, so that `except Exception` would miss it
        failure = error.failures[this_rank()][0] if this_rank() in error.failures else None
    except Exception as error:
        failure = error
    if written_to is not None and isinstance(failure, RuntimeError):
        failure = disk_error(written_to) or failure
    raise_everywhere(failure, description)


@contextlib.contextmanager
def _without_warning_of_one_process() -> Iterator[None]:
    """Suppress PyTorch's warning to a process that saves alone."""
    with warnings.catch_warnings():
        if not is_connected():
            warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        yield


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def _writer_of(name: str) -> int:
    """Return the rank that writes a file named __RANK_NUMBER.distcp; .metadata is rank 0's."""
    parts = name.split("_")
    return int(parts[2]) if name.startswith("__") and parts[2].isdigit() else 0


def _is_part(name: str) -> bool:
    """Return True if a file of this name is part of a sharded checkpoint."""
    return name == METADATA or (name.startswith("__") and name.endswith(".distcp"))
