"""A check that all processes still have the same model; it names the tensors and ranks that differ."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._distributed.comparison import checksum, differing, gather_integers, ranks_of
from .._distributed.experts import is_expert
from ..ops._host import HOST
from .distributed import DistributedDataParallel


def check_replicas(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Raise in all processes if their replicas differ; all processes must call it.

    Compares the bits of the model's parameters and buffers, and amp's loss scales and master weights. If given, it also
    compares the optimizer's state and options and the scale of a `scaler`. The error names the differing values and the
    ranks that disagree with the majority. Experts (parameters with `allreduce = False`) may differ. Do not pass an
    optimizer whose state is divided among the processes.

    It reads everything once and sends 8 bytes per tensor.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("check_replicas needs a process group: call torch.distributed.init_process_group first")
    named = list(_named_values(getattr(model, "module", model) if _is_wrapper(model) else model, optimizer, scaler))
    names = [name for name, _ in named]
    _check_names(named, group)
    problems = [
        f"{name} ({_ranks_in_words(different)})"
        for name, values in zip(
            names, zip(*gather_integers(_checksums(named), "replicas", group), strict=True), strict=True
        )
        if (different := _different(list(values), group))
    ]
    if problems:
        more = f", and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise RuntimeError(
            f"replicas differ in {len(problems)} of {len(names)} things: {'; '.join(problems[:10])}{more}. "
            "Something was done in some processes only, or with other data"
        )


class ReplicaCheck:
    """`check_replicas` for a training loop: called after each step, it checks at the first and every `every` steps."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        every: int = 100,
        scaler: torch.amp.GradScaler | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1 step, not {every}")
        self.model, self.optimizer, self.scaler, self.group = model, optimizer, scaler, group
        self.every = every
        self._calls = 0

    def __call__(self) -> None:
        """Count a step, and compare the replicas if it is due; all processes must call it once per step."""
        self._calls += 1
        if self._calls % self.every == 1 % self.every:
            check_replicas(self.model, self.optimizer, scaler=self.scaler, group=self.group)


def _named_values(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, scaler: torch.amp.GradScaler | None
) -> Iterator[tuple[str, Any]]:
    """Yield the values to compare, tensors and plain values, with their names."""
    known: dict[int, str] = {}
    params = [(name, param) for name, param in model.named_parameters() if not is_expert(param)]
    experts = {id(param) for param in model.parameters() if is_expert(param)}
    for name, param in params:
        known[id(param)] = name
        yield f"parameter {name}", param
    for name, buffer in model.named_buffers():
        yield f"buffer {name}", buffer
    if "apex.amp" in sys.modules:
        from ..amp._amp_state import _amp_state

        experts |= {id(_amp_state.masters.get(param)) for param in model.parameters() if is_expert(param)}
        for name, param in params:
            master = _amp_state.masters.get(param)
            if master is not None:
                known[id(master)] = name
                yield f"master of parameter {name}", master
        for number, loss_scaler in enumerate(_amp_state.loss_scalers):
            yield f"loss scale {number}", loss_scaler.loss_scale()
    if scaler is not None:
        yield "scale of the scaler", scaler.get_scale()
    if optimizer is not None:
        yield from _named_optimizer_values(optimizer, known, experts)


def _named_optimizer_values(
    optimizer: torch.optim.Optimizer, known: dict[int, str], experts: set[int]
) -> Iterator[tuple[str, Any]]:
    """Yield an optimizer's options and state by name; `experts` are ids of parameters whose state is skipped."""
    for number, group in enumerate(optimizer.param_groups):
        for option, value in sorted(group.items()):
            if option != "params" and isinstance(value, Tensor | bool | int | float | tuple):
                yield f"option {option} of group {number}", value
        for index, param in enumerate(group["params"]):
            if id(param) in experts:
                continue
            name = known.get(id(param), f"{index} of group {number}")
            for key, value in sorted(optimizer.state.get(param, {}).items(), key=str):
                if isinstance(value, Tensor | bool | int | float):
                    yield f"state {key} of parameter {name}", value


def _is_wrapper(model: nn.Module) -> bool:
    return isinstance(model, DistributedDataParallel | nn.parallel.DistributedDataParallel)


def _check_names(named: list[tuple[str, Any]], group: dist.ProcessGroup | None) -> None:
    """Raise if processes do not have the same values to compare."""
    described = [
        f"{name} {value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else name for name, value in named
    ]
    everywhere = differing(described, [value for _, value in named if isinstance(value, Tensor)], "replicas", group)
    if not everywhere:
        return
    common = set.intersection(*map(set, everywhere))
    rest = list(dict.fromkeys(name for names in everywhere for name in names if name not in common))
    raise RuntimeError(
        f"processes do not have the same things to compare ({_ranks_in_words(_different(everywhere, group))}); not all "
        f"have {'; '.join(rest[:5]) or 'them in the same order'}"
    )


@torch.no_grad()
def _checksums(named: list[tuple[str, Any]]) -> Tensor:
    """Return a checksum of each value, on the device of the first tensor, without waiting for it."""
    device = next((value.device for _, value in named if isinstance(value, Tensor)), HOST)
    checksums = torch.tensor(
        [0 if isinstance(value, Tensor) else zlib.crc32(repr(value).encode()) for _, value in named],
        dtype=torch.int64,
        device=device,
    )
    for index, value in enumerate(value for _, value in named):
        if isinstance(value, Tensor):
            checksums[index] = checksum(value)
    return checksums


def _different(values: list[Any], group: dist.ProcessGroup | None) -> list[int]:
    """Return the ranks whose value is not the most common one; among equally common values the first wins."""
    if values.count(values[0]) == len(values):
        return []
    usual = max(values, key=values.count)
    return [rank for rank, value in zip(ranks_of(group), values, strict=True) if value != usual]


def _ranks_in_words(ranks: list[int]) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed} differ{'s' if len(ranks) == 1 else ''} from the others"
