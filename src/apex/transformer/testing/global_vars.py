"""Global variables of a test or training script: parsed command line, timers and microbatch calculator."""

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
    """Parse the command line (see `parse_args`) and set the global variables, once until `destroy_global_vars`."""
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
    """Clear the global variables, so that they can be set again."""
    global _variables
    _variables = None


def _initialized(name: str) -> _Variables:
    assert _variables is not None, f"{name} is not initialized."
    return _variables


def get_args() -> Any:
    """Return the parsed command line."""
    return _initialized("args").args


def get_timers() -> _Timers:
    """Return the named timers."""
    return _initialized("timers").timers


def get_tensorboard_writer() -> Any:
    """Return the TensorBoard writer on the last rank if `--tensorboard-dir` is given, otherwise None."""
    return None if _variables is None else _variables.tensorboard_writer


def get_adlr_autoresume() -> None:
    """Return None: auto-resume is not supported."""
    return


def get_num_microbatches() -> int | None:
    """Return the current number of microbatches of a step."""
    return _initialized("num microbatches calculator").microbatches.get()


def get_current_global_batch_size() -> int | None:
    """Return the current number of samples that all ranks process in a step."""
    return _initialized("num microbatches calculator").microbatches.get_current_global_batch_size()


def update_num_microbatches(consumed_samples: int, *, consistency_check: bool = True) -> None:
    """Update the number of microbatches and the batch size, given the number of samples consumed so far."""
    _initialized("num microbatches calculator").microbatches.update(consumed_samples, consistency_check)
