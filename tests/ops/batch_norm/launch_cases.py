"""Launches of the batch norm kernels to compile for every GPU: both layouts, with and without an addend."""

from __future__ import annotations

import torch

from apex.ops.batch_norm import BatchNormSpec, launches

# channels last, dtype, dtype of the parameters, addend
_CASES = [
    (True, torch.float16, torch.float32, True),
    (False, torch.bfloat16, torch.bfloat16, False),
]


def record() -> None:
    """Plans and (under `recording`) collects forward and backward of every case."""
    for last, dtype, parameters, addend in _CASES:
        x = torch.empty(32, 256, 56, 56, dtype=dtype, device="meta")
        x = x.to(memory_format=torch.channels_last) if last else x
        weight = torch.empty(256, dtype=parameters, device="meta")
        running = torch.empty(256, device="meta")
        z = x if addend else None
        spec = BatchNormSpec(relu=True)
        geometry = launches.geometry_of(x, spec)
        mean, variance = launches.triton_statistics(x, geometry, running, running, 0.1)
        launches.triton_combine(launches.triton_packet(x, geometry)[None], running, running, 0.1)
        y = launches.triton_apply(x, geometry, z, mean, variance, weight, weight, spec)
        output = y if addend else None
        keep = output is not None
        dz, plain, along, _ = launches.triton_sums(y, x, geometry, output, mean, variance, weight, weight, spec, keep)
        if keep:
            assert dz is not None
            y, output, spec = dz, None, spec._replace(relu=False)
        launches.triton_input_gradient(
            y, x, geometry, output, mean, variance, weight, weight, plain, along, 1 / geometry.values, spec
        )
        given = (y, x, geometry, output, mean, variance, weight, weight)
        *_, packet = launches.triton_sums(*given, spec, False, packet=True)
        assert packet is not None
        launches.triton_input_gradient(*given, packet, None, None, spec)
