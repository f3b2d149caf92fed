"""The numeric self-check of the multi-tensor ops, for `apex doctor`."""

from __future__ import annotations

import torch

from .. import _tolerance


def self_check(device: torch.device) -> float:
    """The largest error of one AdamW step and one norm, as a multiple of its tolerance."""
    from . import op, rules
    from .lists import make_lists

    generator = torch.Generator().manual_seed(0)
    sizes = (7, 5000, 1)
    slots = [[torch.rand(size, generator=generator) for size in sizes] for _ in range(4)]
    exact = [[tensor.double() for tensor in tensors] for tensors in slots]
    ours = [[tensor.to(device) for tensor in tensors] for tensors in slots]
    hyper = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "step": 3}
    norm, _ = op.l2norm(ours[1])
    expected_norm = torch.cat(exact[1]).norm().reshape(1)
    make_lists([*ours, None]).apply(rules.ADAM, hyper, (True, False))
    make_lists([*exact, None]).apply(rules.ADAM, hyper, (True, False))
    pairs = [(norm, expected_norm), *zip(ours[0], exact[0], strict=True)]
    return max(_tolerance.excess(found.cpu(), expected, torch.float32) for found, expected in pairs)
