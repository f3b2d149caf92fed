"""Launch choices for the norm kernels: small rules from shape, dtype and device, measured on an H200.

Times are microseconds; `docs/performance.md` has the full table.
"""

from __future__ import annotations

from dataclasses import dataclass

from .._device import DeviceFacts

# Rows up to this length are held in registers by the backward kernel, with their weight and bias gradients.
BACKWARD_ROWS_LIMIT = 8192
# Up to this length the weight and bias gradients alone still fit in the registers of one multiprocessor.
BACKWARD_WIDE_LIMIT = 16384


@dataclass(frozen=True)
class ForwardConfig:
    """`rows_per_program` 0 selects the kernel that walks a row in chunks of `block`."""

    rows_per_program: int
    block: int
    num_warps: int


@dataclass(frozen=True)
class BackwardConfig:
    """`kind` names the kernel: rows, wide or columns."""

    kind: str
    programs: int
    rows_per_program: int
    block: int
    chunks: int
    num_warps: int
    num_stages: int


def next_power_of_2(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def _warps(threads: int, device: DeviceFacts) -> int:
    """Warps for a number of threads, a power of two between one warp and the device's limit."""
    return max(1, min(threads, device.max_threads) // device.warp_size)


def forward_config(
    rows: int, row_length: int, element_size: int, subtract_mean: bool, device: DeviceFacts
) -> ForwardConfig:
    block = next_power_of_2(row_length)
    hold_row = block <= 2048 or (subtract_mean and block <= 8192 and element_size == 2)
    if hold_row:
        # 4096 elements per program, 32 per thread: 16384x1024 bfloat16 in 22.5, against 23.7 with one row per warp.
        per_program = max(1, 4096 // block)
        while per_program > 1 and rows // per_program < 2 * device.multiprocessors:
            per_program //= 2
        return ForwardConfig(per_program, block, _warps(max(32, per_program * block // 32), device))
    # Chunks of half a row where that is 2048 to 4096: RMS norm float32 16384x4096 in 128.5, 8192x8192 in 131.6.
    block = min(4096, max(2048, block // 2))
    return ForwardConfig(0, block, _warps(min(512, block * element_size // 16), device))


def backward_config(
    rows: int, row_length: int, element_size: int, bias_grad: bool, device: DeviceFacts
) -> BackwardConfig:
    block = next_power_of_2(row_length)
    if row_length <= BACKWARD_ROWS_LIMIT:
        # Tiles of 8 KiB (16 KiB from 4096 columns on) and 32 elements per thread, two tiles being loaded ahead.
        tile = max(block, (8192 if block <= 2048 else 16384) // element_size)
        per_program = min(tile // block, 16)
        while per_program > 1 and rows // per_program < 2 * device.multiprocessors:
            per_program //= 2
        tile_bytes = per_program * block * element_size
        ahead = min(2, (device.shared_memory - 32 * 1024) // (2 * tile_bytes))
        programs = device.multiprocessors * (2 if block <= 2048 else 1)
        return BackwardConfig(
            kind="rows",
            programs=max(1, min(programs, -(-rows // per_program))),
            rows_per_program=per_program,
            block=block,
            chunks=1,
            num_warps=_warps(max(32, per_program * block // 32), device),
            num_stages=1 + max(0, ahead),
        )
    if row_length <= BACKWARD_WIDE_LIMIT:
        # Without a bias gradient a whole row fits (4096x16384 bfloat16: 123 with one chunk, 142 with two); with it,
        # chunks keep the loads of the second pass from spilling (float32: 253 with eight chunks, 314 with two).
        chunks = 8 if bias_grad else 1
        return BackwardConfig(
            kind="wide",
            programs=max(1, min(device.multiprocessors, rows)),
            rows_per_program=1,
            block=block // chunks,
            chunks=chunks,
            num_warps=_warps(1024 if chunks == 1 else 512, device),
            num_stages=1,
        )
    groups = max(1, min(-(-rows // 16), -(-4 * device.multiprocessors // -(-row_length // 512))))
    return BackwardConfig(
        kind="columns",
        programs=groups,
        rows_per_program=8,
        block=512,
        chunks=1,
        num_warps=_warps(128, device),
        num_stages=1,
    )


# Below this many elements the host is the limit and PyTorch's own operator, one C++ call, is quicker end to end.
NATIVE_BELOW = 1 << 23
