"""Pruned linear layers in the format of sparse tensor cores, where that is quicker."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...ops._host import on_host

_REPEATS, _WARM_UP = 20, 3


class Row(NamedTuple):
    """What became of a layer; times are microseconds for the inputs that it got, None where they were not taken."""

    name: str
    shape: tuple[int, ...]
    rows: int
    dense: float | None
    sparse: float | None
    outcome: str


def _obstacle(weight: Tensor) -> str | None:
    """Why cuSPARSELt does not take a weight, or None."""
    if weight.dtype not in (torch.float16, torch.bfloat16):
        return f"its dtype is {weight.dtype}; float16 and bfloat16 are taken"
    if any(size < 16 or size % 8 for size in weight.shape):
        return "its sides are not multiples of 8, 16 at least"
    if weight.shape[1] % 4 or int((weight.detach().view(-1, 4) != 0).sum(1).max()) > 2:
        return "it is not pruned to 2 of 4"
    return None


def _microseconds(function: Callable[[], Tensor]) -> float:
    for _ in range(_WARM_UP):
        function()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_REPEATS):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / _REPEATS


def _measure(name: str, layer: nn.Linear, input: Tensor | None) -> tuple[Row, Tensor | None]:
    """A row of the table, and the sparse weight if it is the quicker one."""
    weight, shape = layer.weight.detach(), tuple(layer.weight.shape)
    rows = 0 if input is None else input.numel() // input.shape[-1]
    reason = _obstacle(weight) or ("it was not used" if input is None else None)
    if reason is not None:
        return Row(name, shape, rows, None, None, reason), None
    try:
        sparse = torch.sparse.SparseSemiStructuredTensorCUSPARSELT.from_dense(weight)
        error = functional.linear(input, sparse, layer.bias) - functional.linear(input, weight, layer.bias)
    except (RuntimeError, NotImplementedError, AttributeError, ValueError) as problem:
        return Row(name, shape, rows, None, None, f"PyTorch cannot convert it: {str(problem).splitlines()[0]}"), None
    times = [_microseconds(lambda w=each: functional.linear(input, w, layer.bias)) for each in (weight, sparse)]
    if not bool(error.isfinite().all()):
        return Row(name, shape, rows, *times, "stays: the sparse product is not finite"), None
    wins = times[1] < times[0]
    return Row(name, shape, rows, *times, "converted" if wins else "stays: dense is quicker"), sparse if wins else None


@torch.no_grad()
def convert(model: nn.Module, example_batch: tuple, verbosity: int, backend: str) -> list[Row]:
    """Converts the linear layers that win at this batch; see `ASP.to_semi_structured`."""
    if backend not in ("torch", "torchao"):
        raise ValueError(f"backend={backend!r} is not known; use 'torch' or 'torchao'")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if not torch.cuda.is_available() or any(on_host(layer.weight) for layer in layers.values()):
        raise RuntimeError("to_semi_structured times layers on sparse tensor cores: move the model to a GPU first")
    if backend == "torchao":
        try:
            torchao: Any = importlib.import_module("torchao.sparsity")
        except ImportError as missing:
            raise RuntimeError("backend='torchao' needs the torchao package, which cannot be imported") from missing
    inputs: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, given, name=name: inputs.update({name: given[0]}))
        for name, layer in layers.items()
    ]
    try:
        model(*example_batch)
    finally:
        for hook in hooks:
            hook.remove()
    found = {name: _measure(name, layer, inputs.get(name)) for name, layer in layers.items()}
    winners = {id(layers[name]) for name, (_, sparse) in found.items() if sparse is not None}
    if backend == "torchao" and winners:
        torchao.sparsify_(model, torchao.semi_sparse_weight(), lambda module, name: id(module) in winners)
    for name, (_, sparse) in found.items():
        if sparse is not None and backend == "torch":
            layers[name].weight = nn.Parameter(sparse, requires_grad=False)
    table = [row for row, _ in found.values()]
    if verbosity:
        print(f"{'layer':32} {'weight':>14} {'rows':>8} {'dense us':>9} {'sparse us':>9}")
        for row in table:
            times = " ".join(f"{'-' if time is None else f'{time:.1f}':>9}" for time in (row.dense, row.sparse))
            print(f"{row.name:32} {'x'.join(map(str, row.shape)):>14} {row.rows:8} {times}  {row.outcome}")
    return table
