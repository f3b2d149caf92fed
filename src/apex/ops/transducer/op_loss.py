"""The transducer loss: minus the logarithm of the probability of all alignments of labels and frames.

`op_joint.py` explains letters and layouts. With `softmax`, x has logits, and the softmax is part of the loss: the
backward pass computes the gradient of the logits from x and three numbers per node of B x T x U. Without it, x has
log-probabilities, and there are no `sums`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._checks import FLOATS, at_hand, check_tensors, integer
from .._device import facts
from .._op import Derivative, Kernels, Op, Saved
from . import config, reference
from .op_joint import FAMILY, check_lengths, check_offset, fill_rest, within_rows

kernels = _library.LazyModule(f"{__package__}.kernels_loss")

# The kernels count words of a row and nodes of the lattices in 32 bits.
MOST = 2**31 - 2**16


def check_loss(
    x: Tensor,
    label: Tensor,
    f_len: Tensor,
    y_len: Tensor,
    batch_offset: Tensor | None,
    max_f_len: int,
    blank_idx: int,
) -> None:
    """Raise for arguments that do not fit; check lengths and labels only if reading them needs no wait."""
    check_tensors(x=x, label=label)
    if label.dim() != 2 or label.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"label must be batch x labels of int32 or int64, got {label.dtype} of shape {list(label.shape)}"
        )
    batches, tokens = label.shape[0], label.shape[1] + 1
    if x.dtype not in FLOATS:
        raise TypeError(f"x must be float16, bfloat16, float32 or float64, got {x.dtype}")
    if batch_offset is None:
        if x.dim() != 4 or x.shape[0] != batches or x.shape[2] != tokens:
            raise ValueError(
                f"x must be batch x frames x (labels + 1) x words, got shape {list(x.shape)} where label has "
                f"{list(label.shape)}"
            )
        if max_f_len != x.shape[1]:
            raise ValueError(f"max_f_len={max_f_len} must be the {x.shape[1]} frames of a padded x")
    elif x.dim() != 2:
        raise ValueError(f"a packed x must be rows x words, got shape {list(x.shape)}")
    if not 0 <= integer("blank_idx", blank_idx) < x.shape[-1]:
        raise ValueError(f"blank_idx={blank_idx} must be a word, between 0 and {x.shape[-1] - 1}")
    if max(x.shape[-1], batches * max_f_len * tokens) > MOST:
        raise ValueError(f"{batches} x {max_f_len} x {tokens} nodes of {x.shape[-1]} words are more than {MOST}")
    if label.device != x.device:
        raise ValueError(f"label is on {label.device}, x on {x.device}")
    check_lengths(f_len, "f_len", batches, max_f_len, x.device, least=1)
    check_lengths(y_len, "y_len", batches, tokens - 1, x.device)
    if batch_offset is not None:
        check_offset(batch_offset, batches, x.device, f_len, y_len + 1, x.shape[0])
    if at_hand(label) and at_hand(y_len):
        used = torch.arange(tokens - 1, dtype=torch.int64, device=label.device) < y_len[:, None]
        wrong = label[used & ((label < 0) | (label >= x.shape[-1]))]
        if len(wrong):
            raise ValueError(f"label must hold words, between 0 and {x.shape[-1] - 1}, got {int(wrong[0])}")


@torch.no_grad()
def shares_of_scores(
    alpha: Tensor,
    beta: Tensor,
    log_probabilities: Tensor,
    label: Tensor,
    f_len: Tensor,
    y_len: Tensor,
    batch_offset: Tensor | None,
    blank_idx: int,
) -> Tensor:
    """Return the `shares` that the backward pass needs, from alpha and beta (B x T x U) of log-probabilities."""
    nodes = reference.lattice(f_len, y_len, batch_offset, (alpha.shape[1], alpha.shape[2]))
    words = reference.scores_of_words(log_probabilities, label, nodes, blank_idx, softmax=False)[1:]
    return reference.shares_of_words(alpha, beta, *words, nodes)


def _can_walk() -> bool:
    """Return whether this Triton has the functions that the walk over the lattices needs: 3.2 cannot gather."""
    if hasattr(kernels.tl, "gather"):
        return True
    if _library.requested == "triton":
        raise RuntimeError("APEX_IMPL=triton was asked for, but the transducer loss needs Triton 3.3 or later")
    return False


def launch_forward(
    x: Tensor, label: Tensor, f_len: Tensor, y_len: Tensor, batch_offset: Tensor | None, *options: Any
) -> tuple[Tensor | None, ...]:
    frames, blank_idx, softmax, want_nodes, want_scores = options
    batches, tokens, words = len(f_len), label.shape[1] + 1, x.shape[-1]
    if not batches or not _can_walk():
        return LOSS.run_reference(x, label, f_len, y_len, batch_offset, *options)
    device, both = facts(x.device), want_nodes or want_scores

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    sums = empty(batches, frames, tokens) if softmax else None
    # Probabilities of each node's blank and label, diagonal after diagonal: see the kernels.
    probabilities = empty(2, batches, (frames + tokens - 1) * tokens, dtype=torch.int64)
    reading = config.reading_tile(tokens, words, x.dtype.itemsize, device)
    kernels.transducer_loss_words(
        (batches * frames * -(-tokens // reading.rows),),
        (x, label, f_len, y_len, within_rows(batch_offset, len(x)), sums, probabilities),
        (batches, frames, tokens, words, blank_idx),
        WHOLE=words <= reading.groups * reading.lanes,
        GROUPS=reading.groups,
        ROWS=reading.rows,
        LANES=reading.lanes,
        num_warps=1,
    )
    sizes = (batches, frames, tokens)
    states = torch.empty_like(probabilities if both else probabilities[0])
    losses = empty(batches, dtype=x.dtype)
    tokens_at_once, num_warps = config.walk_tile(tokens, device)
    kernels.transducer_loss_walk(
        (batches * (2 if both else 1),),
        (probabilities, f_len, y_len, states, losses),
        sizes,
        ALPHA=both,
        MANY=tokens > tokens_at_once,
        TOKENS=tokens_at_once,
        num_warps=num_warps,
    )
    if not both:
        return losses, sums, None, None
    shares = empty(2, batches, frames, tokens)
    scores = torch.empty_like(shares) if want_scores else None
    diagonals, columns = config.shares_tile(tokens)
    kernels.transducer_loss_shares(
        (batches * -(-(frames + tokens - 1) // diagonals) * -(-tokens // columns),),
        (probabilities, states, f_len, y_len, shares, scores),
        sizes,
        DIAGONALS=diagonals,
        COLUMNS=columns,
        num_warps=4,
    )
    return losses, sums, shares, scores


def launch_backward(grad: Tensor, x: Tensor, *saved: Any) -> Tensor:
    """Return the gradient of x; `saved` is the other saved tensors of `LOSS`, its settings and `wanted`."""
    label, f_len, y_len, batch_offset, sums, shares, _, blank_idx, softmax, *_ = saved
    if not x.numel():
        return torch.empty_like(x)
    batches, frames, tokens = shares.shape[1:]
    batch_offset = within_rows(batch_offset, len(x))
    tile = config.writing_tile(tokens, x.shape[-1], x.dtype.itemsize, facts(x.device))
    dx = torch.empty_like(x)
    kernels.transducer_loss_backward(
        (batches * frames * -(-tokens // tile.rows),),
        (grad, x, label, f_len, y_len, batch_offset, sums, shares, dx),
        (batches, frames, tokens, x.shape[-1], blank_idx),
        SOFTMAX=softmax,
        GROUPS=tile.groups,
        ROWS=tile.rows,
        LANES=tile.lanes,
        num_warps=1,
    )
    fill_rest(batch_offset, dx, 0.0)
    return dx


def _fake(x, label, f_len, y_len, batch_offset, *options):  # type: ignore[no-untyped-def]
    max_f_len, _, softmax, want_nodes, want_scores = options
    nodes, compute = (label.shape[0], max_f_len, label.shape[1] + 1), _library.compute_dtype(x)
    return (
        x.new_empty(label.shape[0]),
        x.new_empty(nodes, dtype=compute) if softmax else None,
        x.new_empty((2, *nodes), dtype=compute) if want_nodes or want_scores else None,
        x.new_empty((2, *nodes), dtype=compute) if want_scores else None,
    )


# `sums` are the logs of the sums of the logits' exponentials, per node, zero for nodes that do not exist. `shares`,
# 2 x B x T x U, are the posterior probabilities of a node's two transitions: the part of the probability of all right
# alignments that continues from the node by blank, and by label. `scores` are alpha and beta, 2 x B x T x U.
LOSS = Op(
    FAMILY,
    "transducer_loss(Tensor x, Tensor label, Tensor f_len, Tensor y_len, Tensor? batch_offset, SymInt max_f_len, "
    "int blank_idx, bool softmax, bool want_nodes, bool want_scores) "
    "-> (Tensor losses, Tensor sums, Tensor shares, Tensor scores)",
    reference=reference.loss,
    kernels=Kernels(launch_forward, launch_backward),
    shapes=_fake,
    saved=Saved("x", "label", "f_len", "y_len", "batch_offset", "sums", "shares"),
    derivative=Derivative(
        of=("x",),
        backward=reference.loss_backward,
        once=lambda *settings: "the transducer loss has a first derivative only; create_graph=True is not supported",
    ),
)
