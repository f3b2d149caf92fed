"""The Booster's device as an object, with Colossal-AI's name."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["Accelerator"]


class Accelerator:
    """A device that models are moved to."""

    def __init__(self, device: str) -> None:
        self.device = device
        torch.device(device)  # raises for an unknown name

    def bind(self) -> None:
        """Make the device the current one, if it is an accelerator."""
        chosen = torch.device(self.device)
        if chosen.index is not None and torch.accelerator.is_available():
            torch.accelerator.set_device_index(chosen.index)

    def configure_model(self, model: nn.Module) -> nn.Module:
        """Move a model to the device."""
        return model.to(torch.device(self.device))
