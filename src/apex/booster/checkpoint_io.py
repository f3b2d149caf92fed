"""Saving and loading what the Booster trains: whole, in ordinary precision, for any plugin and number of processes."""

from __future__ import annotations

import atexit
import concurrent.futures
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import checkpoint as files
from ..checkpoint._ranks import is_first, raise_everywhere
from . import _layout
from ._whole import load_optimizer_state, load_tensors, whole_model, whole_optimizer
from .wrappers import OptimizerWrapper, unwrapped

__all__ = ["CheckpointIO"]


class CheckpointIO:
    """Saves and loads models, optimizers and schedulers. All processes call it alike; the first one writes."""

    def __init__(self) -> None:
        self._writer: concurrent.futures.ThreadPoolExecutor | None = None
        self._writing: list[concurrent.futures.Future[None]] = []

    # Models -----------------------------------------------------------------------------------------------------------

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
        training; `wait_for_saves` waits for it, and so does the next save or load. Without `gather_dtensor` a folder is
        in the format of `torch.distributed.checkpoint`, to which each process writes its part.
        """
        if not gather_dtensor:
            self._save_divided({"model": unwrapped(model).state_dict()}, checkpoint, shard, use_async)
            return
        state = whole_model(model, copies=use_async)
        config = getattr(unwrapped(model), "config", None)

        def write(path: Path) -> None:
            if shard:
                _layout.write_model(path, state, prefix, size_per_shard, use_safetensors, config)
            else:
                _layout.write_file(path, state, use_safetensors)

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
        self.wait_for_saves()
        path = _layout.standing(Path(checkpoint))
        if _layout.is_divided(path):
            state = {"model": unwrapped(model).state_dict()}
            files.load_sharded(state, path)
            unwrapped(model).load_state_dict(state["model"], strict=strict)
            return
        load_tensors(model, _layout.read_model(path, low_cpu_mem_mode, num_threads), strict)

    # Optimizers -------------------------------------------------------------------------------------------------------

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
        assert isinstance(optimizer, OptimizerWrapper), "the optimizer must be the one that boost returned"
        if not gather_dtensor:
            self._save_divided({"optimizer": _divided_state(optimizer)}, checkpoint, shard, use_async)
            return
        state = whole_optimizer(optimizer, copies=use_async)

        def write(path: Path) -> None:
            if shard:
                _layout.write_optimizer(path, state, prefix, size_per_shard)
            else:
                _layout.write_file(path, state, False)

        self._write(write, checkpoint, use_async)

    def load_optimizer(
        self, optimizer: Any, checkpoint: str | Path, low_cpu_mem_mode: bool = True, num_threads: int = 1
    ) -> None:
        """Loads what `save_optimizer` wrote, with any plugin and number of processes."""
        assert isinstance(optimizer, OptimizerWrapper), "the optimizer must be the one that boost returned"
        self.wait_for_saves()
        path = _layout.standing(Path(checkpoint))
        if _layout.is_divided(path):
            state = {"optimizer": _divided_state(optimizer)}
            files.load_sharded(state, path)
            _load_divided_state(optimizer, state["optimizer"])
            return
        load_optimizer_state(optimizer, _layout.read_optimizer(path, num_threads))

    # Schedulers -------------------------------------------------------------------------------------------------------

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | Path) -> None:
        """Saves a scheduler's state to a file."""
        self.wait_for_saves()
        files.save(lr_scheduler.state_dict(), checkpoint, wait=True)

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | Path) -> None:
        """Loads what `save_lr_scheduler` wrote."""
        self.wait_for_saves()
        lr_scheduler.load_state_dict(files.load(checkpoint))

    # Writing ----------------------------------------------------------------------------------------------------------

    def _write(self, write: Callable[[Path], None], checkpoint: str | Path, use_async: bool) -> None:
        """Writes in the first process; the others wait for it, unless it does so beside the training."""
        path = Path(checkpoint)
        self.wait_for_saves()
        if use_async:
            if is_first():
                if self._writer is None:
                    self._writer = concurrent.futures.ThreadPoolExecutor(1, "apex-booster-save")
                    atexit.register(_finish, weakref.ref(self))
                self._writing.append(self._writer.submit(write, path))
            return
        failure: Exception | None = None
        if is_first():
            try:
                write(path)
            except Exception as error:
                failure = error
        raise_everywhere(failure, f"the checkpoint {path} could not be written")

    def wait_for_saves(self) -> None:
        """Waits for what is being written; raises what went wrong, in the process that wrote it."""
        writing, self._writing = self._writing, []
        for each in writing:
            each.result()

    def _save_divided(self, state: dict[str, Any], checkpoint: str | Path, shard: bool, use_async: bool) -> None:
        if not shard or use_async:
            raise ValueError("gather_dtensor=False needs shard=True, and has no use_async")
        self.wait_for_saves()
        files.save_sharded(state, checkpoint)


def _finish(io: weakref.ref[CheckpointIO]) -> None:
    """At the end of the process."""
    living = io()
    if living is not None:
        living.wait_for_saves()


def _divided_state(optimizer: OptimizerWrapper) -> dict[str, Any]:
    """An optimizer's state of which each process has its part."""
    if optimizer._is_zero:
        found = optimizer.optim.sharded_state_dict()
    else:
        from torch.distributed.checkpoint.state_dict import _init_optim_state

        _init_optim_state(optimizer.optim)  # tensors for what is loaded
        found = optimizer.optim.state_dict()
        found = {
            "state": {str(key): value for key, value in found["state"].items()},
            "param_groups": tuple(found["param_groups"]),
        }
    return {**found, "scaler": optimizer.scaler_state()}


def _load_divided_state(optimizer: OptimizerWrapper, state: dict[str, Any]) -> None:
    scaler = state.pop("scaler")
    if optimizer._is_zero:
        optimizer.optim.load_sharded_state_dict(state)
    else:
        plain = {int(key): value for key, value in state["state"].items()}
        optimizer.optim.load_state_dict({"state": plain, "param_groups": list(state["param_groups"])})
    optimizer.load_scaler_state(scaler)
