"""Joint and loss of a speech transducer, forward and backward apart."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...contrib.transducer import TransducerJoint, TransducerLoss
from ...ops.transducer import JointSpec, reference_joint, reference_loss
from ..registry import OURS, Call, Case, Expected, Family, Prepared, register

# Sequences, frames, tokens, and features of the joint or words of the loss.
Shape = tuple[int, int, int, int]
GPU_JOINTS: tuple[tuple[torch.dtype, Shape], ...] = ((torch.float16, (16, 300, 60, 512)),)
GPU_LOSSES: tuple[tuple[torch.dtype, Shape], ...] = ((torch.float16, (16, 300, 60, 1024)),)
CPU_JOINTS: tuple[tuple[torch.dtype, Shape], ...] = ((torch.float32, (4, 100, 40, 512)),)
CPU_LOSSES: tuple[tuple[torch.dtype, Shape], ...] = ((torch.float32, (4, 60, 20, 256)),)
BLANK = 0
# Stands for -inf where a derivative of log-add would be NaN.
NEVER = -1e30


def _lengths(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    frames, tokens = (torch.full((shape[0],), n, dtype=torch.int32, device=device) for n in shape[1:3])
    return frames, tokens


def _eager_losses(x: Tensor, label: Tensor) -> Tensor:
    """What one writes without a kernel: log-probabilities, then alpha along the diagonals; sequences of full length."""
    batches, frames, tokens, _ = x.shape
    log_probabilities = x.float().log_softmax(-1)
    blank = log_probabilities[..., BLANK]
    labels = log_probabilities[:, :, :-1].gather(3, label.long()[:, None, :, None].expand(-1, frames, -1, 1))[..., 0]
    skewed_blank = _skew(blank)
    skewed_label = _skew(torch.nn.functional.pad(labels, (0, 1), value=NEVER))
    alpha = torch.nn.functional.pad(x.new_zeros(batches, 1, dtype=torch.float32), (0, tokens - 1), value=NEVER)
    for diagonal in range(frames + tokens - 2):
        moved = torch.nn.functional.pad((alpha + skewed_label[:, diagonal])[:, :-1], (1, 0), value=NEVER)
        alpha = torch.logaddexp(alpha + skewed_blank[:, diagonal], moved)
    return -(alpha[:, -1] + blank[:, -1, -1])


def _skew(scores: Tensor) -> Tensor:
    """Diagonal d of each sequence: element u is scores[d - u, u]."""
    batches, frames, tokens = scores.shape
    diagonals = frames + tokens - 1
    t = torch.arange(diagonals, device=scores.device)[:, None] - torch.arange(tokens, device=scores.device)
    found = scores.gather(1, t.clamp(0, frames - 1).expand(batches, -1, -1))
    return found.masked_fill((t < 0) | (t >= frames), NEVER)


def _torchaudio_losses(x: Tensor, label: Tensor, f_len: Tensor, y_len: Tensor) -> Tensor:
    from torchaudio.functional import rnnt_loss  # type: ignore[import-not-found, unused-ignore]

    return rnnt_loss(x, label, f_len, y_len, blank=BLANK, reduction="none")


def _call(function: Callable[[], Tensor], inputs: Sequence[Tensor], gradient: Tensor, direction: str) -> Call:
    if direction == "fwd":
        return lambda: (function(),)
    value = function()
    return lambda: torch.autograd.grad(value, inputs, gradient.to(value.dtype), retain_graph=True)


def _joint(dtype: torch.dtype, shape: Shape, direction: str, device: torch.device) -> Prepared:
    generator = torch.Generator(device).manual_seed(0)
    batches, frames, tokens, features = shape
    f = torch.randn(batches, frames, features, generator=generator, device=device).to(dtype).requires_grad_()
    g = torch.randn(batches, tokens, features, generator=generator, device=device).to(dtype).requires_grad_()
    dh = torch.randn(shape, generator=generator, device=device).to(dtype)
    lengths = _lengths(shape, device)
    joint = TransducerJoint()
    functions: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: joint(f, g, *lengths),
        "torch": lambda: f[:, :, None] + g[:, None],
    }
    if direction == "fwd":
        h, _ = reference_joint.forward(f.double(), g.double(), *lengths, None, JointSpec(), None, False)
        expected = [Expected(h.detach(), dtype)]
    else:
        df, dg = reference_joint.backward(dh.double(), None, *lengths, None, (frames, tokens), 1.0)
        expected = [Expected(df, dtype, tokens), Expected(dg, dtype, frames)]
    calls = {name: functools.partial(_call, function, (f, g), dh, direction) for name, function in functions.items()}
    return Prepared(calls, expected)


def _loss(dtype: torch.dtype, shape: Shape, direction: str, device: torch.device) -> Prepared:
    generator = torch.Generator(device).manual_seed(0)
    batches, frames, tokens, words = shape
    x = torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_()
    label = torch.randint(1, words, (batches, tokens - 1), generator=generator, device=device).int()
    f_len, g_len = _lengths(shape, device)
    y_len = g_len - 1
    gradient = torch.ones(batches, device=device, dtype=dtype)
    loss = TransducerLoss()
    functions: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: loss(x, label, f_len, y_len, BLANK),
        "torch": lambda: _eager_losses(x, label),
    }
    if importlib.util.find_spec("torchaudio") is not None:
        functions["torchaudio"] = lambda: _torchaudio_losses(x, label, f_len, y_len)
    given = x.detach(), label, f_len, y_len, None
    exact = given[0].double(), *given[1:]
    losses, saved, _ = reference_loss.forward(*exact, (frames, tokens), BLANK, True)
    # alpha and beta are sums over as many nodes.
    if direction == "fwd":
        expected = [Expected(losses, dtype, frames * tokens)]
    else:
        dx = reference_loss.backward(gradient.double(), *exact, BLANK, saved, True)
        expected = [Expected(dx, dtype, frames * tokens)]
    calls = {
        name: functools.partial(_call, function, (x,), gradient, direction) for name, function in functions.items()
    }
    return Prepared(calls, expected)


def _name(op: str, dtype: torch.dtype, shape: Shape, direction: str) -> str:
    kind = "half" if dtype == torch.float16 else str(dtype).removeprefix("torch.")
    return f"transducer_{op} {kind} {'x'.join(map(str, shape))} {direction}"


def _joint_case(dtype: torch.dtype, shape: Shape, direction: str) -> Case:
    batches, frames, tokens, features = shape
    moved = batches * (frames * tokens + frames + tokens) * features * dtype.itemsize
    return Case(_name("joint", dtype, shape, direction), moved, functools.partial(_joint, dtype, shape, direction))


def _loss_case(dtype: torch.dtype, shape: Shape, direction: str) -> Case:
    batches, frames, tokens, words = shape
    moved = batches * frames * tokens * words * dtype.itemsize * (1 if direction == "fwd" else 2)
    return Case(_name("loss", dtype, shape, direction), moved, functools.partial(_loss, dtype, shape, direction))


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Sequences of full length, padded: what the padding saves depends on the data. A processor gets smaller ones."""
    gpu = device.type == "cuda"
    joints, losses = (GPU_JOINTS, GPU_LOSSES) if gpu else (CPU_JOINTS, CPU_LOSSES)
    ways = ("fwd", "bwd")
    return [
        *(_joint_case(dtype, shape, way) for dtype, shape in joints for way in ways),
        *(_loss_case(dtype, shape, way) for dtype, shape in losses for way in ways),
    ]


register(Family("transducer", "joint and loss of a speech transducer", cases))
