"""Calls of the ops that `apex build` knows by name; each runs forward and backward, or an optimizer's step."""

from __future__ import annotations

import difflib
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import apex.optimizers
from apex.ops import _examples

Shape = tuple[int, ...]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Op(NamedTuple):
    """An op by name: `sizes` are the numbers of a shape and an example, `extensions` the compiled names."""

    run: Callable[[_examples.Make, Shape], object]
    sizes: tuple[str, str]
    extensions: tuple[str, ...] = ()


def _optimizer(make: _examples.Make, s: Shape, name: str, **options: Any) -> None:
    parameters = [nn.Parameter(torch.zeros(shape, dtype=make.dtype, device=make.device)) for shape in (s, s[:1])]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    getattr(apex.optimizers, name)(parameters, lr=0.1, **options).step()


def _step(name: str, *extensions: str, **options: Any) -> Op:
    return Op(partial(_optimizer, name=name, **options), ("rows x columns", "4096x1024"), ("amp_C", *extensions))


OPS = {
    "adam": _step("FusedAdam", "fused_adam_cuda"),
    "lamb": _step("FusedLAMB", "fused_lamb_cuda"),
    "sgd": _step("FusedSGD", momentum=0.9),
    "novograd": _step("FusedNovoGrad"),
    "adagrad": _step("FusedAdagrad"),
}


def _op(example: _examples.Example) -> Op:
    """Return an example as an op of `apex build`."""

    def run(make: _examples.Make, shape: Shape) -> list[Tensor]:
        return _examples.Call(example, shape, make).results()

    return Op(run, (example.sizes, "x".join(map(str, example.typical))), tuple(example.extensions))


def known_ops() -> dict[str, Op]:
    """Return everything that `apex build` knows by name: examples with sizes of real models, optimizers' steps."""
    return {**{name: _op(example) for name, example in _examples.by_name() if example.listed and example.builds}, **OPS}


class Call(NamedTuple):
    """A call whose kernels are compiled: an op with a shape and a dtype, or a script."""

    name: str
    run: Callable[[torch.device], None]


def parse_call(text: str, dtype: str) -> Call:
    """Return the call named by `NAME`, `NAME:SHAPE`, `NAME:SHAPE:DTYPE` or the path of a Python file."""
    if text.endswith(".py"):
        if not Path(text).is_file():
            raise FileNotFoundError(f"there is no script {text!r}")
        return Call(text, partial(_run_script, text))
    name, *rest = text.split(":")
    known = known_ops()
    if name not in known:
        hint = "".join(f"did you mean {close}? " for close in difflib.get_close_matches(name, known, n=1))
        raise ValueError(f"no op is called {name!r}; {hint}known: {', '.join(known)}, or the path of a .py file")
    op, (words, example) = known[name], known[name].sizes
    shape, dtype = [*rest, ""][0] or example, [*rest, "", ""][1] or dtype
    if len(rest) > 2 or dtype not in DTYPES:
        raise ValueError(f"{text!r}: write {name}:{example}:DTYPE, DTYPE one of {', '.join(DTYPES)}")
    sizes = shape.split("x")
    if len(sizes) != len(words.split(" x ")) or not all(size.isdecimal() and int(size) for size in sizes):
        raise ValueError(f"{text!r}: the shape of {name} is {words}, such as {name}:{example}")
    run = partial(_run_op, op, tuple(map(int, sizes)), DTYPES[dtype])
    return Call(f"{name}:{shape}:{dtype}", run)


def _run_op(op: Op, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
    op.run(_examples.Make(dtype, device), shape)


def _run_script(path: str, device: torch.device) -> None:
    with device:
        runpy.run_path(path, run_name="__main__")
