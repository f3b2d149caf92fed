"""Loss scalers of `apex.amp` for a model that is split over processes."""

from __future__ import annotations

from ...amp._amp_state import _amp_state
from ...amp.scaler import LossScaler
from .grad_scaler import sum_over_model


class _ModelParallelScaler(LossScaler):
    """A loss scaler that lowers its scale and skips the step if any process overflowed."""

    def update_scale(self) -> bool:
        sum_over_model(self._overflow_buf)
        return super().update_scale()


def agree_on_overflows() -> None:
    """Make the loss scalers of `amp.initialize` share overflows with all processes of the split model."""
    for scaler in _amp_state.loss_scalers:
        scaler.__class__ = _ModelParallelScaler
