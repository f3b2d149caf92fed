"""A quick numeric check of joint and loss on one device, for `apex doctor`."""

from __future__ import annotations

import torch

from .._tolerance import excess
from . import reference_joint, reference_loss
from .spec import JointSpec

FRAMES, TOKENS, FEATURES, WORDS = 9, 5, 24, 40


def self_check(device: torch.device) -> float:
    """Largest error, as a multiple of its tolerance, of results and gradients of joint (ReLU) and loss, per dtype."""
    from . import joint, loss

    generator = torch.Generator().manual_seed(0)
    f_len, g_len = torch.tensor([9, 6]), torch.tensor([4, 5])
    label = torch.randint(1, WORDS, (2, TOKENS - 1), generator=generator)
    worst = 0.0

    def note(actual: torch.Tensor, expected: torch.Tensor, reduction: int = 1) -> None:
        nonlocal worst
        worst = max(worst, excess(actual.cpu(), expected, reduction=reduction))

    here = f_len.to(device), g_len.to(device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        f = torch.randn(2, FRAMES, FEATURES, generator=generator).to(dtype)
        g = torch.randn(2, TOKENS, FEATURES, generator=generator).to(dtype)
        dh = torch.randn(2, FRAMES, TOKENS, FEATURES, generator=generator).to(dtype)
        spec, sizes = JointSpec(relu=True), (FRAMES, TOKENS)
        with torch.no_grad():
            h, _ = joint.joint_forward(f.to(device), g.to(device), *here, None, spec)
            gradients = joint.joint_backward(dh.to(device), h, *here, None, sizes, 1.0, (dtype, dtype))
        wanted, _ = reference_joint.forward(f.double(), g.double(), f_len, g_len, None, spec, None, False)
        note(h, wanted)
        wanted_gradients = reference_joint.backward(dh.double(), wanted, f_len, g_len, None, sizes, 1.0)
        for gradient, exact in zip(gradients, wanted_gradients, strict=True):
            note(gradient, exact, FRAMES)

        x = torch.randn(2, FRAMES, TOKENS, WORDS, generator=generator).to(dtype)
        grad = torch.rand(2, generator=generator).to(dtype)
        given = label.to(device), here[0], here[1] - 1, None
        losses, saved, _ = loss.loss_forward(x.to(device), *given, FRAMES, 0)
        assert saved is not None
        dx = loss.loss_backward(grad.to(device), x.to(device), *given, 0, saved)
        exact_given = x.double(), label, f_len, g_len - 1, None
        wanted_losses, wanted_saved, _ = reference_loss.forward(*exact_given, sizes, 0, True)
        note(losses, wanted_losses, FRAMES * TOKENS)
        note(dx, reference_loss.backward(grad.double(), *exact_given, 0, wanted_saved, True), FRAMES * TOKENS)
    return worst
