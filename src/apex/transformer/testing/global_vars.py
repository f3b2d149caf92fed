"""The parsed command line, timers and calculator of microbatches of a test or training script, set once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..microbatches import NumMicroBatchesCalculator, build_num_microbatches_calculator
from ..pipeline_parallel._timers import _Timers
from .arguments import parse_args


@dataclass
class _Variables:
    args: Any
    timers: _Timers
    microbatches: NumMicroBatchesCalculator
    tensorboard_writer: Any = None


_variables: _Variables | None = None


def set_global_variables(
    extra_args_provider: Callable[[Any], Any] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    override_args: Mapping[str, Any] | None = None,
    ignore_unknown_args: bool = False,
) -> None:
    """Parses the command line (see `parse_args`) and makes what depends on it; once, until `destroy_global_vars`."""
    global _variables
    assert _variables is None, "args is already initialized."
    args = parse_args(extra_args_provider, args_defaults, override_args, ignore_unknown_args)
    calculator = build_num_microbatches_calculator(
        args.rank, args.rampup_batch_size, args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    )
    writer = None
    if args.tensorboard_dir and args.rank == args.world_size - 1:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(log_dir=args.tensorboard_dir, max_queue=args.tensorboard_queue_size)
    _variables = _Variables(args, _Timers(), calculator, writer)


def destroy_global_vars() -> None:
    """Forgets everything, so that it can be set again."""
    global _variables
    _variables = None


def _set(what: str) -> _Variables:
    assert _variables is not None, f"{what} is not initialized."
    return _variables


def get_args() -> Any:
    """The parsed command line."""
    return _set("args").args


def get_timers() -> _Timers:
    """Stopwatches under names."""
    return _set("timers").timers


def get_tensorboard_writer() -> Any:
    """The writer of TensorBoard, on the last rank with `--tensorboard-dir`; None elsewhere."""
    return None if _variables is None else _variables.tensorboard_writer


def get_adlr_autoresume() -> None:
    """None: there is no such service here."""
    return


def get_num_microbatches() -> int | None:
    """How many microbatches a step has now."""
    return _set("num microbatches calculator").microbatches.get()


def get_current_global_batch_size() -> int | None:
    """How many samples all ranks see in a step now."""
    return _set("num microbatches calculator").microbatches.get_current_global_batch_size()


def update_num_microbatches(consumed_samples: int, *, consistency_check: bool = True) -> None:
    """Sets both for the step after so many samples."""
    _set("num microbatches calculator").microbatches.update(consumed_samples, consistency_check)
