"""Loss scaling for models that are split over processes."""

from .grad_scaler import GradScaler
from .hysteresis import HysteresisScaler

__all__ = ["GradScaler", "HysteresisScaler"]
