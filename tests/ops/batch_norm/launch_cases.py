"""Launches of the batch norm kernels to compile for every GPU: both layouts, with and without an addend."""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor

from apex.ops import _library
from apex.ops.batch_norm import BatchNormSpec, Channels, backward, forward
from apex.ops.batch_norm.kernel_passes import launch_statistics

# shape, channels last, dtype, dtype of the parameters, addend
_CASES = [
    ((32, 256, 56, 56), True, torch.float16, torch.float32, True),
    ((32, 256, 56, 56), False, torch.bfloat16, torch.bfloat16, False),
    ((64, 120, 28, 28), True, torch.float16, torch.float32, False),
    ((64, 75, 29, 29), True, torch.float16, torch.float32, False),  # nothing to copy to shared memory
    ((2, 120, 14, 14), True, torch.float16, torch.float32, True),
    ((1, 200, 90, 90), False, torch.bfloat16, torch.float32, False),
]


class _Alone:
    """The exchange of a group of one rank."""

    averaged_ranks = 0

    def gather(self, rank_stats: Tensor) -> Tensor:
        return rank_stats[None]

    def add_up(self, rank_stats: Tensor) -> None:
        pass


def record() -> None:
    """Launch forward and backward of every case: one process, several, and a captured graph."""
    with mock.patch.object(_library, "runs_triton", return_value=True):  # although nothing runs here
        for shape, last, dtype, parameters, addend in _CASES:
            channels = shape[1]
            x = torch.empty(shape, dtype=dtype, device="meta")
            x = x.to(memory_format=torch.channels_last) if last else x
            weight = torch.empty(channels, dtype=parameters, device="meta")
            running = torch.empty(channels, device="meta")
            spec = BatchNormSpec(relu=True)
            silu = BatchNormSpec(silu=True)
            given = Channels(running, running, weight, weight)
            launch_statistics(x, spec, given)
            if not addend:
                y, found = forward(x, None, given, silu)
                backward(y, x, None, found, silu)
            for exchange in (None, _Alone()):
                y, found = forward(x, x if addend else None, given, spec, exchange)
                backward(y, x, y if addend else None, found, spec, exchange, wants_z=addend)
