"""Seeds for tests, with Colossal-AI's name."""

from __future__ import annotations

import torch

from .._random import seed_host

__all__ = ["seed_all"]


def seed_all(seed: int, cuda_deterministic: bool = False) -> None:
    """Seed all random numbers; `cuda_deterministic` asks cuDNN for deterministic algorithms."""
    import numpy  # noqa: F401  (tests draw from it after this call)

    seed_host(seed)
    torch.backends.cudnn.deterministic = cuda_deterministic
    torch.backends.cudnn.benchmark = not cuda_deterministic
