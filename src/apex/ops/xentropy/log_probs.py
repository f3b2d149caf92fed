"""Log-probabilities, entropies and other statistics of the rows of a linear head, a chunk of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import _library
from . import chunks, config, reference
from .head import Head, TokenOutputs, check_head, localised, make_head, needed_statistics, token_outputs


def linear_log_probs(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    outputs: Sequence[str] = ("log_probs",),
    keep_logits: str | bool | int = "auto",
    accumulation_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    group: Any = None,
    sequence_parallel: bool = False,
) -> TokenOutputs:
    """Return log-probabilities of the targets, and other values of each row, of a linear head.

    `linear_cross_entropy` describes the arguments. `outputs` names fields of `TokenOutputs`; other fields are None.
    `log_probs` and `entropy` are differentiable.

    The backward pass needs the logits again. They are kept in the dtype of the matrix products if they take at most
    `keep_logits` bytes ("auto": 2 GiB; True: always; False: never), else computed once more.
    """
    input, weight, bias, group = localised(input, weight, bias, group)
    options = (ignore_index, logit_scale, softcap, temperature, accumulation_dtype, chunk_rows)
    head = make_head(input, *options, group, sequence_parallel, keep_logits)
    check_head(input, weight, target, bias, None, outputs, head)
    names = needed_statistics(("lse", *outputs), head.group)
    tensors = (input.reshape(-1, input.shape[-1]), weight, bias, target.reshape(-1), None)
    table, top, _ = LinearRowsFunction.apply(*tensors, " ".join(names), head)
    names = [name for name in names if name != "top"]
    return token_outputs(outputs, table, names, top, target, ignore_index)


class LinearRowsFunction(torch.autograd.Function):
    """Autograd node of the statistics of rows; its arguments were checked, and its input has two dimensions.

    Returns the table of statistics, the top classes and the number of classes. Gradients of "squares" and "peak" are
    not computed.
    """

    @staticmethod
    def forward(ctx, input, weight, bias, labels, class_weight, names, head):  # type: ignore[override]
        tensors = head.cast(input, weight, bias)
        size, _ = config.sizes(labels.shape[0], weight, head.chunk_rows, head.accumulation_dtype)
        needed = head.differentiable and True in ctx.needs_input_grad[:3]
        kept_bytes = labels.shape[0] * chunks.row_stride(weight.shape[0]) * head.compute.itemsize
        run: Any = torch.ops.apex.linear_rows if torch.compiler.is_compiling() else chunks.linear_rows
        table, top, kept, classes = run(
            *tensors, labels, class_weight, list(head.transform), head.ignore_index, names,
            needed and kept_bytes <= head.kept_bytes, size, head.group, head.sequence_parallel,
        )  # fmt: skip
        ctx.save_for_backward(input, weight, bias, labels, class_weight, table, kept)
        ctx.names, ctx.head = names, head
        ctx.is_compiled = torch.compiler.is_compiling()
        ctx.mark_non_differentiable(top, classes)
        return table, top, classes

    @staticmethod
    def backward(ctx, gradient, *_):  # type: ignore[override]
        input, weight, bias, labels, class_weight, table, kept = ctx.saved_tensors
        given, head, wanted = (input, weight, bias), ctx.head, ctx.needs_input_grad[:3]
        if not ctx.is_compiled and torch.is_grad_enabled():  # create_graph=True
            names = [name for name in ctx.names.split() if name != "top"]

            def statistics(*tensors: Any) -> Tensor:
                return statistics_of_logits(tensors, labels, class_weight, names, head)

            return *differentiable_gradients(statistics, gradient, given, wanted, head), *[None] * 4
        size, total = config.sizes(labels.shape[0], weight, head.chunk_rows, head.accumulation_dtype)
        backward: Any = torch.ops.apex.linear_rows_backward if ctx.is_compiled else chunks.linear_rows_backward
        found = backward(
            gradient, table, *head.cast(*given), labels, class_weight, kept, list(head.transform), head.ignore_index,
            ctx.names, list(wanted), total, size, head.group, head.sequence_parallel,
        )  # fmt: skip
        results = (g.to(t.dtype) if want else None for g, t, want in zip(found, given, wanted, strict=True))
        return *results, *[None] * 4


def statistics_of_logits(
    tensors: Sequence[Tensor | None], labels: Tensor, class_weight: Tensor | None, names: Sequence[str], head: Head
) -> Tensor:
    """Return the table of statistics through all logits, twice differentiable."""
    logits = functional.linear(*head.cast(*tensors))
    table = reference.statistics(logits, labels, class_weight, head.transform, head.ignore_index, names)
    factor = [1.0 / logits.shape[-1] if name in ("mean", "weighted") else 1.0 for name in names]
    return torch.stack([row if f == 1.0 else row * f for row, f in zip(table, factor, strict=True)])


def differentiable_gradients(
    function: Callable[..., Tensor], gradient: Tensor, given: tuple, wanted: Sequence[bool], head: Head
) -> tuple[Tensor | None, ...]:
    """Return gradients of `function` of input, weight and bias that can be differentiated again."""
    if head.group:
        raise RuntimeError("a linear head whose classes several ranks share has a first derivative only")
    return _library.differentiable_gradients(function, given, gradient, wanted)
