"""Losses of rows of a linear head that are Python functions, computed with their gradients in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import _library
from . import chunks, config, rows
from .head import check_head, localised, make_head
from .linear import finished
from .log_probs import linear_log_probs

NAMES = ("lse", "own")


def linear_token_loss(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    function: Callable[[Tensor, slice], Tensor],
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    accumulation_dtype: torch.dtype | None = None,
    chunk_rows: int | None = None,
    group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Return the sum of `function(log_probs, part)` over all rows, and the log-probabilities without gradient.

    `function` returns the losses of the rows `part`, which may depend on their own log-probabilities alone. It is
    called once per chunk and differentiated there, so that losses and gradients take one pass over the head. Under
    torch.compile it is called once for all rows, and the logits are kept or computed again as in `linear_log_probs`.
    Has a first derivative only.
    """
    options = {"ignore_index": ignore_index, "temperature": temperature, "softcap": softcap, "logit_scale": logit_scale}
    sizes = {"accumulation_dtype": accumulation_dtype, "chunk_rows": chunk_rows}
    if torch.compiler.is_compiling():
        found = linear_log_probs(input, weight, target, bias, group=group, **options, **sizes).log_probs  # type: ignore[arg-type]
        flat = found.reshape(-1)  # type: ignore[union-attr]
        return function(flat, slice(0, flat.shape[0])).sum(), found.detach()  # type: ignore[union-attr]
    input, weight, bias, group = localised(input, weight, bias, group)
    head = make_head(
        input, ignore_index, logit_scale, softcap, temperature, accumulation_dtype, chunk_rows, group, False, False
    )
    check_head(input, weight, target, bias, None, (), head)
    labels = target.reshape(-1)
    ignored = labels == ignore_index

    def run(given: Any, wanted: Sequence[bool]) -> tuple[Tensor, Tensor, Any]:
        x, w, b = head.cast(*given)
        size, total = config.sizes(labels.shape[0], w, head.chunk_rows, head.accumulation_dtype)
        exchange = rows.exchange_of(head.group)
        classes = rows.own_classes(labels, None, w.shape[0], ignore_index, exchange)
        losses = torch.empty(labels.shape, dtype=_library.compute_dtype(x), device=x.device)

        def losses_and_slopes(table: Tensor, part: slice) -> tuple[Tensor, Tensor]:
            with torch.enable_grad():
                log_probs = (table[1] - table[0]).detach().requires_grad_()
                value = function(log_probs, part).masked_fill(ignored[part], 0.0)
                (slope,) = torch.autograd.grad(value.sum(), log_probs)
            return value.detach(), torch.stack([-slope, slope])

        no_top = labels.new_empty(0, dtype=torch.int64)
        table, gradients = chunks.one_pass(
            x, w, b, classes, head.transform, NAMES, no_top, losses, losses_and_slopes, wanted, total, size
        )
        first = chunks.input_gradient(gradients[0], exchange, False)
        return losses.sum(), table[1] - table[0], (first, *gradients[1:])

    loss, log_probs = OnePassFunction.apply(input.reshape(-1, input.shape[-1]), weight, bias, run)
    return loss, log_probs.reshape(target.shape)


def chunked_logits_loss(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    function: Callable[[Tensor, slice], Tensor],
    factors: Sequence[float],
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sum over all rows of a linear head of factors times losses; also the sum of each loss, detached.

    `input` is (N, H). `function(logits, part)` returns several losses of each row `part` of the float32 logits,
    [factors, rows]. It is called and differentiated once per chunk, so that memory holds one chunk of logits at a time.
    Under torch.compile it is called once for all logits. Has a first derivative only.
    """
    head = make_head(input, -100, 1.0, None, 1.0, None, chunk_rows, None, False, False)
    check_head(input, weight, input.new_empty(input.shape[:1], dtype=torch.int64), bias, None, (), head)
    if torch.compiler.is_compiling():
        x, w, b = head.cast(input, weight, bias)
        found = function(functional.linear(x, w, b).to(_library.compute_dtype(x)), slice(0, input.shape[0])).sum(-1)
        return _weighted(found, factors), found.detach()

    def run(given: Any, wanted: Sequence[bool]) -> tuple[Tensor, Tensor, Any]:
        x, w, b = head.cast(*given)
        size, total = config.sizes(x.shape[0], w, head.chunk_rows, None)
        dtype = _library.compute_dtype(x)
        sums = torch.zeros(len(factors), dtype=dtype, device=x.device)

        def visit(logits: Tensor, target: Tensor, part: slice) -> Callable[[], Any]:
            with torch.enable_grad():
                leaf = logits.to(dtype, copy=True).requires_grad_()
                found = function(leaf, part).sum(-1)
                if True in wanted:
                    (gradient,) = torch.autograd.grad(_weighted(found, factors), leaf)
                    target.copy_(gradient)
            sums.add_(found.detach())
            return lambda: None

        gradients = chunks.walk(x, w, b, visit, wanted, total, size)
        return _weighted(sums, factors), sums, gradients

    return OnePassFunction.apply(input, weight, bias, run)


class OnePassFunction(torch.autograd.Function):
    """Autograd node of a loss whose gradients are computed together with it.

    `run(tensors, wanted)` returns the loss, another result without gradient, and the gradients of input, weight and
    bias.
    """

    @staticmethod
    def forward(ctx, input, weight, bias, run):  # type: ignore[override]
        ctx.save_for_backward(input, weight, bias)
        ctx.run = run
        loss, other, gradients = run((input, weight, bias), ctx.needs_input_grad[:3])
        ctx.gradients = gradients
        ctx.mark_non_differentiable(other)
        return loss, other

    @staticmethod
    @_library.once_differentiable
    def backward(ctx, loss_gradient, _):  # type: ignore[override]
        given, wanted = ctx.saved_tensors, ctx.needs_input_grad[:3]
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:  # a second backward pass through a retained graph
            _, _, gradients = ctx.run(given, wanted)
        found = (
            finished(gradient if want else None, loss_gradient, tensor, False)
            for gradient, tensor, want in zip(gradients, given, wanted, strict=True)
        )
        return *found, None


def _weighted(sums: Tensor, factors: Sequence[float]) -> Tensor:
    return torch.stack([factor * each for factor, each in zip(factors, sums, strict=True)]).sum()
