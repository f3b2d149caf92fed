"""Launch rules of batch norms for devices that are not here."""

from __future__ import annotations

import pytest

from apex.ops._device import DeviceFacts
from apex.ops.batch_norm import config

LARGE = DeviceFacts("large", "cuda", 132, 32, 227 << 10)


@pytest.mark.parametrize("backward", [False, True])
def test_single_values_are_shared_by_more_threads(backward: bool) -> None:
    """Where channels are last and nothing divides them, 32 values of several tiles per thread do not fit registers."""
    for channels in (9, 65, 75, 178, 1411):
        chosen = config.pace(1, 3136, channels, True, backward, 2, LARGE)
        loads = chosen.unroll * chosen.elements // (32 * chosen.num_warps)
        assert loads <= 64
    assert config.pace(1, 3136, 256, True, backward, 2, LARGE).num_warps == 2
