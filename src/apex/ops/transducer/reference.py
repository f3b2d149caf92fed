"""Joint and loss of a transducer in PyTorch operators: the definition, and the implementation when no kernel runs.

`op_joint.py` explains letters and layouts. The joint is differentiable; the loss is not, its derivative is written out.
`options` are the arguments after the tensors in the schemas of the ops `JOINT` and `LOSS`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._library import compute_dtype

# Value of the joint outside a sequence: upstream's, and finite, because matrix products behind it read it.
PADDING = -1.0
NEVER = float("-inf")


def _range(length: int, like: Tensor) -> Tensor:
    return torch.arange(length, dtype=torch.int64, device=like.device)


def _in_sequence(f_len: Tensor, g_len: Tensor, frames: int, tokens: int) -> Tensor:
    """Return which positions of B x T x U are not padding."""
    inside_frames = _range(frames, f_len) < f_len[:, None]
    return inside_frames[:, :, None] & (_range(tokens, g_len) < g_len[:, None])[:, None, :]


def joint(
    f: Tensor, g: Tensor, f_len: Tensor, g_len: Tensor, batch_offset: Tensor | None, noise: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor | None]:
    """Return h and, if wanted, one byte per element: 1 if it depends on f and g."""
    relu, _, scale, frames, tokens, packed_rows, want_mask = options
    exists = _in_sequence(f_len, g_len, frames, tokens)
    h = f[:, :, None] + g[:, None]
    if batch_offset is not None:
        h = h[exists]
        exists = _range(packed_rows, f) < len(h)
        h = pad(h, (0, 0, 0, packed_rows - len(h)))
    exists = exists[..., None]
    if relu:
        h = h.relu()
    if noise is not None:
        h = h * noise * scale
    mask = None
    if want_mask:
        kept = h > 0 if relu else torch.ones_like(h, dtype=torch.bool) if noise is None else noise != 0
        mask = (kept & exists).to(torch.uint8)
    return torch.where(exists, h, PADDING), mask


def joint_backward(
    dh: Tensor, kept: Tensor | None, f_len: Tensor, g_len: Tensor, batch_offset: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    """Return the gradients of f and g, counting elements with positive `kept`; differentiable with respect to dh."""
    _, _, scale, frames, tokens, *_ = options
    exists = _in_sequence(f_len, g_len, frames, tokens)[..., None]
    if kept is not None:
        dh = torch.where(kept > 0, dh, 0.0)
    if batch_offset is None:
        dh = torch.where(exists, dh, 0.0)
    else:
        dh = dh.new_zeros((*exists.shape[:3], dh.shape[-1])).masked_scatter(exists, dh)
    df, dg = (dh.sum(dim, dtype=compute_dtype(dh)) * scale for dim in (2, 1))
    return df.to(dh.dtype), dg.to(dh.dtype)


# The loss: a sequence has `y_len` labels and y_len + 1 tokens. At frame t, with u labels emitted, a model emits blank
# and goes on to the next frame, or emits label u and stays. alpha[t, u] is the log of the probability of all paths from
# the start to there, beta[t, u] of all paths from there to the end, where the last word is a blank. The loss is
# -beta[0, 0].


class Lattice(NamedTuple):
    """The sequences' nodes, B x T x U: which of them exist, and the row of the logits of each."""

    frames: Tensor  # B x 1 x 1
    tokens: Tensor  # B x 1 x 1
    t: Tensor  # 1 x T x 1
    u: Tensor  # 1 x 1 x U
    exists: Tensor
    rows: Tensor


def lattice(f_len: Tensor, y_len: Tensor, batch_offset: Tensor | None, sizes: tuple[int, int]) -> Lattice:
    frames, tokens = f_len.long()[:, None, None], y_len.long()[:, None, None] + 1
    t, u = _range(sizes[0], f_len)[None, :, None], _range(sizes[1], f_len)[None, None, :]
    exists = (t < frames) & (u < tokens)
    if batch_offset is None:
        rows = _range(len(f_len), f_len)[:, None, None] * (sizes[0] * sizes[1]) + t * sizes[1] + u
    else:
        rows = batch_offset[:, None, None] - frames * tokens + t * tokens + u
    return Lattice(frames, tokens, t, u, exists, torch.where(exists, rows, 0))


def scores_of_words(
    x: Tensor, label: Tensor, nodes: Lattice, blank: int, softmax: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return for each node the log of the sum of exponentials, and the log-probabilities of blank and next label.

    They are zero for nodes that do not exist, NaN for a label that is no word. Without `softmax`, x has
    log-probabilities already, and there are no sums.
    """
    flat = x.reshape(-1, x.shape[-1])
    compute, words = compute_dtype(x), x.shape[-1]
    labels = pad(label.long(), (0, 1))[:, None, :]
    is_word = (labels >= 0) & (labels < words)
    elements = flat.reshape(-1)
    of_blank = elements[nodes.rows * words + blank].to(compute)
    of_label = elements[nodes.rows * words + labels.clamp(0, words - 1)].to(compute)
    of_label = torch.where(is_word, of_label, torch.nan)
    sums = None
    if softmax:
        sums = flat.to(compute).logsumexp(1)[nodes.rows]
        of_blank, of_label = of_blank - sums, of_label - sums
        sums = torch.where(nodes.exists, sums, 0.0)
    of_label = torch.where(nodes.u < nodes.tokens - 1, of_label, NEVER)
    return sums, torch.where(nodes.exists, of_blank, 0.0), torch.where(nodes.exists, of_label, 0.0)


def _walk(start: Tensor, by_blank: Tensor, by_label: Tensor) -> Tensor:
    """Return the logs of the probabilities to reach the nodes of B x T x U, from `start` at (0, 0), B.

    `by_blank` and `by_label` are the log-probabilities of the words that lead to a node, from the frame before and from
    the token before. All nodes of a diagonal t + u are reached at once: rows are shifted by u, so that diagonals become
    columns.
    """
    batches, frames, tokens = by_blank.shape
    diagonals = frames + tokens - 1

    def skewed(values: Tensor) -> tuple[Tensor, ...]:
        moved = pad(values.transpose(1, 2), (0, tokens), value=NEVER).reshape(batches, -1)
        return moved[:, : tokens * diagonals].reshape(batches, tokens, diagonals).unbind(2)

    reached = [pad(start[:, None], (0, tokens - 1), value=NEVER)]
    for blank, label in zip(skewed(by_blank)[1:], skewed(by_label)[1:], strict=True):
        before = reached[-1]
        reached.append(torch.logaddexp(before + blank, pad(before, (1, -1), value=NEVER) + label))
    moved = pad(torch.stack(reached, 2).reshape(batches, -1), (0, tokens)).reshape(batches, tokens, -1)
    return moved[:, :, :frames].transpose(1, 2)


def alpha_and_beta(of_blank: Tensor, of_label: Tensor, nodes: Lattice) -> tuple[Tensor, Tensor]:
    """Return alpha and beta, zero for nodes that do not exist; beta is the walk from the other end."""
    batches, _, width = of_blank.shape
    opposite = (nodes.frames - 1 - nodes.t) * width + nodes.tokens - 1 - nodes.u
    place = torch.where(nodes.exists, opposite, 0).reshape(batches, -1)

    def turned(values: Tensor) -> Tensor:
        return values.reshape(batches, -1).gather(1, place).reshape(of_blank.shape)

    turned_blank = turned(of_blank)
    start = torch.cat([torch.zeros_like(turned_blank[:, 0, 0]), turned_blank[:, 0, 0]])
    # Forwards, a word leads from the node before; backwards, it belongs to the node itself.
    by_blank = torch.cat([pad(of_blank, (0, 0, 1, -1)), turned_blank])
    by_label = torch.cat([pad(of_label, (1, -1)), turned(of_label)])
    by_blank[:, 0] = NEVER
    by_label[:, :, 0] = NEVER
    reached = _walk(start, by_blank, by_label)
    alpha, beta = reached[:batches], turned(reached[batches:])
    return torch.where(nodes.exists, alpha, 0.0), torch.where(nodes.exists, beta, 0.0)


def shares_of_words(alpha: Tensor, beta: Tensor, of_blank: Tensor, of_label: Tensor, nodes: Lattice) -> Tensor:
    """Return for each node the part of all right paths that continues by blank, and by label; 2 x B x T x U."""
    total = beta[:, :1, :1]
    last = (nodes.t == nodes.frames - 1) & (nodes.u == nodes.tokens - 1)
    by_blank = (alpha + of_blank + pad(beta, (0, 0, -1, 1)) - total).exp()
    by_label = (alpha + of_label + pad(beta, (-1, 1)) - total).exp()
    goes_on = nodes.exists & ((nodes.t < nodes.frames - 1) | last)
    has_label = nodes.exists & (nodes.u < nodes.tokens - 1)
    return torch.stack([torch.where(goes_on, by_blank, 0.0), torch.where(has_label, by_label, 0.0)])


@torch.no_grad()
def loss(
    x: Tensor, label: Tensor, f_len: Tensor, y_len: Tensor, batch_offset: Tensor | None, *options: Any
) -> tuple[Any, ...]:
    """Return losses in x's dtype, and the other results of `LOSS` if they are wanted."""
    max_f_len, blank_idx, softmax, want_nodes, want_scores = options
    sizes = (max_f_len, label.shape[1] + 1)
    sums: Tensor | None
    if not len(label):
        sums, alpha, beta = torch.empty(3, 0, *sizes, dtype=compute_dtype(x), device=x.device).unbind(0)
        losses, shares = x.new_empty(0), torch.stack([alpha, beta])
    else:
        nodes = lattice(f_len, y_len, batch_offset, sizes)
        sums, of_blank, of_label = scores_of_words(x, label, nodes, blank_idx, softmax)
        alpha, beta = alpha_and_beta(of_blank, of_label, nodes)
        losses, shares = -beta[:, 0, 0].to(x.dtype), shares_of_words(alpha, beta, of_blank, of_label, nodes)
    scores = torch.stack([alpha, beta]) if want_scores else None
    return losses, sums if softmax else None, shares if want_nodes or want_scores else None, scores


def loss_backward(grad: Tensor, x: Tensor, *saved: Any) -> Tensor:
    """Return the gradient of the logits, or (not `softmax`) of the log-probabilities."""
    label, f_len, y_len, batch_offset, sums, shares, _, blank_idx, softmax, *_ = saved
    compute, words = compute_dtype(x), x.shape[-1]
    flat = x.reshape(-1, words)
    gradient = torch.zeros_like(flat)
    if not gradient.numel() or not len(label):
        return gradient.reshape(x.shape)
    nodes = lattice(f_len, y_len, batch_offset, (shares.shape[2], shares.shape[3]))
    rows = nodes.rows[nodes.exists]
    by_blank, by_label = (shares * grad.to(compute)[:, None, None])[:, nodes.exists]
    labels = pad(label.long(), (0, 1))[:, None, :].expand(nodes.rows.shape)[nodes.exists].clamp(0, words - 1)
    if softmax:
        wide = flat[rows].to(compute)
        slope = (wide.exp() if sums is None else wide.softmax(1)) * (by_blank + by_label)[:, None]
    else:
        slope = torch.zeros((len(rows), words), dtype=compute, device=x.device)
    slope[:, blank_idx] -= by_blank
    slope.scatter_add_(1, labels[:, None], -by_label[:, None])
    return gradient.index_copy_(0, rows, slope.to(x.dtype)).reshape(x.shape)
