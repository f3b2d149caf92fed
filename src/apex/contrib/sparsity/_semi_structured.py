"""Converts pruned linear layers to the format of sparse tensor cores if that is faster."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ...ops._host import on_host


class Row(NamedTuple):
    """A row of the table that is printed: a layer's times in microseconds, None if not measured, and the outcome."""

    name: str
    shape: tuple[int, ...]
    rows: int
    dense: float | None
    sparse: float | None
    outcome: str


def _obstacle(weight: Tensor) -> str | None:
    """Return why cuSPARSELt does not accept a weight, or None if it does."""
    if weight.dtype not in (torch.float16, torch.bfloat16):
        return f"its dtype is {weight.dtype}; float16 and bfloat16 are taken"
    if any(size < 16 or size % 8 for size in weight.shape):
        return "its sides are not multiples of 8, 16 at least"
    pruned = int((weight.reshape(-1, 4) != 0).sum(1).max()) <= 2
    return None if pruned else "it is not pruned to 2 of 4"


def _microseconds(*arguments: Tensor | None) -> float:
    from torch.utils.benchmark import Timer

    timer = Timer("linear(*arguments)", globals={"linear": linear, "arguments": arguments})
    timer.timeit(3)
    return timer.timeit(20).mean * 1e6


def _measure(row: Row, layer: nn.Linear, input: Tensor) -> tuple[Row, Any]:
    """Return the row with times and outcome, and the sparse weight if it is faster."""
    weight, bias = layer.weight.detach(), layer.bias
    try:
        sparse = torch.sparse.SparseSemiStructuredTensorCUSPARSELT.from_dense(weight)
        finite = bool(linear(input, sparse, bias).isfinite().all())
    except Exception as problem:  # PyTorch raises many types if it was built without support or a shape does not fit
        return row._replace(outcome=f"PyTorch cannot convert it: {str(problem).splitlines()[0]}"), None
    dense, quick = _microseconds(input, weight, bias), _microseconds(input, sparse, bias)
    outcome = "stays: dense is quicker" if finite else "stays: its output is not finite"
    wins = finite and quick < dense
    row = row._replace(rows=input.numel() // input.shape[-1], dense=dense, sparse=quick)
    return row._replace(outcome="converted" if wins else outcome), sparse if wins else None


@torch.no_grad()
def to_semi_structured(model: nn.Module, *example_batch: Any, verbosity: int = 2) -> list[Row]:
    """Convert the linear layers of a pruned model that are faster as sparse layers at this batch, for inference.

    Each layer is timed dense and sparse with the inputs that it gets. If sparse is faster, its weight is converted to
    the format of sparse tensor cores. Prints a table and returns its rows.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if not torch.cuda.is_available() or any(on_host(layer.weight) for layer in layers.values()):
        raise RuntimeError("to_semi_structured times layers on sparse tensor cores: move the model to a GPU first")
    inputs: dict[nn.Module, Tensor] = {}
    see = lambda layer, arguments: inputs.update({layer: arguments[0]})  # noqa: E731
    hooks = [layer.register_forward_pre_hook(see) for layer in layers.values()]
    try:
        model(*example_batch)
    finally:
        for hook in hooks:
            hook.remove()
    table = []
    for name, layer in layers.items():
        reason = _obstacle(layer.weight.detach()) or (None if layer in inputs else "it was not used")
        row, sparse = Row(name, tuple(layer.weight.shape), 0, None, None, str(reason)), None
        if reason is None:
            row, sparse = _measure(row, layer, inputs[layer])
        if sparse is not None:
            layer.weight = nn.Parameter(sparse, requires_grad=False)
        table.append(row)
    if verbosity:
        print(f"{'layer':32} {'weight':>14} {'rows':>8} {'dense us':>9} {'sparse us':>9}")
        for row in table:
            times = " ".join(f"{'-' if time is None else f'{time:.1f}':>9}" for time in (row.dense, row.sparse))
            print(f"{row.name:32} {'x'.join(map(str, row.shape)):>14} {row.rows:8} {times}  {row.outcome}")
    return table
