"""Pruned linear layers in the format of sparse tensor cores, where that is quicker."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...ops._host import on_host


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
    from torch.utils.benchmark import Timer

    arguments = {"linear": functional.linear, "input": input, "weight": weight, "bias": bias}
    timer = Timer("linear(input, weight, bias)", globals=arguments)
    timer.timeit(3)
    return timer.timeit(20).mean * 1e6


def _measure(name: str, layer: nn.Linear, input: Tensor | None) -> tuple[Row, Any]:
    """A row of the table, and the sparse weight if it is the quicker one."""
    weight, bias = layer.weight.detach(), layer.bias
    reason = _obstacle(weight) or ("it was not used" if input is None else None)
    if input is None or reason is not None:
        return Row(name, tuple(weight.shape), 0, None, None, str(reason)), None
    row = Row(name, tuple(weight.shape), input.numel() // input.shape[-1], None, None, "converted")
    try:
        sparse = torch.sparse.SparseSemiStructuredTensorCUSPARSELT.from_dense(weight)
        finite = bool(functional.linear(input, sparse, bias).isfinite().all())
    except Exception as problem:  # PyTorch says in many ways that it was built without, or that a shape does not fit
        return row._replace(outcome=f"PyTorch cannot convert it: {str(problem).splitlines()[0]}"), None
    times = _microseconds(input, weight, bias), _microseconds(input, sparse, bias)
    row = row._replace(dense=times[0], sparse=times[1])
    if finite and times[1] < times[0]:
        return row, sparse
    return row._replace(outcome="stays: dense is quicker" if finite else "stays: its output is not finite"), None


@torch.no_grad()
def to_semi_structured(model: nn.Module, *example_batch: Any, verbosity: int = 2) -> list[Row]:
    """Converts the linear layers of a pruned model that are quicker as sparse ones at this batch, for inference.

    Every layer is timed both ways with the inputs that it gets; those that win get a weight in the format of sparse
    tensor cores. Prints a table and returns its rows.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if not torch.cuda.is_available() or any(on_host(layer.weight) for layer in layers.values()):
        raise RuntimeError("to_semi_structured times layers on sparse tensor cores: move the model to a GPU first")
    inputs: dict[nn.Module, Tensor] = {}
    see = lambda layer, given: inputs.update({layer: given[0]})  # noqa: E731
    hooks = [layer.register_forward_pre_hook(see) for layer in layers.values()]
    try:
        model(*example_batch)
    finally:
        for hook in hooks:
            hook.remove()
    if verbosity:
        print(f"{'layer':32} {'weight':>14} {'rows':>8} {'dense us':>9} {'sparse us':>9}")
    table = []
    for name, layer in layers.items():
        row, sparse = _measure(name, layer, inputs.get(layer))
        table.append(row)
        if sparse is not None:
            layer.weight = nn.Parameter(sparse, requires_grad=False)
        if verbosity:
            times = " ".join(f"{'-' if time is None else f'{time:.1f}':>9}" for time in (row.dense, row.sparse))
            print(f"{row.name:32} {'x'.join(map(str, row.shape)):>14} {row.rows:8} {times}  {row.outcome}")
    return table
