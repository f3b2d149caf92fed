"""Examples of layer norm and RMS norm, alone and of a sum with a residual."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .._examples import Example, Make, Public, Random, Row, Sizes
from .op import layer_norm, rms_norm
from .residual import add_norm

_DTYPES = (torch.bfloat16, torch.float32)
_LISTED = [
    *(Row("cuda", d, s) for d in _DTYPES for s in ((16384, 1024), (16384, 4096), (8192, 8192), (4096, 16384))),
    *(Row("cuda", d, s, ["step"]) for d in _DTYPES for s in ((128, 1024), (1024, 1024), (4096, 1024))),
    *(Row("cpu", d, s) for d in _DTYPES[::-1] for s in ((1024, 1024), (4096, 1024))),
    *(Row("cpu", d, s, ["step"]) for d in _DTYPES[::-1] for s in ((128, 1024), (1024, 1024))),
]
# Widths of models, with more rows than programs.
_LARGE = [(4096, 768), (2048, 1024), (1000, 4096), (517, 5120), (600, 8192), (300, 16384), (150, 32768)]
_FUNCTIONS = "normalization.fused_layer_norm:"
_LAYER_NORMS = [
    *(Public(f"normalization:{name}", "input", module=lambda *sizes: sizes[-1:], memory_efficient=efficient)
      for name in ("FusedLayerNorm", "MixedFusedLayerNorm") for efficient in (False, True)),
    Public("contrib.layer_norm:FastLayerNorm", "input", module=lambda *sizes: sizes[-1:]),
    Public(f"{_FUNCTIONS}fused_layer_norm_affine", "input", "weight", "bias", "normalized_shape"),
    Public(f"{_FUNCTIONS}mixed_dtype_fused_layer_norm_affine", "input", "weight", "bias", "normalized_shape"),
    Public(f"{_FUNCTIONS}fused_layer_norm", "input", "normalized_shape"),
    Public("ops:layer_norm", "input", "normalized_shape", "weight", "bias"),
    Public("contrib.openfold_triton:LayerNormSmallShapeOptImpl.apply", "input", "normalized_shape", "weight", "bias"),
]  # fmt: skip
_RMS_NORMS = [
    *(Public(f"normalization:{name}", "input", module=lambda *sizes: sizes[-1:], memory_efficient=efficient)
      for name in ("FusedRMSNorm", "MixedFusedRMSNorm") for efficient in (False, True)),
    Public(f"{_FUNCTIONS}fused_rms_norm_affine", "input", "weight", "normalized_shape"),
    Public(f"{_FUNCTIONS}mixed_dtype_fused_rms_norm_affine", "input", "weight", "normalized_shape"),
    Public(f"{_FUNCTIONS}fused_rms_norm", "input", "normalized_shape"),
    Public(f"{_FUNCTIONS}manual_rms_norm", "input", "normalized_shape", "weight", "eps"),
    Public("ops:rms_norm", "input", "normalized_shape", "weight"),
]  # fmt: skip


def _arguments(make: Make, *sizes: int, mean: bool, affine: bool = True) -> dict[str, Any]:
    columns = sizes[-1]
    arguments: dict[str, Any] = {"input": make.normal(*sizes), "normalized_shape": (columns,)}
    arguments["weight"] = make.weight(columns) if affine else None
    if mean:
        arguments["bias"] = make.weight(columns) if affine else None
    return {**arguments, "eps": 1e-5}


def _draw(random: Random) -> Sizes:
    columns, parts = random.length(32, 20000), random.choice((1, 2, 8))
    return parts, -(-random.rows(columns) // parts), columns


def _add_arguments(make: Make, rows: int, columns: int, mean: bool) -> dict[str, Any]:
    branch, residual, added = make.normal(rows, columns), make.normal(rows, columns), make.normal(columns)
    weight, bias = make.weight(columns), make.weight(columns) if mean else None
    return {"branch": branch, "residual": residual, "added": added, "weight": weight, "bias": bias}


def _add_torch(
    branch: Tensor, residual: Tensor, added: Tensor, weight: Tensor, bias: Tensor | None, mean: bool
) -> tuple[Tensor, Tensor]:
    total, shape = residual + (branch + added), branch.shape[-1:]
    if mean:
        return functional.layer_norm(total, shape, weight, bias, 1e-5), total
    return functional.rms_norm(total, shape, weight, 1e-5), total


def _examples(name: str, mean: bool) -> list[Example]:
    function: Any = layer_norm if mean else rms_norm
    by_torch: Any = functional.layer_norm if mean else functional.rms_norm
    plain = Example(
        name,
        function,
        functools.partial(_arguments, mean=mean),
        torch=by_torch,
        sizes="rows x columns",
        # A row with a mask, short rows, rows of a large block.
        small=[(9, 192), (60, 8), (48, 1000)],
        large=_LARGE,
        draw=_draw,
        listed=_LISTED,
        strided=True,
        usual=(16384, 4096),
        public=_LAYER_NORMS if mean else _RMS_NORMS,
        extensions=["fused_layer_norm_cuda"],
        asks={
            "norm.forward_config": lambda rows, row_length, subtract_mean: (
                (rows, row_length) if subtract_mean == mean else None
            ),
            "norm.backward_config": lambda rows, row_length, bias_grad: (
                (rows, row_length) if bias_grad == mean else None
            ),
        },
    )
    return [
        plain,
        Example(
            f"{name}_plain",
            function,
            functools.partial(_arguments, mean=mean, affine=False),
            torch=by_torch,
            sizes="rows x columns",
            small=[(6, 100)],
            draw=_draw,
            strided=True,
        ),
        Example(
            f"{name}_memory_efficient",
            functools.partial(function, memory_efficient=True),
            functools.partial(_arguments, mean=mean),
            torch=by_torch,
            sizes="rows x columns",
            small=[(9, 192)],
            # The input is computed back from the rounded output.
            slack=lambda dtype: 8 * torch.finfo(dtype).eps,
            differentiable_twice=False,
        ),
        Example(
            f"add_{name}",
            lambda branch, residual, added, weight, bias: add_norm(
                branch, residual, added, branch.shape[-1:], weight, bias, subtract_mean=mean
            ),
            functools.partial(_add_arguments, mean=mean),
            torch=functools.partial(_add_torch, mean=mean),
            sizes="rows x columns",
            small=[(9, 192)],
            # The sum is rounded before it is normalised.
            slack=lambda dtype: 8 * torch.finfo(dtype).eps,
        ),
    ]


EXAMPLES = [*_examples("layer_norm", True), *_examples("rms_norm", False)]
