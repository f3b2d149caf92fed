"""Pruned linear layers in the format of sparse tensor cores, where that is quicker."""

from __future__ import annotations

import importlib
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
    pruned = int((weight.detach().reshape(-1, 4) != 0).sum(1).max()) <= 2
    return None if pruned else "it is not pruned to 2 of 4"


def _microseconds(input: Tensor, weight: Tensor, bias: Tensor | None) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for repeat in range(_WARM_UP + _REPEATS):
        if repeat == _WARM_UP:
            start.record()
        functional.linear(input, weight, bias)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / _REPEATS


def _measure(name: str, layer: nn.Linear, input: Tensor | None) -> tuple[Row, Tensor | None]:
    """A row of the table, and the sparse weight if it is the quicker one."""
    weight, bias = layer.weight.detach(), layer.bias
    row = Row(name, tuple(weight.shape), 0, None, None, _obstacle(weight) or "it was not used")
    if input is None or _obstacle(weight):
        return row, None
    row = row._replace(rows=input.numel() // input.shape[-1])
    try:
        sparse: Any = torch.sparse.SparseSemiStructuredTensorCUSPARSELT.from_dense(weight)
        finite = bool(functional.linear(input, sparse, bias).isfinite().all())
    except Exception as problem:  # PyTorch says in many ways that it was built without, or that a shape does not fit
        return row._replace(outcome=f"PyTorch cannot convert it: {str(problem).splitlines()[0]}"), None
    row = row._replace(dense=_microseconds(input, weight, bias), sparse=_microseconds(input, sparse, bias))
    if finite and row.sparse < row.dense:  # type: ignore[operator]
        return row._replace(outcome="converted"), sparse
    return row._replace(outcome="stays: dense is quicker" if finite else "stays: its output is not finite"), None


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
    inputs: dict[nn.Module, Tensor] = {}
    see = lambda layer, given: inputs.update({layer: given[0]})  # noqa: E731
    hooks = [layer.register_forward_pre_hook(see) for layer in layers.values()]
    try:
        model(*example_batch)
    finally:
        for hook in hooks:
            hook.remove()
    found = {layer: _measure(name, layer, inputs.get(layer)) for name, layer in layers.items()}
    winners = {layer: sparse for layer, (_, sparse) in found.items() if sparse is not None}
    if backend == "torchao" and winners:
        torchao.sparsify_(model, torchao.semi_sparse_weight(), lambda module, name: module in winners)
    for layer, sparse in winners.items() if backend == "torch" else ():
        layer.weight = nn.Parameter(sparse, requires_grad=False)
    table = [row for row, _ in found.values()]
    if verbosity:
        print(f"{'layer':32} {'weight':>14} {'rows':>8} {'dense us':>9} {'sparse us':>9}")
        for row in table:
            times = " ".join(f"{'-' if time is None else f'{time:.1f}':>9}" for time in (row.dense, row.sparse))
            print(f"{row.name:32} {'x'.join(map(str, row.shape)):>14} {row.rows:8} {times}  {row.outcome}")
    return table
