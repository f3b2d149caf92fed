"""The launch rules, for any shape and device: what the kernels rely on holds."""

from apex.ops._device import DeviceFacts
from apex.ops.xentropy.config import SHORT_ROW, backward_config, forward_config, short_config
from tests.support.drawn import given, st

ROWS = st.integers(1, 1 << 24)
CLASSES = st.one_of(st.integers(1, 200000), st.sampled_from([1 << n for n in range(21)]))
SIZES = st.sampled_from([2, 4])
DEVICES = st.builds(
    DeviceFacts,
    name=st.just("any"),
    backend=st.just("cuda"),
    multiprocessors=st.integers(1, 400),
    warp_size=st.sampled_from([32, 64]),
    shared_memory=st.just(64 << 10),
)


def is_power_of_2(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


@given(ROWS, CLASSES, SIZES, st.booleans(), DEVICES)
def test_long_rows(rows: int, classes: int, size: int, gradient: bool, device: DeviceFacts) -> None:
    forward = forward_config(rows, classes, size, gradient, device)
    backward = backward_config(rows, classes, size, device)
    for config in (forward, backward):
        assert is_power_of_2(config.groups)
        assert is_power_of_2(config.num_warps)
        assert config.num_warps * device.warp_size <= config.lanes <= device.max_threads
    assert forward.splits == 1
    assert 1 <= backward.splits <= -(-classes // (backward.groups * backward.lanes * (16 // size)))


@given(ROWS, st.integers(1, SHORT_ROW), DEVICES)
def test_short_rows(rows: int, classes: int, device: DeviceFacts) -> None:
    config = short_config(rows, classes, 2, device)
    assert is_power_of_2(config.rows_per_program)
    assert is_power_of_2(config.num_warps)
    assert is_power_of_2(config.block)
    assert classes <= config.block <= max(1, 2 * classes - 1)
    assert config.rows_per_program * config.block <= 4096
