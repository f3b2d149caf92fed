"""Where the parameters and buffers of a split model lie."""

from __future__ import annotations

import torch


def parameter_device() -> torch.device:
    """The current GPU, or the CPU where there is none; a default device other than the CPU goes before both."""
    chosen = torch.get_default_device()
    if chosen.type == "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return chosen
