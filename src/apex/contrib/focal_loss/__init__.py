"""Focal loss of dense detectors."""

from .focal_loss import FocalLoss, focal_loss

# Upstream's package exported the function under this name at first, the module later: client code finds either.
focal_loss.FocalLoss = FocalLoss  # type: ignore[attr-defined]
focal_loss.focal_loss = focal_loss  # type: ignore[attr-defined]

__all__ = ["focal_loss"]
