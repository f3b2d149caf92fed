"""Launches of the batch norm kernels to compile for every GPU: both layouts, with and without an addend."""

from __future__ import annotations

import torch

from apex.ops.batch_norm import BatchNormSpec
from apex.ops.batch_norm.kernel_norm import combine, kernel_norm

# shape, channels last, dtype, dtype of the parameters, addend
_CASES = [
    ((32, 256, 56, 56), True, torch.float16, torch.float32, True),
    ((32, 256, 56, 56), False, torch.bfloat16, torch.bfloat16, False),
]


def record() -> None:
    """Plans and (under `recording`) collects forward and backward of every case."""
    for shape, last, dtype, parameters, addend in _CASES:
        channels = shape[1]
        x = torch.empty(shape, dtype=dtype, device="meta")
        x = x.to(memory_format=torch.channels_last) if last else x
        weight = torch.empty(channels, dtype=parameters, device="meta")
        running = torch.empty(channels, device="meta")
        z = x if addend else None
        spec = BatchNormSpec(relu=True)
        norm = kernel_norm(x, weight, weight, spec)
        mean, variance = norm.statistics(x, running, running, 0.1)
        combine(norm.packet(x)[None], running, running, 0.1)
        y = norm.apply(x, z, mean, variance, weight, weight)
        output = y if addend else None
        keep = output is not None
        given = (mean, variance, weight, weight)
        dz, plain, along, packet = norm.sums(y, x, output, *given, keep, True)
        assert packet is not None
        dy = y if dz is None else dz
        inverse = 1 / norm.geometry.values
        norm.input_gradient(dy, x, None, *given, plain, along, inverse, keep)
        norm.input_gradient(dy, x, None, *given, packet, None, None, keep)
