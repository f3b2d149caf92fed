"""Joint and loss of a speech transducer, forward and backward separately."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...contrib.transducer import TransducerJoint, TransducerLoss
from ..directions import Random, compared, exact, long_name, passes, prepare, times, with_peers
from ..registry import Case, Family, Prepared, register

# Sequences, frames, tokens, and features of the joint or words of the loss.
Shape = tuple[int, int, int, int]
GPU_JOINTS: tuple[tuple[torch.dtype, Shape], ...] = ((torch.float16, (16, 300, 60, 512)),)
GPU_LOSSES: tuple[tuple[torch.dtype, Shape], ...] = ((torch.float16, (16, 300, 60, 1024)),)
CPU_JOINTS: tuple[tuple[torch.dtype, Shape], ...] = ((torch.float32, (4, 100, 40, 512)),)
CPU_LOSSES: tuple[tuple[torch.dtype, Shape], ...] = ((torch.float32, (4, 60, 20, 256)),)
BLANK = 0
# Replaces -inf, with which a derivative of log-add would be NaN.
NEVER = -1e30


def _lengths(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    frames, tokens = (torch.full((shape[0],), n, dtype=torch.int32, device=device) for n in shape[1:3])
    return frames, tokens


def _eager_losses(x: Tensor, label: Tensor, f_len: Tensor, y_len: Tensor, blank: int) -> Tensor:
    """Compute the losses without a kernel: log-probabilities, then alpha along the diagonals; for full lengths only."""
    batches, frames, tokens, _ = x.shape
    log_probabilities = x.log_softmax(-1, torch.promote_types(x.dtype, torch.float32))
    blanks = log_probabilities[..., blank]
    labels = log_probabilities[:, :, :-1].gather(3, label.long()[:, None, :, None].expand(-1, frames, -1, 1))[..., 0]
    skewed_blank = _skew(blanks)
    skewed_label = _skew(torch.nn.functional.pad(labels, (0, 1), value=NEVER))
    alpha = torch.nn.functional.pad(blanks.new_zeros(batches, 1), (0, tokens - 1), value=NEVER)
    for diagonal in range(frames + tokens - 2):
        moved = torch.nn.functional.pad((alpha + skewed_label[:, diagonal])[:, :-1], (1, 0), value=NEVER)
        alpha = torch.logaddexp(alpha + skewed_blank[:, diagonal], moved)
    return -(alpha[:, -1] + blanks[:, -1, -1])


def _skew(scores: Tensor) -> Tensor:
    """Return the diagonals of each sequence: element u of diagonal d is scores[d - u, u]."""
    batches, frames, tokens = scores.shape
    diagonals = frames + tokens - 1
    t = torch.arange(diagonals, device=scores.device)[:, None] - torch.arange(tokens, device=scores.device)
    diagonal_scores = scores.gather(1, t.clamp(0, frames - 1).expand(batches, -1, -1))
    return diagonal_scores.masked_fill((t < 0) | (t >= frames), NEVER)


def _torchaudio_losses(x: Tensor, label: Tensor, f_len: Tensor, y_len: Tensor, blank: int) -> Tensor:
    from torchaudio.functional import rnnt_loss  # type: ignore[import-not-found, unused-ignore]

    return rnnt_loss(x, label, f_len, y_len, blank=blank, reduction="none")


def _joint(dtype: torch.dtype, shape: Shape, direction: str, device: torch.device) -> Prepared:
    random = Random(device)
    batches, frames, tokens, features = shape
    f = random.normal(batches, frames, features, dtype=dtype).requires_grad_()
    g = random.normal(batches, tokens, features, dtype=dtype).requires_grad_()
    dh = random.normal(*shape, dtype=dtype)

    def eager(f: Tensor, g: Tensor, f_len: Tensor, g_len: Tensor) -> Tensor:
        return f[:, :, None] + g[:, None]

    arguments = (f, g, *_lengths(shape, device))
    return compared(TransducerJoint(), eager, arguments, dh, direction, (1, tokens, frames), compile=False)


def _loss(dtype: torch.dtype, shape: Shape, direction: str, device: torch.device) -> Prepared:
    random = Random(device)
    batches, frames, tokens, words = shape
    x = random.normal(*shape, dtype=dtype).requires_grad_()
    label = random.integers(1, words, batches, tokens - 1).int()
    f_len, g_len = _lengths(shape, device)
    gradient = torch.ones(batches, device=device, dtype=dtype)
    makers = with_peers(TransducerLoss(), _eager_losses, device, compile=False)
    if importlib.util.find_spec("torchaudio") is not None:
        makers["torchaudio"] = lambda: _torchaudio_losses
    arguments = (x, label, f_len, g_len - 1, BLANK)
    terms = (frames * tokens, frames * tokens)  # alpha and beta sum over as many nodes
    return prepare(
        makers, arguments, gradient, direction, exact(_eager_losses, arguments, gradient, direction, dtype, terms)
    )


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Return cases of full-length sequences: savings by padding depend on the data. A CPU gets smaller ones."""
    joints, losses = (GPU_JOINTS, GPU_LOSSES) if device.type == "cuda" else (CPU_JOINTS, CPU_LOSSES)
    result = []
    for what, make, rows in (("joint", _joint, joints), ("loss", _loss, losses)):
        for dtype, shape in rows:
            batches, frames, tokens, features = shape
            logits, inputs = math.prod(shape) * dtype.itemsize, batches * (frames + tokens) * features * dtype.itemsize
            moved = {"fwd": logits, "bwd": 2 * logits}
            if what == "joint":
                moved = dict.fromkeys(moved, logits + inputs)
            name = f"transducer_{what} {'half' if dtype == torch.float16 else long_name(dtype)} {times(shape)}"
            result += passes(name, moved, make, dtype, shape)
    return result


register(Family("transducer", "joint and loss of a speech transducer", cases))
