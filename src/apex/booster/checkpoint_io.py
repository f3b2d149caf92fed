"""Checkpoints of boosted models, optimizers and schedulers: whole float32 tensors, for any plugin and world size."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .. import checkpoint as files
from .._arguments import Count, Index, Stateful, checked
from ..checkpoint import _huggingface
from ..checkpoint._ranks import check_equal_on_all_ranks, is_first, raise_everywhere, refusing_together, restoring
from ..checkpoint._sharded import raising_everywhere
from ._whole_state import (
    Parts,
    check_tensors,
    chunks_of,
    load_optimizer_state,
    load_tensors,
    model_parts,
    optimizer_parts,
)
from .wrappers import OptimizerWrapper, check_model

__all__ = ["CheckpointIO"]


# Asynchronous saves that nobody has waited for, with their paths. They may outlive their Booster.
_WRITING: dict[concurrent.futures.Future[None], Path] = {}


class CheckpointIO:
    """A writer and reader of checkpoints. All processes must call its methods alike; the first one writes."""

    def __init__(self) -> None:
        self._writer: concurrent.futures.ThreadPoolExecutor | None = None
        # The last asynchronous save, until it is waited for. It does nothing in processes other than the first.
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
        """Save a model. A failed save leaves an earlier checkpoint as it was.

        `checkpoint` is a file or, with `shard`, a folder in the layout of Hugging Face: files of at most
        `size_per_shard` MB, whose names begin with `prefix`, and an index. With `use_async` a thread writes while the
        training goes on; `wait_for_saves`, the next save and the next load wait for it. `gather_dtensor` must be True.
        """
        check_model(model)
        _check_gathered(gather_dtensor)
        self.wait_for_saves()
        size = size_per_shard if shard else None
        parts = model_parts(model, size, unique=use_safetensors, copies=use_async)
        config = getattr(chunks_of(model)[0], "config", None)

        def write(path: Path, states: Iterator[Any]) -> None:
            if shard:
                _huggingface.write_model(path, parts.keys, states, parts.total, prefix, use_safetensors, config)
            else:
                _huggingface.write_file(path, next(states), use_safetensors)

        self._write(write, checkpoint, use_async, parts)

    @checked
    def load_model(
        self,
        model: Any,
        checkpoint: str | os.PathLike[str],
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: Count = 1,
    ) -> None:
        """Load a checkpoint of `save_model`, with any plugin and number of processes, or a folder of Hugging Face.

        The files of a folder are read one after the other, or by `num_threads` threads at once if
        `low_cpu_mem_mode=False`. Checksums, names and shapes of all files are checked before anything is changed.
        """
        check_model(model)
        self.wait_for_saves()
        with contextlib.ExitStack() as opened:
            with refusing_together():
                source = opened.enter_context(_huggingface.Checkpoint(Path(checkpoint)))
                names = source.files_of_model()
                shapes = source.shapes(names)
            _check_same(source, names)
            with refusing_together():
                check_tensors(model, shapes, strict)
            threads = 1 if low_cpu_mem_mode and num_threads == 1 else max(num_threads, 2)
            load_tensors(model, source.parts(names, threads))

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
        """Save an optimizer's state with the loss scale; the arguments mean the same as in `save_model`."""
        assert isinstance(optimizer, OptimizerWrapper), (
            f"optimizer must be the one that booster.boost returned, not a {type(optimizer).__name__}"
        )
        _check_gathered(gather_dtensor)
        self.wait_for_saves()
        parts = optimizer_parts(optimizer, size_per_shard if shard else None, copies=use_async)

        def write(path: Path, states: Iterator[Any]) -> None:
            if shard:
                _huggingface.write_optimizer(path, parts.keys, states, parts.total, prefix, parts.rest)
            else:
                _huggingface.write_file(path, {"state": next(states), **parts.rest}, False)

        self._write(write, checkpoint, use_async, parts)

    @checked
    def load_optimizer(
        self, optimizer: Any, checkpoint: str | os.PathLike[str], low_cpu_mem_mode: bool = True, num_threads: Count = 1
    ) -> None:
        """Load a checkpoint of `save_optimizer`, with any plugin and number of processes."""
        assert isinstance(optimizer, OptimizerWrapper), (
            f"optimizer must be the one that booster.boost returned, not a {type(optimizer).__name__}"
        )
        self.wait_for_saves()
        with contextlib.ExitStack() as opened:
            with refusing_together():
                source = opened.enter_context(_huggingface.Checkpoint(Path(checkpoint)))
                names = source.files_of_optimizer()
                state = source.optimizer(names, num_threads)
            _check_same(source, names)
        load_optimizer_state(optimizer, state)

    @checked
    def save_lr_scheduler(self, lr_scheduler: Stateful, checkpoint: str | os.PathLike[str]) -> None:
        """Save a scheduler's state to a file."""
        self.wait_for_saves()
        files.save(lr_scheduler.state_dict(), checkpoint, wait=True)

    @checked
    def load_lr_scheduler(self, lr_scheduler: Stateful, checkpoint: str | os.PathLike[str]) -> None:
        """Load a checkpoint of `save_lr_scheduler`. The scheduler keeps its state if it raises an error."""
        self.wait_for_saves()
        with restoring([lr_scheduler]), refusing_together():
            lr_scheduler.load_state_dict(files.load(checkpoint))

    def _write(
        self,
        write: Callable[..., None],
        checkpoint: str | os.PathLike[str],
        use_async: bool,
        parts: Parts | None = None,
    ) -> None:
        """Call `write(checkpoint, states)` in the first process, in a thread if `use_async`; else the others wait.

        `states` yields the tensors of one file of `parts` after the other. The other processes take part in gathering
        each file and keep nothing. A thread gets all files at once, because only the main thread exchanges tensors.
        Without `parts` the call is `write(checkpoint)`.
        """
        path = Path(checkpoint)
        self.wait_for_saves()
        states = iter(()) if parts is None else parts.gather()
        arguments = () if parts is None else (states,)
        if use_async:
            states = iter(list(states))
            if self._writer is None:
                self._writer = concurrent.futures.ThreadPoolExecutor(1, "apex-booster-save")
            self._writing = self._writer.submit(write if is_first() else (lambda *_: None), path, states)
            _WRITING[self._writing] = path
            return
        with raising_everywhere(f"the checkpoint {path} could not be written"):
            try:
                if is_first():
                    write(path, *arguments)
            finally:
                for _ in states:  # if the writer failed, the other processes still gather all files
                    pass

    def wait_for_saves(self) -> None:
        """Wait in all processes for the asynchronous save of the first one; raise its error everywhere."""
        writing, self._writing = self._writing, None
        if writing is not None:
            failure, path = writing.exception(), _WRITING.pop(writing)
            raise_everywhere(failure, f"the checkpoint {path} could not be written")


def _check_same(source: _huggingface.Checkpoint, names: list[str]) -> None:
    """Raise in all processes if they opened different generations of a checkpoint."""
    message = f"the checkpoint {source.path} was replaced while it was read; load it again"
    check_equal_on_all_ranks((names, source.fingerprint(names)), message)


def _check_gathered(gather_dtensor: bool) -> None:
    if not gather_dtensor:
        raise NotImplementedError(
            "gather_dtensor=False is not supported: with apex.checkpoint.save_sharded, or for split models "
            "apex.transformer.checkpoint.save, each process writes its own part"
        )


@atexit.register
def _finish() -> None:
    """End the process with status 1 if an asynchronous save failed and nobody has waited for it.

    An exception at exit would only be printed, with status 0. Exit functions that were registered before this module
    was imported are not called if a save failed.
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
