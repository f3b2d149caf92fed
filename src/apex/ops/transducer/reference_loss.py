"""The transducer loss in PyTorch operators: the definition, and the implementation where there is no kernel.

`spec.py` explains letters and layouts; here a sequence has `y_len` labels and y_len + 1 tokens. At frame t, with u
labels out, a model says blank and goes on to the next frame, or says label u and stays. alpha[t, u] is the logarithm of
the probability of all ways from the start to there, beta[t, u] of all ways from there to the end, where the last word
is a blank. The loss is -beta[0, 0]. Arithmetic is float32, or float64 for float64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .spec import LossNodes, compute_dtype

# Elements that are worked on at a time, so that what lies between reading and writing them stays in a cache.
CHUNK = 1 << 18
NEVER = float("-inf")


class Lattice(NamedTuple):
    """Where the sequences' nodes are, B x T x U: which exist, and the row of the logits each has."""

    frames: Tensor  # B x 1 x 1
    tokens: Tensor  # B x 1 x 1
    t: Tensor  # 1 x T x 1
    u: Tensor  # 1 x 1 x U
    exists: Tensor
    rows: Tensor


def lattice(f_len: Tensor, y_len: Tensor, batch_offset: Tensor | None, sizes: tuple[int, int]) -> Lattice:
    frames, tokens = f_len.long()[:, None, None], y_len.long()[:, None, None] + 1
    here: dict[str, Any] = {"dtype": torch.int64, "device": f_len.device}
    t = torch.arange(sizes[0], **here)[None, :, None]
    u = torch.arange(sizes[1], **here)[None, None, :]
    exists = (t < frames) & (u < tokens)
    if batch_offset is None:
        start = torch.arange(len(f_len), **here)[:, None, None] * (sizes[0] * sizes[1])
        rows = start + t * sizes[1] + u
    else:
        rows = batch_offset[:, None, None] - frames * tokens + t * tokens + u
    return Lattice(frames, tokens, t, u, exists, torch.where(exists, rows, 0))


def log_sums_of_rows(rows: Tensor) -> Tensor:
    """The logarithm of the sum of exponentials of each row; a few rows at a time."""
    compute = compute_dtype(rows)
    sums = torch.empty(rows.shape[0], dtype=compute, device=rows.device)
    step = max(1, CHUNK // max(1, rows.shape[1]))
    for first in range(0, rows.shape[0], step):
        torch.logsumexp(rows[first : first + step].to(compute), 1, out=sums[first : first + step])
    return sums


def scores_of_words(
    x: Tensor, label: Tensor, nodes: Lattice, blank: int, normalize: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Per node: the logarithm of the sum of exponentials, and the log-probabilities of blank and of the next label.

    Zero where there is no node, NaN for a label that is no word. Without `normalize` x has log-probabilities already,
    and there are no sums.
    """
    flat = x.reshape(-1, x.shape[-1])
    compute, words = compute_dtype(x), x.shape[-1]
    labels = torch.nn.functional.pad(label.long(), (0, 1))[:, None, :]
    is_word = (labels >= 0) & (labels < words)
    elements = flat.reshape(-1)
    of_blank = elements[nodes.rows * words + blank].to(compute)
    of_label = elements[nodes.rows * words + labels.clamp(0, words - 1)].to(compute)
    of_label = torch.where(is_word, of_label, torch.nan)
    sums = None
    if normalize:
        sums = log_sums_of_rows(flat)[nodes.rows]
        of_blank, of_label = of_blank - sums, of_label - sums
        sums = torch.where(nodes.exists, sums, 0.0)
    of_label = torch.where(nodes.u < nodes.tokens - 1, of_label, NEVER)
    return sums, torch.where(nodes.exists, of_blank, 0.0), torch.where(nodes.exists, of_label, 0.0)


def alpha_and_beta(of_blank: Tensor, of_label: Tensor, nodes: Lattice) -> tuple[Tensor, Tensor]:
    """alpha and beta, zero where there is no node.

    Both go along diagonals from a corner: node i of diagonal d, `s = d - i` frames and i labels from the corner, is
    reached from the nodes i (a blank) and i - 1 (a label) of the diagonal before. Beta starts in the last corner.
    """
    batches, length, width = of_blank.shape
    diagonals = length + width - 1
    i = torch.arange(width, dtype=torch.int64, device=of_blank.device)[None, None, :]
    s = torch.arange(diagonals, dtype=torch.int64, device=of_blank.device)[None, :, None] - i
    inside = (s >= 0) & (s < nodes.frames) & (i < nodes.tokens)
    blank, label = of_blank.reshape(batches, -1), of_label.reshape(batches, -1)

    def along(values: Tensor, t: Tensor, u: Tensor, wanted: Tensor) -> Tensor:
        """Diagonals of `values`, one after the other: diagonals x B x width."""
        place = torch.where(wanted, t * width + u, 0).expand(batches, diagonals, width)
        found = values.gather(1, place.reshape(batches, -1)).reshape(batches, diagonals, width)
        return torch.where(wanted, found, NEVER).transpose(0, 1)

    t, u = nodes.frames - 1 - s, nodes.tokens - 1 - i
    by_blank = torch.cat([along(blank, s - 1, i, inside & (s > 0)), along(blank, t, u, inside & (s > 0))], 1)
    by_label = torch.cat([along(label, s, i - 1, inside & (i > 0)), along(label, t, u, inside & (i > 0))], 1)
    words = torch.stack([by_label, by_blank], 1).unbind(0)
    # A column before the first, never reached, makes all nodes alike; (left, own) are a node's two predecessors.
    both = (diagonals, 2 * batches, 1 + width)
    framed = torch.full(both, NEVER, dtype=of_blank.dtype, device=of_blank.device)
    reached = framed[:, :, 1:]
    reached[0, :batches, 0] = 0.0
    end = (nodes.frames - 1) * width + nodes.tokens - 1
    reached[0, batches:, 0] = blank.gather(1, end.clamp(min=0).reshape(batches, 1)).reshape(-1)
    before = framed.as_strided((diagonals, 2, 2 * batches, width), (both[1] * both[2], 1, both[2], 1)).unbind(0)
    ways = torch.empty_like(words[0])
    by_left, by_own = ways.unbind(0)
    for d, here in enumerate(reached.unbind(0)):
        if d > 0:
            torch.add(before[d - 1], words[d], out=ways)
            torch.logaddexp(by_left, by_own, out=here)

    def back(values: Tensor, diagonal: Tensor, place: Tensor) -> Tensor:
        index = torch.where(nodes.exists, diagonal * width + place, 0).reshape(batches, -1)
        found = values.transpose(0, 1).reshape(batches, -1).gather(1, index).reshape(of_blank.shape)
        return torch.where(nodes.exists, found, 0.0)

    t, u = nodes.frames - 1 - nodes.t, nodes.tokens - 1 - nodes.u
    return back(reached[:, :batches], nodes.t + nodes.u, nodes.u), back(reached[:, batches:], t + u, u)


def shares_of_words(alpha: Tensor, beta: Tensor, of_blank: Tensor, of_label: Tensor, nodes: Lattice) -> Tensor:
    """Per node: the part of all ways that are right that goes on from there by blank, and by label; 2 x B x T x U."""
    total = beta[:, :1, :1]
    last = (nodes.t == nodes.frames - 1) & (nodes.u == nodes.tokens - 1)
    below = torch.nn.functional.pad(beta[:, 1:], (0, 0, 0, 1))
    beside = torch.nn.functional.pad(beta[:, :, 1:], (0, 1))
    by_blank = (alpha + of_blank + below - total).exp()
    by_label = (alpha + of_label + beside - total).exp()
    goes_on = nodes.exists & ((nodes.t < nodes.frames - 1) | last)
    has_label = nodes.exists & (nodes.u < nodes.tokens - 1)
    return torch.stack([torch.where(goes_on, by_blank, 0.0), torch.where(has_label, by_label, 0.0)])


def forward(
    x: Tensor,
    label: Tensor,
    f_len: Tensor,
    y_len: Tensor,
    batch_offset: Tensor | None,
    sizes: tuple[int, int],
    blank: int,
    normalize: bool,
) -> tuple[Tensor, LossNodes, Tensor]:
    """Losses in x's dtype, what the backward pass needs, and alpha and beta (2 x B x T x U)."""
    nodes = lattice(f_len, y_len, batch_offset, sizes)
    sums, of_blank, of_label = scores_of_words(x, label, nodes, blank, normalize)
    alpha, beta = alpha_and_beta(of_blank, of_label, nodes)
    shares = shares_of_words(alpha, beta, of_blank, of_label, nodes)
    return -beta[:, 0, 0].to(x.dtype), LossNodes(sums, shares), torch.stack([alpha, beta])


def backward(
    grad: Tensor,
    x: Tensor,
    label: Tensor,
    f_len: Tensor,
    y_len: Tensor,
    batch_offset: Tensor | None,
    blank: int,
    saved: LossNodes,
    through_softmax: bool,
) -> Tensor:
    """The gradient of the logits, or (not `through_softmax`) of the log-probabilities; a few rows at a time."""
    compute, words = compute_dtype(x), x.shape[-1]
    sums, (by_blank, by_label) = saved.sums, saved.shares.unbind(0)
    nodes = lattice(f_len, y_len, batch_offset, (by_blank.shape[1], by_blank.shape[2]))
    flat = x.reshape(-1, words)
    rows = nodes.rows[nodes.exists]
    factor = grad.to(compute)[:, None, None]

    def per_row(values: Tensor) -> Tensor:
        return torch.zeros(flat.shape[0], dtype=compute, device=x.device).index_copy_(0, rows, values[nodes.exists])

    minus_blank, minus_label = per_row(-by_blank * factor), per_row(-by_label * factor)
    every = minus_blank + minus_label
    labels = torch.nn.functional.pad(label.long(), (0, 1))[:, None, :].clamp(0, words - 1).expand(nodes.rows.shape)
    label_of_row = torch.zeros_like(every, dtype=torch.int64).index_copy_(0, rows, labels[nodes.exists])
    no_node = None
    if len(rows) < len(flat):
        no_node = torch.ones_like(every, dtype=torch.bool).index_fill_(0, rows, False)[:, None]
    gradient = torch.empty_like(flat)
    step = max(1, CHUNK // max(1, words))
    for first in range(0, flat.shape[0], step):
        part = slice(first, first + step)
        if through_softmax:
            wide = flat[part].to(compute)
            slope = (wide.exp() if sums is None else wide.softmax(1)).mul_(-every[part, None])
            if no_node is not None:
                slope.masked_fill_(no_node[part], 0.0)
        else:
            slope = torch.zeros(flat[part].shape, dtype=compute, device=x.device)
        slope[:, blank] += minus_blank[part]
        slope.scatter_add_(1, label_of_row[part, None], minus_label[part, None])
        gradient[part] = slope
    return gradient.reshape(x.shape)
