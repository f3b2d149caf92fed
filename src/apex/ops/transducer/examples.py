"""Examples of speech transducers: the joint and the loss, padded and packed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._examples import Example, Make, Public, Random, Row, Sizes
from .op_joint import JOINT, joint_arguments
from .op_loss import LOSS, check_loss
from .reference import PADDING

_HALF, _F32 = torch.float16, torch.float32
# Replaces -inf, with which a derivative of log-add would be NaN.
_NEVER = -1e30


def _lengths(batches: int, longest: int, full: bool) -> list[int]:
    """Return the longest length for all sequences if `full`, else different ones."""
    return [longest if full else 1 + (5 * batch + longest - 1) % longest for batch in range(batches)]


def _packing(make: Make, frames: list[int], tokens: list[int]) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return lengths in frames and in tokens, the ends of the packed sequences and the number of their rows."""
    both = [make.tensor(each, torch.int32) for each in (frames, tokens)]
    ends = torch.cumsum(both[0] * both[1], 0, dtype=torch.int64)
    return *both, ends, sum(f * t for f, t in zip(frames, tokens, strict=True))  # type: ignore[return-value]


def _inside(f_len: Tensor, g_len: Tensor, frames: int, tokens: int) -> Tensor:
    """Return which positions of batch x frames x tokens are not padding."""
    t, u = (torch.arange(size, dtype=torch.int64, device=f_len.device) for size in (frames, tokens))
    return (t < f_len[:, None])[:, :, None] & (u < g_len[:, None])[:, None]


def _joint(
    f: Tensor, g: Tensor, f_len: Tensor, g_len: Tensor, batch_offset: Tensor | None, packed_rows: int, relu: bool
) -> Tensor:
    return JOINT(*joint_arguments(f, g, f_len, g_len, batch_offset, relu, packed_rows=packed_rows))


def _joint_torch(
    f: Tensor, g: Tensor, f_len: Tensor, g_len: Tensor, batch_offset: Tensor | None, packed_rows: int, relu: bool
) -> Tensor:
    h, inside = f[:, :, None] + g[:, None], _inside(f_len, g_len, f.shape[1], g.shape[1])
    h = h.relu() if relu else h
    return torch.where(inside[..., None], h, PADDING) if batch_offset is None else h[inside]


def _joint_example(name: str, full: bool, packed: bool, relu: bool, **others: Any) -> Example:
    def arguments(make: Make, batches: int, frames: int, tokens: int, features: int) -> dict[str, Any]:
        f, g = make.normal(batches, frames, features), make.normal(batches, tokens, features)
        lengths = _lengths(batches, frames, full), _lengths(batches, tokens, full)
        f_len, g_len, ends, rows = _packing(make, *lengths)
        packing = {"batch_offset": ends if packed else None, "packed_rows": rows if packed else 0}
        return {"f": f, "g": g, "f_len": f_len, "g_len": g_len, **packing, "relu": relu}

    return Example(
        name,
        _joint,
        arguments,
        torch=others.pop("torch", _joint_torch),
        sizes="batch x frames x tokens x features",
        kink=(lambda f, g, *_: f[:, :, None] + g[:, None]) if relu else None,
        compiles=False,
        **others,
    )


def _draw(random: Random) -> Sizes:
    features = random.length(8, 1024)
    frames = random.size(1, min(512, max(1, random.most // features)))
    tokens = random.size(1, min(128, max(1, random.most // (features * frames))))
    return random.size(1, max(1, random.most // (features * frames * tokens))), frames, tokens, features


def _loss(x: Tensor, label: Tensor, f_len: Tensor, y_len: Tensor, ends: Tensor | None, frames: int, blank: int) -> Any:
    check_loss(x, label, f_len, y_len, ends, frames, blank)
    wants_gradient = torch.is_grad_enabled() and x.requires_grad
    return LOSS.differentiable(x, label, f_len, y_len, ends, frames, blank, True, wants_gradient, False)


def _loss_torch(
    x: Tensor, label: Tensor, f_len: Tensor, y_len: Tensor, ends: Tensor | None, frames: int, blank: int
) -> Tensor:
    """Compute the losses without a kernel: log-probabilities, then alpha along the diagonals."""
    batches, tokens = len(f_len), label.shape[1] + 1
    if ends is not None:
        inside = _inside(f_len, y_len + 1, frames, tokens)[..., None]
        x = x.new_zeros(batches, frames, tokens, x.shape[-1]).masked_scatter(inside, x)
    log_probabilities = x.log_softmax(-1, torch.promote_types(x.dtype, torch.float32))
    blanks = log_probabilities[..., blank]
    labels = log_probabilities[:, :, :-1].gather(3, label.long()[:, None, :, None].expand(-1, frames, -1, 1))[..., 0]
    skewed_blank, skewed_label = _skew(blanks), _skew(pad(labels, (0, 1), value=_NEVER))
    alpha = [pad(blanks.new_zeros(batches, 1), (0, tokens - 1), value=_NEVER)]
    for diagonal in range(frames + tokens - 2):
        moved = pad((alpha[-1] + skewed_label[:, diagonal])[:, :-1], (1, 0), value=_NEVER)
        alpha.append(torch.logaddexp(alpha[-1] + skewed_blank[:, diagonal], moved))
    sequence = torch.arange(batches, dtype=torch.int64, device=x.device)
    return -(torch.stack(alpha)[f_len - 1 + y_len, sequence, y_len] + blanks[sequence, f_len - 1, y_len])


def _skew(scores: Tensor) -> Tensor:
    """Return the diagonals of each sequence: element u of diagonal d is scores[d - u, u]."""
    batches, frames, tokens = scores.shape
    t, u = (torch.arange(n, dtype=torch.int64, device=scores.device) for n in (frames + tokens - 1, tokens))
    row = t[:, None] - u
    diagonals = scores.gather(1, row.clamp(0, frames - 1).expand(batches, -1, -1))
    return diagonals.masked_fill((row < 0) | (row >= frames), _NEVER)


def _loss_example(name: str, full: bool, packed: bool, **others: Any) -> Example:
    def arguments(make: Make, batches: int, frames: int, tokens: int, words: int) -> dict[str, Any]:
        lengths = _lengths(batches, frames, full), _lengths(batches, tokens, full)
        f_len, g_len, ends, rows = _packing(make, *lengths)
        x = make.normal(rows, words) if packed else make.normal(batches, frames, tokens, words)
        label = make.integers(1, words, batches, tokens - 1, dtype=torch.int32)
        arguments = {
            "x": x,
            "label": label,
            "f_len": f_len,
            "y_len": g_len - 1,
            "batch_offset": ends if packed else None,
        }
        return {**arguments, "max_f_len": frames, "blank_idx": 0}

    def bytes_moved(dtype: torch.dtype, *sizes: int) -> tuple[int, int]:
        """Return the bytes of the logits, and of logits and gradient. Tracing all diagonals would take seconds."""
        logits = math.prod(sizes) * dtype.itemsize
        return logits, 2 * logits

    return Example(
        name,
        _loss,
        arguments,
        torch=_loss_torch,
        sizes="batch x frames x tokens x words",
        bytes_moved=bytes_moved,
        # Alpha and beta sum over as many nodes.
        terms=lambda batches, frames, tokens, words: frames * tokens,
        cancels=True,
        compiles=False,
        differentiable_twice=False,
        **others,
    )


_MODULE = "contrib.transducer:Transducer"
_LARGE = [(3, 90, 41, 1024), (3, 50, 131, 29), (3, 20, 601, 33)]

EXAMPLES = [
    _joint_example(
        "transducer_joint",
        True,
        False,
        False,
        torch=lambda f, g, *_: f[:, :, None] + g[:, None],
        small=[(2, 6, 3, 20), (1, 1, 1, 1), (1, 2, 130, 3), (1, 33, 2, 16)],
        draw=_draw,
        listed=[Row("cuda", _HALF, (16, 300, 60, 512)), Row("cpu", _F32, (4, 100, 40, 512))],
        public=[Public(f"{_MODULE}Joint", "f", "g", "f_len", "g_len", module=lambda *_: ())],
        extensions=["transducer_joint_cuda"],
    ),
    _joint_example(
        "transducer_joint_relu",
        False,
        False,
        True,
        small=[(3, 5, 9, 64)],
        draw=_draw,
        public=[Public(f"{_MODULE}Joint", "f", "g", "f_len", "g_len", module=lambda *_: (), relu=True)],
    ),
    _joint_example(
        "transducer_joint_packed",
        False,
        True,
        False,
        small=[(3, 4, 3, 24)],
        public=[
            Public(f"{_MODULE}Joint", "f", "g", "f_len", "g_len", "batch_offset", "packed_rows", module=lambda *_: (),
                   pack_output=True),
        ],
    ),
    _loss_example(
        "transducer_loss",
        True,
        False,
        small=[(2, 3, 4, 7), (1, 1, 1, 2), (1, 3, 1, 5), (1, 2, 2, 1100)],
        listed=[Row("cuda", _HALF, (16, 300, 60, 1024)), Row("cpu", _F32, (4, 60, 20, 256))],
        public=[Public(f"{_MODULE}Loss", "x", "label", "f_len", "y_len", "blank_idx", module=lambda *_: ())],
        extensions=["transducer_loss_cuda"],
    ),
    _loss_example("transducer_loss_padded", False, False, small=[(3, 3, 4, 32)], large=_LARGE),
    _loss_example(
        "transducer_loss_packed",
        False,
        True,
        small=[(3, 3, 4, 7)],
        large=_LARGE,
        public=[
            Public(f"{_MODULE}Loss", "x", "label", "f_len", "y_len", "blank_idx", "batch_offset", "max_f_len",
                   module=lambda *_: (), packed_input=True),
        ],
    ),
]  # fmt: skip
