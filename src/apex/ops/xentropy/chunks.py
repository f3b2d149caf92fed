"""Passes over a linear head, a chunk of rows at a time: never materialises all logits unless asked to keep them.

`walk` computes a chunk's logits, calls a function on them and multiplies their gradient with weight and input. Three
operators use it: `linear_xentropy` (losses and gradients in one pass), `linear_rows` (statistics of rows) and
`linear_rows_backward` (gradients of the head from the statistics' gradients). No `Op` declares them: every device runs
the same code, several results go to the caller, and autograd nodes save tensors before the cast to the products' dtype.

Letters: N rows, H features, V classes of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _library
from . import config, rows
from .op import FAMILY, launch_rows

# A function of a chunk's logits, the memory for their gradient, and the chunk's rows. It may start an exchange between
# ranks. The function that it returns waits for the exchange, writes the gradient and returns whether it wrote one.
Visit = Callable[[Tensor, Tensor, slice], Callable[[], Any]]


def walk(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    visit: Visit,
    wanted: Sequence[bool],
    accumulation_dtype: torch.dtype,
    chunk_rows: int,
    kept: Tensor | None = None,
    filled: bool = False,
    overlapped: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the wanted gradients of input (N x H), weight (V x H) and bias (V); unwanted ones have no elements.

    Input, weight and bias have one dtype; the gradients of weight and bias have `accumulation_dtype`. `kept` is memory
    for all logits; `filled` means that it already holds them. With `overlapped`, the next chunk's product is queued
    before the function that `visit` returned is called, so that an exchange runs beside the product.
    """
    count, features = input.shape
    classes, device = weight.shape[0], input.device
    allocate = torch.empty if count else torch.zeros
    input_gradient = torch.empty((count, features) if wanted[0] else 0, dtype=input.dtype, device=device)
    weight_gradient = allocate((classes, features) if wanted[1] else 0, dtype=accumulation_dtype, device=device)
    bias_gradient = torch.zeros(classes if wanted[2] else 0, dtype=_library.compute_dtype(input), device=device)
    buffers = [
        logits_memory(min(chunk_rows, count), classes, input)
        for _ in range(1 + overlapped if kept is None or filled else 0)
    ]
    parts = config.parts_of_products(classes, input.dtype, _library.on_gpu(input))

    def finish(begin: int, target: Tensor, complete: Callable[[], Any]) -> None:
        """Multiply a chunk's gradient, when it is complete, with weight and input."""
        complete()
        part = slice(begin, begin + chunk_rows)
        if wanted[0]:
            # The remainder comes first: the large product adds to it before it rounds.
            for chosen in reversed(parts):
                add_product(input_gradient[part], target[:, chosen], weight[chosen], first=chosen is parts[-1])
        if wanted[1]:
            for chosen in parts:
                add_product(weight_gradient[chosen], target[:, chosen].t(), input[part], first=begin == 0)
        if wanted[2]:
            bias_gradient.add_(target.sum(0, dtype=bias_gradient.dtype))

    pending: tuple | None = None
    with _library.autocast_off(input):
        for number, begin in enumerate(range(0, count, chunk_rows)):
            part = slice(begin, begin + chunk_rows)
            x = input[part]
            target = (buffers[number % len(buffers)][: x.shape[0]] if buffers else kept[part])[:, :classes]  # type: ignore[index]
            logits = target if kept is None else kept[part, :classes]
            if not filled:
                for chosen in parts:
                    if bias is None:
                        torch.mm(x, weight[chosen].t(), out=logits[:, chosen])
                    else:
                        torch.addmm(bias[chosen], x, weight[chosen].t(), out=logits[:, chosen])
            current = (begin, target, visit(logits, target, part))
            if pending is not None:
                finish(*pending)
            pending = current
            if not overlapped:
                finish(*pending)
                pending = None
        if pending is not None:
            finish(*pending)
    return input_gradient, weight_gradient, bias_gradient.to(accumulation_dtype)


def row_stride(classes: int) -> int:
    return -(-classes // config.STRIDE_MULTIPLE) * config.STRIDE_MULTIPLE


def logits_memory(count: int, classes: int, input: Tensor) -> Tensor:
    """Return memory for rows of logits; on a CPU with zeros behind each row, which oneDNN reads and multiplies by 0."""
    memory = input.new_empty((count, row_stride(classes)))
    if not _library.on_gpu(input):
        memory[:, classes:] = 0.0
    return memory


def add_product(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """Compute total += left @ right in place; with `first`, total = left @ right."""
    if total.dtype == left.dtype:
        if first:
            torch.mm(left, right, out=total)
        else:
            torch.addmm(total, left, right, out=total)
    elif total.dtype == torch.float32 and _adds_to_float32(left):
        if first:
            torch.mm(left, right, out_dtype=torch.float32, out=total)
        else:
            torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        for begin in range(0, total.shape[0], config.CLASSES_AT_A_TIME):
            part = slice(begin, begin + config.CLASSES_AT_A_TIME)
            product = torch.mm(left[part], right)
            if first:
                total[part] = product
            else:
                total[part] += product


def _adds_to_float32(half: Tensor) -> bool:
    """Return whether a half-precision product can be added to float32: since PyTorch 2.8, on NVIDIA GPUs."""
    return half.is_cuda and torch.version.hip is None and hasattr(torch.ops.aten.addmm, "dtype_out")


def _whole_input(input: Tensor, exchange: rows.Exchange | None, sequence_parallel: bool) -> Tensor:
    return rows.gathered(exchange, input.contiguous()) if exchange is not None and sequence_parallel else input


def input_gradient(gradient: Tensor, exchange: rows.Exchange | None, sequence_parallel: bool) -> Tensor:
    """Return the sum over the ranks that share the classes, or this rank's rows of it if `sequence_parallel`."""
    if exchange is None or not gradient.numel():
        return gradient
    return exchange.sum_of_part(gradient) if sequence_parallel else exchange.sum(gradient)


def one_pass(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    classes: rows.Classes,
    transform: Sequence[float],
    names: Sequence[str],
    top: Tensor,
    losses: Tensor,
    function: Callable[[Tensor, slice], tuple[Tensor, Tensor]],
    wanted: Sequence[bool],
    accumulation_dtype: torch.dtype,
    chunk_rows: int,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Compute losses and gradients in one pass, for any loss of a row that depends on that row's statistics alone.

    `function(table, part)` returns the losses of some rows and their gradients for the table of statistics. Writes
    `losses` and `top`; returns the statistics of all rows and the gradients of the sum of the losses.
    """
    table = torch.empty((len(names), len(losses)), dtype=losses.dtype, device=losses.device)
    no_top = top.numel() == 0

    def visit(logits: Tensor, target: Tensor, part: slice) -> Callable[[], Any]:
        of_part, found = classes.slice(part), table[:, part]
        wait = rows.start_statistics(logits, of_part, transform, names, found, top if no_top else top[part])

        def complete() -> None:
            wait()
            losses[part], slope = function(found, part)
            if True in wanted:
                factors = rows.coefficients(slope, found, names, classes.count)
                lse = found[names.index("lse")]
                rows.write_gradient(logits, of_part, lse, factors, transform, names, target)

        return complete

    overlapped = classes.exchange is not None
    gradients = walk(input, weight, bias, visit, wanted, accumulation_dtype, chunk_rows, overlapped=overlapped)
    return table, gradients


def linear_xentropy(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    class_weight: Tensor | None,
    z_factor: Tensor | None,
    scale: Tensor | None,
    settings: Sequence[float],
    transform: Sequence[float],
    ignore_index: int,
    outputs: str,
    wanted: Sequence[bool],
    accumulation_dtype: torch.dtype,
    chunk_rows: int,
    group: str,
    sequence_parallel: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return losses (N), the gradients of their sum for input, weight and bias, statistics of rows and top classes.

    Runs without autograd. The gradients are multiplied by the number `scale`. `rows.cross_entropy` explains `settings`.
    `outputs` names further statistics, separated by spaces, with "top" for the top classes; statistics come in the
    order of `statistic_names`.
    """
    exchange = rows.exchange_of(group)
    input = _whole_input(input, exchange, sequence_parallel)
    classes = rows.own_classes(labels, class_weight, weight.shape[0], ignore_index, exchange)
    names = statistic_names(settings[0], class_weight, outputs)
    dtype, count = _library.compute_dtype(input), input.shape[0]
    losses = torch.empty(count, dtype=dtype, device=input.device)
    top = torch.empty(count if "top" in outputs.split() else 0, dtype=torch.int64, device=input.device)
    smoothing, z_loss, token_scaling, _ = settings
    if exchange is None and class_weight is None and not token_scaling and _library.runs_triton(FAMILY, input):
        table = torch.empty((len(names), count), dtype=dtype, device=input.device)

        def visit(logits: Tensor, target: Tensor, part: slice) -> Callable[[], Any]:
            found = {name: row[part] for name, row in zip(names, table, strict=True)}
            if top.numel():
                found["top"] = top[part]
            launch_rows(
                logits, classes.labels[part], transform, ignore_index, found,
                losses=losses[part], scale=scale, smoothing=smoothing, z_loss=z_loss, gradient=True in wanted,
            )  # fmt: skip
            return lambda: None

        gradients = walk(input, weight, bias, visit, wanted, accumulation_dtype, chunk_rows)
        if "mean" in names:
            table[names.index("mean")] /= classes.count
        return losses, *gradients, table, top
    own_weight, weight_sum = rows.label_weights(class_weight, labels, dtype)
    own_names = names[: len(rows.loss_statistics(smoothing, class_weight))]
    ignored = labels == ignore_index

    def function(found: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        own = None if own_weight is None else own_weight[part]
        used = found[: len(own_names)]
        value, slope = rows.cross_entropy(used, own_names, own, weight_sum, settings, z_factor, classes.count)
        gradient = torch.zeros_like(found)
        gradient[: len(own_names)] = slope if scale is None else slope * scale
        return value.masked_fill(ignored[part], 0.0), gradient

    table, gradients = one_pass(
        input, weight, bias, classes, transform, names, top, losses, function, wanted, accumulation_dtype, chunk_rows
    )
    first = input_gradient(gradients[0], exchange, sequence_parallel)
    return losses, first, *gradients[1:], table, top


def statistic_names(smoothing: float, class_weight: Tensor | None, outputs: str) -> tuple[str, ...]:
    """Return the names of the statistics that a cross-entropy computes: its own first, then `outputs`."""
    own = rows.loss_statistics(smoothing, class_weight)
    return *own, *(name for name in outputs.split() if name not in (*own, "top"))


def linear_rows(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    class_weight: Tensor | None,
    transform: Sequence[float],
    ignore_index: int,
    names: str,
    keep: bool,
    chunk_rows: int,
    group: str,
    sequence_parallel: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the named statistics of all rows, top classes (if named), the logits (if kept) and the number of classes.

    Runs without autograd. `names` are separated by spaces; "top" asks for top classes.
    """
    exchange = rows.exchange_of(group)
    input = _whole_input(input, exchange, sequence_parallel)
    classes = rows.own_classes(labels, class_weight, weight.shape[0], ignore_index, exchange)
    chosen = tuple(name for name in names.split() if name != "top")
    count, device = input.shape[0], input.device
    table = torch.empty((len(chosen), count), dtype=_library.compute_dtype(input), device=device)
    top = torch.empty(count if "top" in names.split() else 0, dtype=torch.int64, device=device)
    kept = logits_memory(count, weight.shape[0], input) if keep else input.new_empty((0, 0))

    def visit(logits: Tensor, target: Tensor, part: slice) -> Callable[[], Any]:
        of_part = top[part] if top.numel() else top
        return rows.start_statistics(logits, classes.slice(part), transform, chosen, table[:, part], of_part)

    nothing = (False, False, False)
    memory, overlapped = kept if keep else None, exchange is not None
    walk(input, weight, bias, visit, nothing, input.dtype, chunk_rows, memory, overlapped=overlapped)
    total = classes.count if exchange is not None else torch.full((), weight.shape[0], dtype=torch.int64, device=device)
    return table, top, kept[:, : weight.shape[0]], total


def linear_rows_backward(
    gradient: Tensor,
    table: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    class_weight: Tensor | None,
    kept: Tensor,
    transform: Sequence[float],
    ignore_index: int,
    names: str,
    wanted: Sequence[bool],
    accumulation_dtype: torch.dtype,
    chunk_rows: int,
    group: str,
    sequence_parallel: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias from the statistics' gradients; see `linear_rows`."""
    exchange = rows.exchange_of(group)
    input = _whole_input(input, exchange, sequence_parallel)
    classes = rows.own_classes(labels, class_weight, weight.shape[0], ignore_index, exchange)
    chosen = [name for name in names.split() if name != "top"]
    factors = rows.coefficients(gradient, table, chosen, classes.count)
    lse = table[chosen.index("lse")]

    def visit(logits: Tensor, target: Tensor, part: slice) -> Callable[[], Any]:
        rows.write_gradient(logits, classes.slice(part), lse[part], factors[:, part], transform, chosen, target)
        return lambda: None

    memory = kept if kept.numel() else None
    gradients = walk(
        input, weight, bias, visit, wanted, accumulation_dtype, chunk_rows, memory, filled=memory is not None
    )
    return input_gradient(gradients[0], exchange, sequence_parallel), *gradients[1:]


def _fake_gradients(input: Tensor, weight: Tensor, wanted: Sequence[bool], dtype: torch.dtype) -> tuple[Tensor, ...]:
    like = ((input.shape, input.dtype), (weight.shape, dtype), (weight.shape[:1], dtype))
    return tuple(
        input.new_empty(shape if want else 0, dtype=dtype) for (shape, dtype), want in zip(like, wanted, strict=True)
    )


def _fake_xentropy(input, weight, bias, labels, class_weight, z_factor, scale, settings, transform, ignore_index,
                   outputs, wanted, accumulation_dtype, chunk_rows, group, sequence_parallel):  # type: ignore[no-untyped-def] # fmt: skip
    losses = input.new_empty(labels.shape, dtype=_library.compute_dtype(input))
    names = statistic_names(settings[0], class_weight, outputs)
    table = losses.new_empty((len(names), labels.shape[0]))
    top = labels.new_empty(labels.shape if "top" in outputs.split() else 0, dtype=torch.int64)
    return losses, *_fake_gradients(input, weight, wanted, accumulation_dtype), table, top


def _fake_rows(input, weight, bias, labels, class_weight, transform, ignore_index, names, keep, chunk_rows, group,
               sequence_parallel):  # type: ignore[no-untyped-def] # fmt: skip
    count, chosen = labels.shape[0], names.split()
    table = input.new_empty((len(set(chosen) - {"top"}), count), dtype=_library.compute_dtype(input))
    top = labels.new_empty(count if "top" in chosen else 0, dtype=torch.int64)
    kept = input.new_empty((count, row_stride(weight.shape[0])) if keep else (0, 0))
    return table, top, kept[:, : weight.shape[0]], labels.new_empty((), dtype=torch.int64)


def _fake_rows_backward(gradient, table, input, weight, bias, labels, class_weight, kept, transform, ignore_index,
                        names, wanted, accumulation_dtype, chunk_rows, group, sequence_parallel):  # type: ignore[no-untyped-def] # fmt: skip
    return _fake_gradients(input, weight, wanted, accumulation_dtype)


_library.register_op(
    "linear_xentropy(Tensor input, Tensor weight, Tensor? bias, Tensor labels, Tensor? class_weight, Tensor? z_factor, "
    "Tensor? scale, float[] settings, float[] transform, int ignore_index, str outputs, bool[] wanted, "
    "ScalarType accumulation_dtype, SymInt chunk_rows, str group, bool sequence_parallel) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    linear_xentropy,
    _fake_xentropy,
)
_library.register_op(
    "linear_rows(Tensor input, Tensor weight, Tensor? bias, Tensor labels, Tensor? class_weight, float[] transform, "
    "int ignore_index, str names, bool keep, SymInt chunk_rows, str group, bool sequence_parallel) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    linear_rows,
    _fake_rows,
)
_library.register_op(
    "linear_rows_backward(Tensor gradient, Tensor table, Tensor input, Tensor weight, Tensor? bias, Tensor labels, "
    "Tensor? class_weight, Tensor kept, float[] transform, int ignore_index, str names, bool[] wanted, "
    "ScalarType accumulation_dtype, SymInt chunk_rows, str group, bool sequence_parallel) -> (Tensor, Tensor, Tensor)",
    linear_rows_backward,
    _fake_rows_backward,
)
