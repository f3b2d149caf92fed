"""Checkpoints of boosted models, optimizers and schedulers: whole float32 tensors, for any plugin and world size."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from .. import checkpoint as files
from .._arguments import Count, Index, Stateful, checked
from ..checkpoint import Series, _huggingface
from ..checkpoint._background import check_options, submit
from ..checkpoint._files import plain_state
from ..checkpoint._ranks import check_equal_on_all_ranks, is_first, refusing_together, restoring
from ..checkpoint._series import tidying
from ..checkpoint._sharded import raising_everywhere
from ..transformer._resharding import random
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


# The function for the first process's writer process.
_WRITE_STAGED = "apex.checkpoint._huggingface:write_staged"
# The scheduler's name among the objects of a training.
_SCHEDULER = "lr_scheduler"


class CheckpointIO:
    """A writer and reader of checkpoints. All processes must call its methods alike; the first one writes."""

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
        staging: str = "host",
        if_busy: str = "wait",
    ) -> None:
        """Save a model. A failed save leaves an earlier checkpoint as it was.

        `checkpoint` is a file or, with `shard`, a folder in the layout of Hugging Face: files of at most
        `size_per_shard` MB, whose names begin with `prefix`, and an index. `gather_dtensor` must be True.

        With `use_async` a background process of the first rank writes while the training goes on, and at most one save
        is in flight; `staging` and `if_busy` mean the same as in `apex.checkpoint.save_sharded`.
        """
        check_model(model)
        _check_gathered(gather_dtensor)
        check_options(staging, if_busy)

        def contents(states: Callable[[Parts], Iterable[Any]]) -> Any:
            if shard:
                return _model_folder(model, states, size_per_shard, prefix, use_safetensors)
            return _huggingface.OneFile(states(model_parts(model, unique=use_safetensors)), use_safetensors)

        self._write(contents, checkpoint, use_async, staging, if_busy)

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
        threads = 1 if low_cpu_mem_mode and num_threads == 1 else max(num_threads, 2)
        with contextlib.ExitStack() as opened:
            _checked_model(opened, model, Path(checkpoint), strict, threads)()

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
        staging: str = "host",
        if_busy: str = "wait",
    ) -> None:
        """Save an optimizer's state with the loss scale; the arguments mean the same as in `save_model`."""
        assert isinstance(optimizer, OptimizerWrapper), (
            f"optimizer must be the one that booster.boost returned, not a {type(optimizer).__name__}"
        )
        _check_gathered(gather_dtensor)
        check_options(staging, if_busy)

        def contents(states: Callable[[Parts], Iterable[Any]]) -> Any:
            if shard:
                return _optimizer_folder(optimizer, states, size_per_shard, prefix)
            parts = optimizer_parts(optimizer)
            return _huggingface.OneFile(states(parts), rest=parts.rest)

        self._write(contents, checkpoint, use_async, staging, if_busy)

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

    @checked
    def save_training(
        self,
        series: Series,
        step: Index,
        model: Any,
        optimizer: Any = None,
        lr_scheduler: Stateful | None = None,
        *,
        size_per_shard: Index = 1024,
        use_async: bool = False,
        staging: str = "host",
        if_busy: str = "wait",
        **others: Any,
    ) -> Path:
        """Save a whole training as one checkpoint of a sharded series, and remove old ones; return its path.

        The folder has a model and an optimizer as `save_model` and `save_optimizer` with `shard` write them, and a file
        with the scheduler, the random number states of every process, and `others`: objects with a `state_dict`, such
        as an `apex.parallel.ElasticLoader`, or plain values. It is published when all of it is complete.
        """
        check_model(model)
        _check_series(series)
        check_options(staging, if_busy)
        objects = {**others, **({} if lr_scheduler is None else {_SCHEDULER: lr_scheduler})}
        with refusing_together():
            plain = {name: plain_state(name, value) for name, value in objects.items()}
        values = {"step": step, "others": plain, "random": random.gathered(len(chunks_of(model)))}

        def contents(states: Callable[[Parts], Iterable[Any]]) -> Any:
            parts = [_model_folder(model, states, size_per_shard, None, False)]
            if optimizer is not None:
                parts.append(_optimizer_folder(optimizer, states, size_per_shard, None))
            return _huggingface.TrainingFolder(parts, values, tidying(series, step))

        path = series.path_of(step)
        self._write(contents, path, use_async, staging, if_busy)
        return path

    @checked
    def resume_latest(
        self, series: Series, model: Any, optimizer: Any = None, lr_scheduler: Stateful | None = None, **others: Any
    ) -> tuple[int, dict[str, Any]]:
        """Load the newest intact checkpoint of `save_training`, with any plugin and number of processes.

        Returns its step and the saved plain values, or (0, {}) if the series has no checkpoint. `others` are the
        objects with `load_state_dict`, by the names they were saved under. If the layout of processes is the same,
        random number streams continue; otherwise they are seeded anew, and a warning is logged.
        """
        check_model(model)
        _check_series(series)
        objects = {**others, **({} if lr_scheduler is None else {_SCHEDULER: lr_scheduler})}
        for name, value in objects.items():
            if not hasattr(value, "load_state_dict"):
                kind = type(value).__name__
                raise TypeError(f"{name} must have load_state_dict, got {kind}; plain values are returned")
        path = series.latest()
        if path is None:
            return 0, {}
        with refusing_together():
            if not (path / _huggingface.TRAINING).exists():
                raise ValueError(
                    f"the checkpoint {path} is not one of save_training: it has no {_huggingface.TRAINING}; for one of "
                    "Series.save use apex.transformer.checkpoint.resume_latest or load_sharded"
                )
            values = files.load(path / _huggingface.TRAINING)
            missing = sorted(objects.keys() - values["others"].keys())
            if missing:
                raise ValueError(f"the checkpoint {path} has no state of {', '.join(missing)}")
        with restoring(objects.values()):
            with refusing_together():
                for name, value in objects.items():
                    value.load_state_dict(values["others"].pop(name))
            with contextlib.ExitStack() as opened:
                load = _checked_model(opened, model, path, True, 1)
                if optimizer is not None:
                    self.load_optimizer(optimizer, path)
                load()
        random.restore_own(values["random"], len(chunks_of(model)))
        return values["step"], values["others"]

    def _write(
        self,
        contents: Callable[[Callable[[Parts], Iterable[Any]]], Any],
        checkpoint: str | os.PathLike[str],
        use_async: bool,
        staging: str,
        if_busy: str,
    ) -> None:
        """Write `contents(states)` in the first process, or by its writer process; without `use_async` the others wait.

        `states(parts)` returns the tensors of one file of `parts` after the other. The other processes take part in
        gathering each file and keep nothing. A writer process gets all files at once.
        """
        path = Path(checkpoint)
        if use_async:
            path = path.absolute()  # the writer process keeps the working directory of its start

            def prepare() -> tuple[Any, Any]:
                written = contents(lambda parts: list(parts.gather()))
                return None, written if is_first() else None

            submit(_WRITE_STAGED, path, prepare, staging, if_busy, together=False)
            return
        self.wait_for_saves()
        gathering: list[Iterator[Any]] = []

        def states(parts: Parts) -> Iterator[Any]:
            gathering.append(parts.gather())
            return gathering[-1]

        written = contents(states)
        with raising_everywhere(f"the checkpoint {path} could not be written"):
            try:
                if is_first():
                    written.write(path)
            finally:
                for part in itertools.chain(*gathering):  # if the writer failed, the others still gather all files
                    del part

    def wait_for_saves(self) -> None:
        """Wait in all processes for the asynchronous save in flight; raise its error everywhere.

        `apex.checkpoint.wait` does the same: there is at most one asynchronous save in a process.
        """
        files.wait()


def _model_folder(model: Any, states: Any, size: int, prefix: str | None, use_safetensors: bool) -> Any:
    parts = model_parts(model, size, unique=use_safetensors)
    config = _huggingface.config_files(getattr(chunks_of(model)[0], "config", None)) if is_first() else {}
    return _huggingface.ModelFolder(parts.keys, states(parts), parts.total, prefix, use_safetensors, config)


def _optimizer_folder(optimizer: Any, states: Any, size: int, prefix: str | None) -> Any:
    parts = optimizer_parts(optimizer, size)
    return _huggingface.OptimizerFolder(parts.keys, states(parts), parts.total, prefix, parts.rest)


def _checked_model(
    opened: contextlib.ExitStack, model: Any, path: Path, strict: bool, threads: int
) -> Callable[[], None]:
    """Check a model's checkpoint completely; return a function that loads it. `opened` keeps its files open."""
    with refusing_together():
        source = opened.enter_context(_huggingface.Checkpoint(path))
        names = source.files_of_model()
        shapes = source.shapes(names)
    _check_same(source, names)
    with refusing_together():
        check_tensors(model, shapes, strict)
    return lambda: load_tensors(model, source.parts(names, threads))


def _check_same(source: _huggingface.Checkpoint, names: list[str]) -> None:
    """Raise in all processes if they opened different generations of a checkpoint."""
    message = f"the checkpoint {source.path} was replaced while it was read; load it again"
    check_equal_on_all_ranks((names, source.fingerprint(names)), message)


def _check_series(series: Series) -> None:
    if not series.sharded:
        raise ValueError("a training is saved to folders, in a sharded series: Series(folder, sharded=True)")


def _check_gathered(gather_dtensor: bool) -> None:
    if not gather_dtensor:
        raise NotImplementedError(
            "gather_dtensor=False is not supported: with apex.checkpoint.save_sharded, or for split models "
            "apex.transformer.checkpoint.save, each process writes its own part"
        )
