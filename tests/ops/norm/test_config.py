"""The launch rules, for any shape and device: what the kernels rely on holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apex.ops._device import DeviceFacts
from apex.ops.norm.config import BACKWARD_WIDE_LIMIT, backward_config, forward_config, next_power_of_2

ROWS = st.integers(1, 1 << 24)
LENGTHS = st.one_of(st.integers(1, 70000), st.sampled_from([1 << n for n in range(17)]))
SIZES = st.sampled_from([2, 4])
DEVICES = st.builds(
    DeviceFacts,
    name=st.just("any"),
    backend=st.just("cuda"),
    multiprocessors=st.integers(1, 400),
    warp_size=st.sampled_from([32, 64]),
    shared_memory=st.sampled_from([48 << 10, 64 << 10, 99 << 10, 163 << 10, 227 << 10]),
)


def is_power_of_2(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


@given(ROWS, LENGTHS, SIZES, st.booleans(), DEVICES)
def test_forward(rows: int, length: int, size: int, subtract_mean: bool, device: DeviceFacts) -> None:
    config = forward_config(rows, length, size, subtract_mean, device)
    assert is_power_of_2(config.block)
    assert is_power_of_2(config.num_warps)
    assert config.num_warps * device.warp_size <= device.max_threads
    if config.rows_per_program:
        assert config.block >= length
        assert is_power_of_2(config.rows_per_program)
        assert config.rows_per_program * config.block <= 16384
    else:
        assert config.block <= length, "the first chunk is read without a mask"


@given(ROWS, LENGTHS, SIZES, st.booleans(), DEVICES)
def test_backward(rows: int, length: int, size: int, bias_grad: bool, device: DeviceFacts) -> None:
    config = backward_config(rows, length, size, bias_grad, device)
    assert is_power_of_2(config.block)
    assert is_power_of_2(config.num_warps)
    assert config.num_warps * device.warp_size <= device.max_threads
    assert 1 <= config.programs <= rows
    if config.kind == "columns":
        assert length > BACKWARD_WIDE_LIMIT
        return
    assert config.chunks * config.block >= length
    tile_bytes = config.rows_per_program * config.block * size
    assert (config.num_stages - 1) * 2 * tile_bytes <= device.shared_memory


@pytest.mark.parametrize(("backend", "one_launch"), [("cuda", True), ("hip", False)])
def test_programs_finish_each_others_work_where_stores_are_published(backend: str, one_launch: bool) -> None:
    device = DeviceFacts("any", backend, multiprocessors=100, warp_size=64, shared_memory=64 << 10)
    assert (backward_config(4096, 1024, 2, True, device).group > 0) == one_launch


@pytest.mark.parametrize(("value", "expected"), [(1, 1), (2, 2), (3, 4), (1000, 1024), (1024, 1024), (1025, 2048)])
def test_next_power_of_2(value: int, expected: int) -> None:
    assert next_power_of_2(value) == expected
