"""Calls of the ops that `apex build` knows by name; each runs forward and backward, or an optimizer's step."""

from __future__ import annotations

import difflib
import functools
import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Maker:
    """Makes the tensors of a call."""

    dtype: torch.dtype
    device: torch.device

    def leaf(self, *shape: int, dtype: torch.dtype | None = None, channels_last: bool = False) -> Tensor:
        layout = torch.channels_last if channels_last else torch.contiguous_format
        values = torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)
        return values.contiguous(memory_format=layout).requires_grad_()

    def constant(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class Op:
    """An op by name: `sizes` are the numbers of a shape, `extensions` the compiled names that it stands behind."""

    run: Callable[[Maker, Shape], Tensor | None]
    sizes: tuple[str, ...]
    shape: Shape
    extensions: tuple[str, ...] = ()


def _norm(make: Maker, shape: Shape, mean: bool) -> Tensor:
    from apex.ops.norm import layer_norm, rms_norm

    x, weight = make.leaf(*shape), make.leaf(shape[-1])
    return layer_norm(x, shape[-1:], weight, make.leaf(shape[-1])) if mean else rms_norm(x, shape[-1:], weight)


def _softmax(make: Maker, shape: Shape, kind: str) -> Tensor:
    from apex.ops.softmax import masked_softmax

    mask = make.constant(shape[0], 1, *shape[2:], dtype=torch.bool) if kind == "masked" else None
    return masked_softmax(make.leaf(*shape), mask=mask, scale=0.125, causal=kind == "causal")


def _xentropy(make: Maker, shape: Shape) -> Tensor:
    from apex.contrib.xentropy import SoftmaxCrossEntropyLoss

    labels = make.constant(shape[0], dtype=torch.int64)
    return SoftmaxCrossEntropyLoss.apply(make.leaf(*shape), labels, 0.0, -100, True)


def _rope(make: Maker, shape: Shape) -> Tensor:
    from apex.transformer.functional import fused_apply_rotary_pos_emb

    return fused_apply_rotary_pos_emb(make.leaf(*shape), make.constant(shape[0], 1, 1, shape[-1], dtype=torch.float32))


def _swiglu(make: Maker, shape: Shape) -> Tensor:
    from apex.ops.glu import bias_glu

    return bias_glu(make.leaf(*shape), make.leaf(shape[-1]), "silu")


def _group_norm(make: Maker, shape: Shape) -> Tensor:
    from apex.ops.group_norm import group_norm

    x = make.leaf(*shape, channels_last=True)
    return group_norm(x, 32, make.leaf(shape[1]), make.leaf(shape[1]), 1e-5, "silu")


def _batch_norm(make: Maker, shape: Shape) -> Tensor:
    from apex.ops.batch_norm import batch_norm

    x = make.leaf(*shape, channels_last=True)
    weight, bias = (make.leaf(shape[1], dtype=torch.float32) for _ in range(2))
    return batch_norm(x, None, None, weight, bias, relu=True)


def _mlp(make: Maker, shape: Shape, activation: str) -> Tensor:
    from apex.ops.dense import dense_gelu_dense, mlp

    rows, outer, inner = shape
    first, second = make.leaf(inner, outer), make.leaf(outer, inner)
    biases = make.leaf(inner), make.leaf(outer)
    if activation == "gelu":
        return dense_gelu_dense(make.leaf(rows, outer), first, biases[0], second, biases[1])
    return mlp(make.leaf(rows, outer), (first, second), biases, activation)


def _focal_loss(make: Maker, shape: Shape) -> Tensor:
    from apex.contrib.focal_loss import focal_loss

    targets, positives = make.constant(*shape[:2], dtype=torch.int64), make.constant(1, dtype=torch.float32)
    return focal_loss(make.leaf(*shape), targets, positives, shape[-1], 0.25, 2.0, 0.0)


def _optimizer(make: Maker, shape: Shape, name: str, **options: Any) -> None:
    import apex.optimizers

    parameters = [nn.Parameter(make.leaf(*sizes).detach()) for sizes in (shape, shape[:1])]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = getattr(apex.optimizers, name)(parameters, lr=0.1, **options)
    optimizer.step()


_ROWS = ("rows", "columns")
_SCORES = ("batch", "heads", "queries", "keys")
_IMAGE = ("images", "channels", "height", "width")
_LAYERS = ("rows", "outer", "inner")


def _bound(function: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[Maker, Shape], Any]:
    return lambda make, shape: function(make, shape, *arguments, **options)


OPS = {
    "layer_norm": Op(_bound(_norm, True), _ROWS, (16384, 4096), ("fused_layer_norm_cuda",)),
    "rms_norm": Op(_bound(_norm, False), _ROWS, (16384, 4096), ("fused_layer_norm_cuda",)),
    "softmax": Op(_bound(_softmax, "scaled"), _SCORES, (8, 16, 1024, 1024), ("scaled_softmax_cuda",)),
    "masked_softmax": Op(
        _bound(_softmax, "masked"),
        _SCORES,
        (8, 16, 1024, 1024),
        ("scaled_masked_softmax_cuda", "generic_scaled_masked_softmax_cuda"),
    ),
    "causal_softmax": Op(
        _bound(_softmax, "causal"), _SCORES, (8, 16, 1024, 1024), ("scaled_upper_triang_masked_softmax_cuda",)
    ),
    "xentropy": Op(_xentropy, ("tokens", "classes"), (8192, 32000), ("xentropy_cuda",)),
    "rope": Op(
        _rope, ("length", "batch", "heads", "channels"), (2048, 4, 32, 128), ("fused_rotary_positional_embedding",)
    ),
    "swiglu": Op(_swiglu, _ROWS, (16384, 22016), ("fused_bias_swiglu",)),
    "group_norm": Op(_group_norm, _IMAGE, (8, 320, 64, 64)),
    "batch_norm": Op(_batch_norm, _IMAGE, (32, 256, 56, 56), ("bnp", "syncbn")),
    "dense_gelu_dense": Op(_bound(_mlp, "gelu"), _LAYERS, (8192, 1024, 4096), ("fused_dense_cuda",)),
    "mlp": Op(_bound(_mlp, "relu"), _LAYERS, (8192, 1024, 4096), ("mlp_cuda",)),
    "focal_loss": Op(_focal_loss, ("images", "anchors", "classes"), (8, 100_000, 90), ("focal_loss_cuda",)),
    "adam": Op(_bound(_optimizer, "FusedAdam"), _ROWS, (4096, 1024), ("amp_C", "fused_adam_cuda")),
    "lamb": Op(_bound(_optimizer, "FusedLAMB"), _ROWS, (4096, 1024), ("amp_C", "fused_lamb_cuda")),
    "sgd": Op(_bound(_optimizer, "FusedSGD", momentum=0.9), _ROWS, (4096, 1024), ("amp_C",)),
    "novograd": Op(_bound(_optimizer, "FusedNovoGrad"), _ROWS, (4096, 1024), ("amp_C",)),
    "adagrad": Op(_bound(_optimizer, "FusedAdagrad"), _ROWS, (4096, 1024), ("amp_C",)),
}


@dataclass(frozen=True)
class Call:
    """Something whose kernels are wanted: an op with a shape and a dtype, or a script."""

    name: str
    run: Callable[[torch.device], None]


def _run_op(op: Op, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
    output = op.run(Maker(dtype, device), shape)
    if output is not None:
        output.backward(torch.empty_like(output))


def _run_script(path: Path, device: torch.device) -> None:
    with device:
        runpy.run_path(str(path), run_name="__main__")


def parse_call(text: str, dtype: str) -> Call:
    """The call that `NAME`, `NAME:SHAPE`, `NAME:SHAPE:DTYPE` or the path of a Python file stands for."""
    if text.endswith(".py"):
        if not Path(text).is_file():
            raise ValueError(f"there is no script {text!r}")
        return Call(text, functools.partial(_run_script, Path(text)))
    name, *rest = text.split(":")
    if name not in OPS:
        close = difflib.get_close_matches(name, OPS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"no op is called {name!r}; {hint}known: {', '.join(OPS)}, or the path of a .py file")
    op, shape = OPS[name], "x".join(map(str, OPS[name].shape))
    if len(rest) > 2:
        raise ValueError(f"{text!r} has more than a name, a shape and a dtype; write {name}:{shape}:{dtype}")
    shape, dtype = [*rest, ""][0] or shape, [*rest, "", ""][1] or dtype
    if dtype not in DTYPES:
        raise ValueError(f"{text!r}: dtype {dtype!r} is not known; use one of {', '.join(DTYPES)}")
    sizes = shape.split("x")
    if len(sizes) != len(op.sizes) or not all(size.isdecimal() and int(size) for size in sizes):
        raise ValueError(f"{text!r}: the shape of {name} is {' x '.join(op.sizes)}, such as {name}:{shape_of(op)}")
    numbers = tuple(map(int, sizes))
    return Call(f"{name}:{shape}:{dtype}", functools.partial(_run_op, op, numbers, DTYPES[dtype]))


def shape_of(op: Op) -> str:
    """The default shape of an op as it is written on the command line."""
    return "x".join(map(str, op.shape))


def ops_behind(extensions: Sequence[str]) -> list[str]:
    """The names of the ops that stand behind these compiled names."""
    return [name for name, op in OPS.items() if set(op.extensions) & set(extensions)]
