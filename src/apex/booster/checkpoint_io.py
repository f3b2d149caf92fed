"""Saving and loading what the Booster trains: whole, in ordinary precision, for any plugin and number of processes."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import checkpoint as files
from .._arguments import Count, Index, Stateful, checked
from ..checkpoint import _huggingface
from ..checkpoint._ranks import check_same_everywhere, is_first, raise_everywhere, refusing_together, restoring
from ..checkpoint._sharded import raising_everywhere
from ._whole import check_tensors, chunks_of, load_optimizer_state, load_tensors, whole_model, whole_optimizer
from .wrappers import OptimizerWrapper, check_model

__all__ = ["CheckpointIO"]


# Asynchronous saves that nobody has waited for, and their paths; kept here since a Booster may be gone before them.
_WRITING: dict[concurrent.futures.Future[None], Path] = {}


class CheckpointIO:
    """Saves and loads models, optimizers and schedulers. All processes call it alike; the first one writes."""

    def __init__(self) -> None:
        self._writer: concurrent.futures.ThreadPoolExecutor | None = None
        # What was begun last and not waited for yet: nothing to do in processes other than the first.
        self._writing: concurrent.futures.Future[None] | None = None

    @checked
    def save_model(
        self,
        model: Any,
        checkpoint: str | os.PathLike[str],
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: Index = 1024,
        use_safetensors: bool = False,
        use_async: bool = False,
    ) -> None:
        """Saves a model, whole or not at all.

        `checkpoint` is a file or, with `shard`, a folder in the layout of Hugging Face: files of at most
        `size_per_shard` MB, whose names begin with `prefix`, and an index. With `use_async` writing goes on beside the
        training; `wait_for_saves` waits for it, and so does the next save or load.
        `gather_dtensor` must be True.
        """
        check_model(model)
        _check_gathered(gather_dtensor)
        state = whole_model(model, copies=use_async)
        config = getattr(chunks_of(model)[0], "config", None)

        def write(path: Path) -> None:
            if shard:
                _huggingface.write_model(path, state, prefix, size_per_shard, use_safetensors, config)
            else:
                _huggingface.write_file(path, state, use_safetensors)

        self._write(write, checkpoint, use_async)

    @checked
    def load_model(
        self,
        model: Any,
        checkpoint: str | os.PathLike[str],
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: Count = 1,
    ) -> None:
        """Loads what `save_model` wrote, with any plugin and number of processes, or a folder of Hugging Face's.

        Files of a folder are read one after the other, or all at once with `low_cpu_mem_mode=False`, by `num_threads`.
        All of them are checked first, their checksums, names and shapes: a load that is refused changes nothing.
        """
        check_model(model)
        self.wait_for_saves()
        with contextlib.ExitStack() as opened:
            with refusing_together():
                found = opened.enter_context(_huggingface.Checkpoint(Path(checkpoint)))
                names = found.files_of_model()
                shapes = found.shapes(names)
            _check_same(found, names)
            with refusing_together():
                check_tensors(model, shapes, strict)
            threads = 1 if low_cpu_mem_mode and num_threads == 1 else max(num_threads, 2)
            load_tensors(model, found.parts(names, threads))

    @checked
    def save_optimizer(
        self,
        optimizer: Any,
        checkpoint: str | os.PathLike[str],
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: Index = 1024,
        use_async: bool = False,
    ) -> None:
        """Saves an optimizer's state, with the loss scale, as `save_model` does a model."""
        assert isinstance(optimizer, OptimizerWrapper), (
            f"optimizer must be the one that booster.boost returned, not a {type(optimizer).__name__}"
        )
        _check_gathered(gather_dtensor)
        state = whole_optimizer(optimizer, copies=use_async)

        def write(path: Path) -> None:
            if shard:
                _huggingface.write_optimizer(path, state, prefix, size_per_shard)
            else:
                _huggingface.write_file(path, state, False)

        self._write(write, checkpoint, use_async)

    @checked
    def load_optimizer(
        self, optimizer: Any, checkpoint: str | os.PathLike[str], low_cpu_mem_mode: bool = True, num_threads: Count = 1
    ) -> None:
        """Loads what `save_optimizer` wrote, with any plugin and number of processes."""
        assert isinstance(optimizer, OptimizerWrapper), (
            f"optimizer must be the one that booster.boost returned, not a {type(optimizer).__name__}"
        )
        self.wait_for_saves()
        with contextlib.ExitStack() as opened:
            with refusing_together():
                found = opened.enter_context(_huggingface.Checkpoint(Path(checkpoint)))
                names = found.files_of_optimizer()
                state = found.optimizer(names, num_threads)
            _check_same(found, names)
        load_optimizer_state(optimizer, state)

    @checked
    def save_lr_scheduler(self, lr_scheduler: Stateful, checkpoint: str | os.PathLike[str]) -> None:
        """Saves a scheduler's state to a file."""
        self.wait_for_saves()
        files.save(lr_scheduler.state_dict(), checkpoint, wait=True)

    @checked
    def load_lr_scheduler(self, lr_scheduler: Stateful, checkpoint: str | os.PathLike[str]) -> None:
        """Loads what `save_lr_scheduler` wrote. A scheduler that refuses its state keeps the one that it has."""
        self.wait_for_saves()
        with restoring([lr_scheduler]), refusing_together():
            lr_scheduler.load_state_dict(files.load(checkpoint))

    def _write(self, write: Callable[[Path], None], checkpoint: str | os.PathLike[str], use_async: bool) -> None:
        """Writes in the first process; the others wait for it, unless it does so beside the training."""
        path = Path(checkpoint)
        self.wait_for_saves()
        if use_async:
            if self._writer is None:
                self._writer = concurrent.futures.ThreadPoolExecutor(1, "apex-booster-save")
            self._writing = self._writer.submit(write if is_first() else (lambda path: None), path)
            _WRITING[self._writing] = path
            return
        with raising_everywhere(f"the checkpoint {path} could not be written"):
            if is_first():
                write(path)

    def wait_for_saves(self) -> None:
        """Waits, in all processes, for what the first one writes beside the training; raises what went wrong."""
        writing, self._writing = self._writing, None
        if writing is not None:
            failure, path = writing.exception(), _WRITING.pop(writing)
            raise_everywhere(failure, f"the checkpoint {path} could not be written")


def _check_same(found: _huggingface.Checkpoint, names: list[str]) -> None:
    """Raise in all processes if they have opened a checkpoint before and after it was replaced."""
    message = f"the checkpoint {found.path} was replaced while it was read; load it again"
    check_same_everywhere((names, found.fingerprint(names)), message)


def _check_gathered(gather_dtensor: bool) -> None:
    if not gather_dtensor:
        raise NotImplementedError(
            "gather_dtensor=False is not there: apex.checkpoint.save_sharded, or apex.transformer.checkpoint.save for "
            "split models, has each process write its own part"
        )


@atexit.register
def _finish() -> None:
    """End the process with status 1 if an asynchronous save failed, and nobody has waited for it.

    An exception at this time would be printed, and the status would be 0. Of functions that are to be called at exit
    those that were registered before this module was imported are not called then.
    """
    failed = False
    for writing, path in _WRITING.items():
        failure = writing.exception()
        if failure is not None:
            failed = True
            print(f"the checkpoint {path} could not be written:", file=sys.stderr)
            traceback.print_exception(failure)
    if failed:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
