"""Saving and loading what the Booster trains: whole, in ordinary precision, for any plugin and number of processes."""

from __future__ import annotations

import atexit
import concurrent.futures
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import checkpoint as files
from ..checkpoint import _huggingface
from ..checkpoint._ranks import is_first, raise_everywhere
from ..checkpoint._sharded import path_or_backup, raising_everywhere
from ._whole import chunks_of, load_optimizer_state, load_tensors, whole_model, whole_optimizer
from .wrappers import OptimizerWrapper, check_model

__all__ = ["CheckpointIO"]


class CheckpointIO:
    """Saves and loads models, optimizers and schedulers. All processes call it alike; the first one writes."""

    def __init__(self) -> None:
        self._writer: concurrent.futures.ThreadPoolExecutor | None = None
        # What was begun last and not waited for yet: nothing to do in processes other than the first.
        self._writing: concurrent.futures.Future[None] | None = None

    def save_model(
        self,
        model: Any,
        checkpoint: str | Path,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
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

    def load_model(
        self,
        model: Any,
        checkpoint: str | Path,
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Loads what `save_model` wrote, with any plugin and number of processes, or a folder of Hugging Face's.

        Files of a folder are read one after the other, or all at once with `low_cpu_mem_mode=False`, by `num_threads`.
        """
        check_model(model)
        self.wait_for_saves()
        path = path_or_backup(Path(checkpoint))
        load_tensors(model, _huggingface.read_model(path, low_cpu_mem_mode, num_threads), strict)

    def save_optimizer(
        self,
        optimizer: Any,
        checkpoint: str | Path,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
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

    def load_optimizer(
        self, optimizer: Any, checkpoint: str | Path, low_cpu_mem_mode: bool = True, num_threads: int = 1
    ) -> None:
        """Loads what `save_optimizer` wrote, with any plugin and number of processes."""
        assert isinstance(optimizer, OptimizerWrapper), (
            f"optimizer must be the one that booster.boost returned, not a {type(optimizer).__name__}"
        )
        self.wait_for_saves()
        path = path_or_backup(Path(checkpoint))
        load_optimizer_state(optimizer, _huggingface.read_optimizer(path, num_threads))

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | Path) -> None:
        """Saves a scheduler's state to a file."""
        self.wait_for_saves()
        files.save(lr_scheduler.state_dict(), checkpoint, wait=True)

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | Path) -> None:
        """Loads what `save_lr_scheduler` wrote."""
        self.wait_for_saves()
        lr_scheduler.load_state_dict(files.load(checkpoint))

    def _write(self, write: Callable[[Path], None], checkpoint: str | Path, use_async: bool) -> None:
        """Writes in the first process; the others wait for it, unless it does so beside the training."""
        path = Path(checkpoint)
        self.wait_for_saves()
        if use_async:
            if self._writer is None:
                self._writer = concurrent.futures.ThreadPoolExecutor(1, "apex-booster-save")
                atexit.register(_finish, weakref.ref(self))
            self._writing = self._writer.submit(write if is_first() else (lambda path: None), path)
            return
        with raising_everywhere(f"the checkpoint {path} could not be written"):
            if is_first():
                write(path)

    def wait_for_saves(self) -> None:
        """Waits, in all processes, for what the first one writes beside the training; raises what went wrong."""
        writing, self._writing = self._writing, None
        if writing is not None:
            raise_everywhere(writing.exception(), "a checkpoint could not be written")


def _check_gathered(gather_dtensor: bool) -> None:
    if not gather_dtensor:
        raise NotImplementedError(
            "gather_dtensor=False is not there: apex.checkpoint.save_sharded, or apex.transformer.checkpoint.save for "
            "split models, has each process write its own part"
        )


def _finish(io: weakref.ref[CheckpointIO]) -> None:
    """At the end of the process."""
    living = io()
    if living is not None and living._writing is not None:
        living._writing.result()
