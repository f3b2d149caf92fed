"""Loss scaling for models that are split over processes."""

from .grad_scaler import GradScaler

__all__ = ["GradScaler"]
