"""Loss scalers of `apex.amp` for a model that is split over processes."""

from __future__ import annotations

import torch.distributed as dist

from ..._distributed import collectives
from ...amp._amp_state import _amp_state
from ...amp.scaler import LossScaler
from .. import parallel_state


class _AgreeingScaler(LossScaler):
    """A loss scaler that lowers its scale, and skips the step, where any process overflowed."""

    def update_scale(self) -> bool:
        for group in (parallel_state.get_model_parallel_group(), parallel_state.get_data_parallel_group()):
            if dist.get_world_size(group) > 1:
                collectives.all_reduce(self._overflow_buf, group, "agreeing on an overflow").wait()
        return super().update_scale()


def agree_on_overflows() -> None:
    """Has the scalers that `amp.initialize` made ask all processes of the split model."""
    for scaler in _amp_state.loss_scalers:
        scaler.__class__ = _AgreeingScaler
