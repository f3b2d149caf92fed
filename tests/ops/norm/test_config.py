"""The launch rules, for any shape and device: what the kernels rely on holds."""

import math

import pytest
import torch

from apex.ops._device import DeviceFacts, pretend
from apex.ops._launch import record_launches
from apex.ops.norm import op
from apex.ops.norm.config import (
    BACKWARD_ROWS_LIMIT,
    backward_config,
    folds,
    forward_config,
    next_power_of_2,
    plain_programs,
)
from tests.support.drawn import given, st

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


@given(ROWS, st.integers(1, BACKWARD_ROWS_LIMIT), SIZES, DEVICES)
def test_backward_without_parameters(rows: int, length: int, size: int, device: DeviceFacts) -> None:
    config = backward_config(rows, length, size, False, device)
    programs = plain_programs(config, rows)
    assert config.programs <= programs <= -(-rows // config.rows_per_program)


@given(ROWS, st.integers(1, BACKWARD_ROWS_LIMIT), SIZES, DEVICES)
def test_rows_of_a_tile_are_added_up_at_once_where_threads_have_them(
    rows: int, length: int, size: int, device: DeviceFacts
) -> None:
    config = backward_config(rows, length, size, True, device)
    if folds(config, length, size, device):
        assert config.block * size >= 16 * config.num_warps * device.warp_size
        assert length * size % 16 == 0, "threads load single values"
    elif config.rows_per_program > 1:  # sums of every row fit into registers
        assert config.rows_per_program * config.block <= 32 * config.num_warps * device.warp_size or length % 16


@given(ROWS, LENGTHS, SIZES, st.booleans(), DEVICES)
def test_backward(rows: int, length: int, size: int, bias_grad: bool, device: DeviceFacts) -> None:
    config = backward_config(rows, length, size, bias_grad, device)
    assert is_power_of_2(config.block)
    assert is_power_of_2(config.num_warps)
    assert config.num_warps * device.warp_size <= device.max_threads
    assert 1 <= config.programs <= rows
    if config.kind == "columns":
        assert length > BACKWARD_ROWS_LIMIT
        return
    assert config.chunks * config.block >= length > (config.chunks - 1) * config.block
    tile_bytes = config.rows_per_program * config.block * size
    assert (config.num_stages - 1) * 2 * tile_bytes <= device.shared_memory


@pytest.mark.parametrize(("value", "expected"), [(1, 1), (2, 2), (3, 4), (1000, 1024), (1024, 1024), (1025, 2048)])
def test_next_power_of_2(value: int, expected: int) -> None:
    assert next_power_of_2(value) == expected


GRID = [
    *range(1, 70, 3),
    *range(72, 1200, 88),
    1160,
    1544,
    3000,
    *range(1201, 20000, 431),
    7000,
    7001,
    8192,
    12288,
    16384,
]
H200 = DeviceFacts("90", "cuda", multiprocessors=132, warp_size=32, shared_memory=227 << 10)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("rows", [1, 132, 4096, 1 << 20])
def test_no_configuration_needs_more_registers_than_there_are(rows: int, size: int) -> None:
    """Limits at which ptxas was seen to spill nothing on sm_90, or next to nothing, for lengths with masks."""
    for length in GRID:
        vector = math.gcd(length, 16) * size
        for two in (False, True):  # reductions forward, sums of gradients backward
            forward = forward_config(rows, length, size, two, H200)
            held = max(1, forward.rows_per_program) * forward.block
            assert held <= 64 * 32 * forward.num_warps, length
            backward = backward_config(rows, length, size, two, H200)
            held, threads = backward.rows_per_program * backward.block, 32 * backward.num_warps
            if backward.kind == "rows":
                assert held <= 32 * threads, length
                assert vector >= 8 or threads == 256 or held <= max(32, 8 * threads), length
                assert backward.num_stages <= (4 if vector >= 8 else 2), length
            elif backward.kind == "wide":
                assert (backward.chunks * (1 + two) + 2 * backward.held) * held <= 160 * threads, length
            elif backward.kind == "held":
                assert vector >= 16, length
                assert held <= 64 * threads, length


@pytest.mark.parametrize("size", [2, 4])
def test_there_are_programs_for_every_multiprocessor(size: int) -> None:
    for length in GRID:
        for rows in (264, 1000, 4096, 1 << 20):
            for two in (False, True):
                forward = forward_config(rows, length, size, two, H200)
                assert rows // max(1, forward.rows_per_program) >= H200.multiprocessors, (rows, length)
                backward = backward_config(rows, length, size, two, H200)
                blocks = -(-length // backward.block) if backward.kind == "columns" else 1
                assert blocks * backward.programs >= 0.85 * H200.multiprocessors, (rows, length)


@pytest.mark.parametrize("length", GRID)
def test_kernels_are_told_what_divides_a_row(length: int) -> None:
    x, weight = torch.empty(300, length, device="meta"), torch.empty(length, device="meta")
    settings = (length, 1e-5, True, False, x.dtype, x.dtype)
    with pretend(H200), record_launches() as launches:
        output, statistics = op.launch_forward(x, weight, weight, *settings)
        op.launch_backward(output, x, weight, weight, statistics, *settings, (True, True, True))
    for launch in launches:
        names = launch.prepared.kernel.function.arg_names[-len(launch.prepared.constants) :]
        align = dict(zip(names, launch.prepared.constants, strict=True))["ALIGN"]
        assert length % align == 0
        assert align == 16 or length % (2 * align), launch.prepared.kernel.name
