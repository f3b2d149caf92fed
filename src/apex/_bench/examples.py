"""Benchmark cases and random cases of every family of ops, from the examples in `apex.ops.<family>.examples`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..ops import _examples, _tolerance, all_families
from ..ops._examples import Example, Make, Random, Row, Sizes
from . import other_packages
from .compiling import compiled
from .directions import SHORT, call, long_name, times
from .registry import OURS, Case, Expected, Family, Prepared

# Tensors of less than this part of the largest one, such as biases, do not count as memory traffic.
NEGLIGIBLE = 1e-2


def families() -> dict[str, Family]:
    """Return the families whose examples have rows, by name."""
    summaries = {family.name: family.summary for family in all_families().values()}
    return {
        name: Family(name, summaries[name], functools.partial(_cases, examples))
        for name, examples in _examples.all_examples().items()
        if any(example.listed for example in examples)
    }


def _cases(examples: Sequence[Example], device: torch.device, quick: bool) -> list[Case]:
    """Return the rows for a device; a quick run has only each example's first row of passes and first row of steps."""
    rows = [(example, row) for example in examples for row in example.listed if row.device == device.type]
    if quick:
        first: dict[tuple[str, ...], tuple[Example, Row]] = {}
        for example, row in rows:
            first.setdefault((example.name, *row.ways), (example, row))
        rows = list(first.values())
    return [_case(example, row, way) for example, row in rows for way in row.ways]


def _case(example: Example, row: Row, way: str) -> Case:
    words = {"short": SHORT[row.dtype], "dtype": long_name(row.dtype), "shape": times(row.sizes), "s": row.sizes}
    # A title shows the direction at "{way}", or nothing for a forward pass. Other titles end with the direction.
    title = example.title if "{way}" in example.title else example.title + " " + way
    name = title.format(name=example.name, way="" if way == "fwd" else f" {way}", **words)
    forward, backward = (example.bytes_moved or functools.partial(_traffic, example))(row.dtype, *row.sizes)
    moved = {"fwd": forward, "bwd": backward}.get(way, forward + backward)
    make = functools.partial(prepare, example, row.sizes, row.dtype, way)
    # A step is timed by the wall clock, as a training loop sees it.
    return Case(name, round(moved), make, "wall" if way == "step" else "device", row.note)


def _traffic(example: Example, dtype: torch.dtype, *sizes: int) -> tuple[int, int]:
    """Return the bytes of a forward pass, which reads its arguments and writes its outputs, and of a backward pass.

    The backward pass reads the outputs' gradients and the arguments, and writes the arguments' gradients.
    """
    made = _examples.Call(example, sizes, Make(dtype, torch.device("meta")))
    inputs, outputs = _examples.tensors_of(made.arguments), made.outputs(example.torch)
    least = NEGLIGIBLE * max(each.nbytes for each in (*inputs, *outputs))
    read, written, gradients = (
        sum(each.nbytes for each in tensors if each.nbytes >= least) for tensors in (inputs, outputs, made.leaves)
    )
    return read + written, written + read + gradients


def implementations(example: Example, device: torch.device, compile: bool) -> dict[str, Callable[[], Callable]]:
    """Return functions that make our op and PyTorch's; on a GPU also torch.compile's and other packages'."""
    makers: dict[str, Callable[[], Callable]] = {OURS: lambda: example.function, "torch": lambda: example.torch}
    makers |= {name: functools.partial(_returned, peer) for name, peer in example.peers.items()}
    if compile and device.type == "cuda":
        if example.compiles:
            makers["compile"] = lambda: compiled(example.torch, device)
        makers |= other_packages.installed(example.name)
    return makers


def _returned(peer: Callable[..., Any]) -> Callable[..., Any]:
    return peer


def prepare(example: Example, sizes: Sizes, dtype: torch.dtype, way: str, device: torch.device) -> Prepared:
    """Prepare a direction of an example: "fwd", "bwd", both, or "step" without torch.compile."""
    makers = implementations(example, device, way != "step")
    timed = _examples.Call(example, sizes, Make(dtype, device))
    smaller = sizes if example.checked is None else example.checked(*sizes)
    if smaller == sizes:
        return Prepared(_calls(makers, timed, way), _expected(timed, way))
    checked = _examples.Call(example, smaller, Make(dtype, device))
    return Prepared(_calls(makers, checked, way), _expected(checked, way), _calls(makers, timed, way))


def _calls(makers: dict[str, Callable[[], Callable]], made: _examples.Call, way: str) -> dict[str, Any]:
    arguments = tuple(made.arguments.values())
    gradients: Tensor | list[Tensor] = made.gradients(made.outputs())
    if len(gradients) == 1:
        gradients = gradients[0]
    given = arguments, made.leaves, gradients, way
    return {name: functools.partial(call, make, *given) for name, make in makers.items()}


def _expected(made: _examples.Call, way: str) -> list[Expected]:
    # Before the exact results: gradients are rounded to the dtypes of the first outputs.
    dtypes = [*(each.dtype for each in made.gradients(made.outputs())), *(leaf.dtype for leaf in made.leaves)]
    outputs = len(made.exact) - len(made.leaves)
    slacks = made.slacks(dtypes)
    expected = [Expected(*each) for each in zip(made.exact, dtypes, made.reductions(), slacks, strict=True)]
    return expected[:outputs] if way == "fwd" else expected[outputs:]


def sweeps() -> dict[str, Callable[[Random, torch.device], tuple[str, Callable[[], dict[str, Prepared]]]]]:
    """Return, by family, a function that draws random sizes: it returns a case's name and a function for its passes."""
    return {
        name: functools.partial(_drawn, drawing)
        for name, examples in _examples.all_examples().items()
        if (drawing := [example for example in examples if example.draw is not None])
    }


def _drawn(
    examples: Sequence[Example], random: Random, device: torch.device
) -> tuple[str, Callable[[], dict[str, Prepared]]]:
    example, dtype = random.choice(examples), random.dtype()
    assert example.draw is not None
    sizes = example.draw(random)
    layout, seed = random.layout() if example.strided else "", random.getrandbits(32)
    make = functools.partial(_passes, example, sizes, dtype, device, seed, layout)
    return f"{example.name} {long_name(dtype)} {times(sizes)} {layout}".strip(), make


def _passes(
    example: Example, sizes: Sizes, dtype: torch.dtype, device: torch.device, seed: int, layout: str
) -> dict[str, Prepared]:
    """Prepare both passes of our op and of PyTorch's.

    The tolerance also allows errors relative to the typical size of the values, whose rounding each element inherits.
    """
    made = _examples.Call(example, sizes, Make(dtype, device, seed, layout))
    makers = implementations(example, device, compile=False)
    passes = {}
    for way in ("fwd", "bwd"):
        expected = [
            replace(each, slack=each.slack + 4 * _tolerance.tolerance(each.dtype)[0] * _usual(each.value))
            for each in _expected(made, way)
        ]
        passes[way] = Prepared(_calls(makers, made, way), expected)
    return passes


def _usual(values: Tensor) -> float:
    return math.sqrt(float(values.square().mean())) if values.numel() else 0.0
