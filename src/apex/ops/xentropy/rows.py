"""Statistics of rows of logits, losses made of them, and the gradient of the logits from the statistics' gradients.

Every loss of a linear head here is a function of a few statistics per row (`reference.statistics`), so that its
gradient needs four coefficients per row and one more pass over the logits. Statistics are tables of shape
[names, rows]. If ranks share the classes, each computes statistics of its own classes, and one exchange joins them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import _library
from . import reference
from .op import FAMILY, launch_row_gradient, launch_rows

# Labels of ignored rows on ranks that have a part of the classes; no label minus an offset has this value.
IGNORED = reference.NO_PADDING


class Exchange(Protocol):
    """Exchanges among the ranks that share the classes of a head; `apex.contrib.xentropy` provides them."""

    rank: int
    ranks: int

    def start_gather(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Start to gather the ranks' tensors along the first dimension; return the result and its work."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks."""

    def sum_of_part(self, tensor: Tensor) -> Tensor:
        """Return this rank's part, along the first dimension, of the sum over the ranks."""


# Makes an exchange from the name of a process group. Set by `apex.contrib.xentropy`: this layer knows no processes.
make_exchange: list[Callable[[str], Exchange]] = []


def exchange_of(group: str) -> Exchange | None:
    """Return the exchange of a named process group, or None for the empty name."""
    if not group:
        return None
    if not make_exchange:
        raise RuntimeError("a process group needs the functions of apex.contrib.xentropy: import them from there")
    return make_exchange[0](group)


def gathered(exchange: Exchange, tensor: Tensor) -> Tensor:
    whole, work = exchange.start_gather(tensor)
    work.wait()
    return whole


class Classes(NamedTuple):
    """The classes of this rank: the labels among them, their weights, and the number of classes of all ranks.

    Without a group these are all classes. The number stays on the device if there is a group, so that nothing waits.
    """

    labels: Tensor
    padding_idx: int
    weights: Tensor | None
    count: Any
    offset: Any
    exchange: Exchange | None

    def slice(self, part: slice) -> Classes:
        return self._replace(labels=self.labels[part])


def own_classes(
    labels: Tensor, class_weight: Tensor | None, size: int, ignore_index: int, exchange: Exchange | None
) -> Classes:
    """Return this rank's classes; `labels` and `class_weight` cover all classes, this rank has `size`."""
    labels = labels.long().contiguous()
    if exchange is None:
        return Classes(labels, ignore_index, class_weight, size, 0, None)
    sizes = gathered(exchange, torch.full((1,), size, dtype=torch.int64, device=labels.device))
    offset = sizes[: exchange.rank].sum()
    here = torch.where(labels == ignore_index, IGNORED, labels - offset)
    if class_weight is not None:
        class_weight = class_weight[offset + torch.arange(size, dtype=torch.int64, device=labels.device)]
    return Classes(here, IGNORED, class_weight, sizes.sum(), offset, exchange)


def start_statistics(
    logits: Tensor, classes: Classes, transform: Sequence[float], names: Sequence[str], table: Tensor, top: Tensor
) -> Callable[[], None]:
    """Compute statistics; return a function that waits for other ranks' statistics and fills `table` and `top`.

    `top`, if it has elements, is the first class with the greatest logit; ranks that share classes need "peak" for it.
    """
    labels, padding_idx, exchange = classes.labels, classes.padding_idx, classes.exchange
    local = table if exchange is None else torch.empty_like(table)
    local_top = top if exchange is None else torch.empty_like(top)
    if _library.runs_triton(FAMILY, logits):
        found = dict(zip(names, local, strict=True))
        if top.numel():
            found["top"] = local_top
        weights = classes.weights if "weighted" in names else None
        launch_rows(logits, labels, transform, padding_idx, found, weights)
    else:
        local.copy_(reference.statistics(logits, labels, classes.weights, transform, padding_idx, names))
        if top.numel():
            local_top.copy_(reference.transformed(logits.to(local.dtype), transform).argmax(-1))
            local_top.masked_fill_(labels == padding_idx, 0)
    sums = [index for index, name in enumerate(names) if name in ("mean", "weighted")]
    if exchange is None:
        for index in sums:
            table[index] /= classes.count
        return lambda: None
    if "own" in names:
        is_here = (labels >= 0) & (labels < logits.shape[1])
        local[names.index("own")].masked_fill_(~is_here, 0.0)
    ignored = labels == padding_idx
    sent = local
    if top.numel():
        # Exact for up to 2^24 classes in float32.
        sent = torch.cat([local, (local_top + classes.offset).to(local.dtype)[None]])
    whole, work = exchange.start_gather(sent[None])

    def finish() -> None:
        work.wait()
        _join(whole, names, ignored, table)
        for index in sums:
            table[index] /= classes.count
        if "own" in names:
            wrong = (labels + classes.offset < 0) | (labels + classes.offset >= classes.count)
            table[names.index("own")].masked_fill_(wrong & ~ignored, torch.nan)
        if top.numel():
            first = whole[:, names.index("peak")].argmax(0, keepdim=True)
            top.copy_(whole[:, -1].gather(0, first)[0].masked_fill(ignored, 0.0))

    return finish


def _join(whole: Tensor, names: Sequence[str], ignored: Tensor, table: Tensor) -> None:
    """Join the statistics of all ranks, [ranks, names, rows]."""
    rows = dict(zip(names, whole.unbind(1), strict=False))
    lse = torch.logsumexp(rows["lse"], 0)
    log_share = rows["lse"] - lse  # log of the share of a rank's classes in the sum of exponentials
    share = log_share.exp()
    for index, name in enumerate(names):
        if name == "lse":
            joined = lse
        elif name == "entropy":
            joined = (share * (rows[name] - log_share.clamp(min=reference.LOWEST))).sum(0)
        elif name == "squares":
            joined = (share.square() * rows[name]).sum(0)
        elif name == "peak":
            joined = rows[name].amax(0)
        else:
            joined = rows[name].sum(0)
        table[index] = joined.masked_fill(ignored, 0.0)


def coefficients(gradient: Tensor, table: Tensor, names: Sequence[str], classes: Any) -> Tensor:
    """Return the four coefficients of `reference.row_gradient` from the gradient of the table of statistics."""
    of = dict(zip(names, gradient, strict=True))
    found = dict(zip(names, table, strict=True))
    nothing = torch.zeros_like(found["lse"])
    of_softmax, of_product = of["lse"], nothing
    if "entropy" in of:
        of_product = -of["entropy"]
        of_softmax = of_softmax + of["entropy"] * (found["lse"] - found["entropy"])
    of_all = of.get("weighted", of.get("mean"))
    of_all = nothing if of_all is None else of_all / classes
    return torch.stack([of_softmax, of_product, of_all, of.get("own", nothing)])


def write_gradient(
    logits: Tensor,
    classes: Classes,
    log_sums: Tensor,
    factors: Tensor,
    transform: Sequence[float],
    names: Sequence[str],
    out: Tensor,
) -> None:
    """Write the gradient of the logits to `out`, from the coefficients of each row (`reference.row_gradient`)."""
    labels, padding_idx = classes.labels, classes.padding_idx
    weights = classes.weights if "weighted" in names else None
    if _library.runs_triton(FAMILY, logits):
        entropy = "entropy" in names
        launch_row_gradient(logits, labels, log_sums, factors, weights, transform, padding_idx, entropy, out)
    else:
        out.copy_(reference.row_gradient(logits, labels, log_sums, factors, weights, transform, padding_idx, names))


def label_weights(class_weight: Tensor | None, labels: Tensor, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the weight of each label's class and the sum over all classes; None for both without class weights."""
    if class_weight is None:
        return None, None
    own = class_weight[labels.long().clamp(0, len(class_weight) - 1)].to(dtype)
    return own, class_weight.sum(dtype=dtype)


def loss_statistics(smoothing: float, class_weight: Tensor | None) -> tuple[str, ...]:
    """Return the names of the statistics that a cross-entropy is made of."""
    if not smoothing:
        return ("lse", "own")
    return ("lse", "own", "mean" if class_weight is None else "weighted")


def cross_entropy(
    table: Tensor,
    names: Sequence[str],
    own_weight: Tensor | None,
    weight_sum: Tensor | None,
    settings: Sequence[float],
    z_factor: Tensor | None,
    classes: Any,
) -> tuple[Tensor, Tensor]:
    """Return the loss of each row, and its gradient for the table of statistics.

    `own_weight` is the weight of each row's class and `weight_sum` the sum over all classes. `settings` are the label
    smoothing, the factor of the squared log-sum-exp (times `z_factor`), whether a loss is multiplied by the label's
    probability, and whether smoothing leaves the label itself out, as Megatron's does.
    """
    smoothing, z_loss, token_scaling, megatron = settings
    if isinstance(classes, Tensor):  # a quotient of integers would have the default dtype
        classes = classes.to(table.dtype)
    found = dict(zip(names, table, strict=True))
    lse, own = found["lse"], found["own"]
    spread = smoothing * classes / (classes - 1) if megatron and smoothing else smoothing
    direct = 1.0 - spread if own_weight is None else (1.0 - spread) * own_weight
    losses = direct * (lse - own)
    gradient = torch.zeros_like(table)  # explicit, because operators run without autograd
    of = dict(zip(names, gradient, strict=True))
    of["own"] -= direct
    of["lse"] += direct
    if smoothing:
        other = "mean" if own_weight is None else "weighted"
        share = 1.0 if weight_sum is None else weight_sum / classes
        losses = losses + spread * (share * lse - found[other])
        of["lse"] += spread * share
        of[other] -= spread
    if z_loss:
        factor = z_loss if z_factor is None else z_loss * z_factor
        losses = losses + factor * lse.square()
        of["lse"] += 2.0 * factor * lse.detach()
    if token_scaling:
        own_probability = (own - lse).detach().exp()
        losses, gradient = losses * own_probability, gradient * own_probability
    return losses, gradient
