"""Launch choices for the norm kernels: small rules from shape, dtype and device, measured on an H200.

Times are microseconds, of kernels launched directly.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .._device import DeviceFacts, next_power_of_2
from .._tuned import tunable

# Longest rows that the backward kernel holds in registers, with their weight and bias gradients.
BACKWARD_ROWS_LIMIT = 8192
# Longest rows that it holds with the gradient of an added bias as well.
ADDED_ROWS_LIMIT = 4096
# Longest rows whose weight and bias gradients alone still fit in the registers of one multiprocessor.
BACKWARD_WIDE_LIMIT = 16384


# Bytes of an output that no L2 cache holds.
STREAMED = 128 << 20


class ForwardConfig(NamedTuple):
    """Launch choices of a forward pass.

    `rows_per_program` 0 selects the kernel that walks a row in chunks of `block`.
    """

    rows_per_program: int
    block: int
    num_warps: int


class BackwardConfig(NamedTuple):
    """Launch choices of a backward pass; `kind` names the kernel: rows, held, wide or columns."""

    kind: str
    programs: int
    rows_per_program: int
    block: int
    chunks: int
    num_warps: int
    num_stages: int
    held: int = 0


# Choices for half-precision rows that were quicker on an H200 than the rule's, by row length and whether a bias has a
# gradient.
MEASURED_BACKWARD: dict[tuple[int, bool], dict[str, Any]] = {
    (128, False): {"num_warps": 4, "num_stages": 4},  # 65536 rows in 23.0, else 24.0
    (256, True): {"num_warps": 2},  # 65536 rows in 37.4, else 39.8
    (5120, False): {"num_warps": 16, "num_stages": 5},  # 4096 rows in 42.4, else 47.7
}


# Fields that `apex tune` may change independently. The others follow from the row's length, or from each other.
_VARIED = {
    "rows": ("rows_per_program", "programs", "num_warps", "num_stages"),
    "held": ("num_warps", "num_stages"),
    "wide": ("programs", "num_warps"),
    "columns": ("rows_per_program", "programs", "num_warps"),
}


def _warps(threads: int, device: DeviceFacts) -> int:
    """Return the warps for a number of threads, a power of two between one warp and the device's limit."""
    return max(1, min(threads, device.max_threads) // device.warp_size)


def holds_rows(row_length: int, element_size: int, subtract_mean: bool) -> bool:
    """Return whether the forward kernel holds whole rows in registers."""
    block = next_power_of_2(row_length)
    return block <= 1024 or (element_size == 2 and (block <= 2048 or (subtract_mean and block <= 16384)))


def adds(row_length: int, element_size: int, subtract_mean: bool) -> bool:
    """Return whether the kernels for rows of this length can add a residual, forward and backward."""
    return row_length <= ADDED_ROWS_LIMIT and holds_rows(row_length, element_size, subtract_mean)


@tunable(lambda config: ("rows_per_program" if config.rows_per_program else "block", "num_warps"))
def forward_config(
    rows: int, row_length: int, element_size: int, subtract_mean: bool, device: DeviceFacts
) -> ForwardConfig:
    block = next_power_of_2(row_length)
    if holds_rows(row_length, element_size, subtract_mean):
        # Whole rows in registers, 16 to 64 elements per thread: layer norm bfloat16 16384x4096 in 70.9 with two rows
        # per program (in chunks: 90.0), 4096x16384 in 75.4 with 8 warps (16: 114, the second reduction waits longer).
        # Layer norm bfloat16 16384x1600 in 32.3 with two rows, 34.2 with one.
        per_program = 1 if block == 2048 else max(1, (4096 if block < 2048 else 8192) // block)
        if row_length == 1600 and subtract_mean:
            per_program = 2
        while per_program > 1 and rows // per_program < 2 * device.multiprocessors:
            per_program //= 2
        threads = 128 if block <= 2048 else 256
        return ForwardConfig(per_program, block, _warps(min(threads, max(32, per_program * block // 8)), device))
    # Half a row at a time, at most 4096 elements: RMS norm float32 16384x4096 in 129.5, 8192x8192 in 132.6. Smaller
    # chunks if the last one would be nearly empty: 4608 elements in two took 1.08 times PyTorch's time.
    chunk = min(4096, block // 2)
    if -(-row_length // (chunk // 2)) <= 1.6 * -(-row_length // chunk):
        chunk //= 2
    # RMS norm bfloat16 4096x5120 in 26.8, with chunks of 2048 in 28.6; float32 16384x4096 in 130.5, with 2048 in 136.5.
    if not subtract_mean and (row_length, element_size) in ((5120, 2), (4096, 4)):
        chunk = 1024
    threads = min(512, chunk * element_size // 16)
    if subtract_mean and block <= 8192:
        threads //= 2  # two reductions, one after the other, cost more the more warps take part: 132.3, else 159
    return ForwardConfig(0, chunk, _warps(threads, device))


@tunable(lambda config: _VARIED[config.kind])
def backward_config(
    rows: int, row_length: int, element_size: int, bias_grad: bool, device: DeviceFacts
) -> BackwardConfig:
    block = next_power_of_2(row_length)
    vector = math.gcd(row_length, 16) * element_size  # bytes of a row that one load may take; loads take 16 at most
    narrow = vector < 8
    if row_length <= BACKWARD_ROWS_LIMIT:
        # Tiles of 8 KiB (16 KiB from 4096 columns on) and 32 elements per thread, with two tiles loaded ahead. If rows
        # are not aligned, each element needs an address: registers then allow 16 elements and one tile ahead, and 8
        # elements are quicker: layer norm bfloat16 125992x77 in 84 (16: 111), float16 1111319x39 in 529 (863).
        tile = max(block, (8192 if block <= 2048 else 16384) // element_size)
        per_program = min(tile // block, 16)
        while per_program > 1 and rows // per_program < 2 * device.multiprocessors:
            per_program //= 2
        tile_bytes = per_program * block * element_size
        ahead = min(1 if narrow else 2, (device.shared_memory - 32 * 1024) // (2 * tile_bytes))
        programs = device.multiprocessors * (2 if block <= 2048 else 1)
        programs = max(1, min(programs, -(-rows // per_program)))
        config = BackwardConfig(
            kind="rows",
            programs=programs,
            rows_per_program=per_program,
            block=block,
            chunks=1,
            num_warps=_warps(max(32, min(256, per_program * block // (8 if narrow else 32))), device),
            num_stages=1 + max(0, ahead),
        )
        if element_size == 2 and device.backend == "cuda" and device.shared_memory >= 160 * 1024:
            # Layer norm bfloat16 13104x2560 in 60.0 (two tiles ahead: 64.7), 10912x3072 in 53.8 (60.9), 5456x6144 in
            # 55.4 (61.8), 43680x768 in 55.4 (59.8), RMS norm 13104x2560 in 53.8 (61.6); but 32768x1024 in 56.2 (53.4),
            # 29120x1152 in 71.4 (67.7).
            if not narrow and row_length < block and block in (1024, 4096, 8192):
                config = config._replace(num_stages=4)
            return config._replace(**MEASURED_BACKWARD.get((row_length, bias_grad), {}))
        return config
    if row_length <= BACKWARD_WIDE_LIMIT and vector >= 16:
        # An equal number of rows for every program, so that none works on while the others wait.
        programs = -(-rows // -(-rows // device.multiprocessors))
        chunk = block // (8 if bias_grad else 4)
        if element_size == 2 and device.backend != "hip" and row_length > block - chunk:
            # 4096x16384 bfloat16: layer norm in 142 (read twice: 149), RMS norm in 116 (134). RMS norm has registers to
            # spare, so that more threads do better than loading the next row ahead (128). Shorter rows, read twice,
            # skip chunks; held, they would take as long, and spill registers for their masks.
            return BackwardConfig(
                kind="held",
                programs=programs,
                rows_per_program=1,
                block=block,
                chunks=1,
                num_warps=_warps(256 if bias_grad else 512, device),
                num_stages=2 if bias_grad and 4 * block * element_size + 4096 <= device.shared_memory else 1,
            )
        # 4096x16384 float32, with the sum of the partials: layer norm in 230 (16 chunks, 5 held: 241; none held: 258),
        # RMS norm in 209 (8 chunks, 4 held: 215; 2 chunks, none held: 229).
        return BackwardConfig(
            kind="wide",
            programs=programs,
            rows_per_program=1,
            block=chunk,
            chunks=-(-row_length // chunk),
            # Layer norm bfloat16 4096x12288 in 119, with 256 threads in 146.
            num_warps=_warps((256 if element_size == 4 else 1024) if bias_grad else chunk * element_size // 16, device),
            num_stages=1,
            held=2,
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


def unmasked(config: ForwardConfig | BackwardConfig, rows: int, row_length: int) -> bool:
    """Return whether a kernel for whole rows is compiled without masks: its tiles fit, and masks would cost time.

    Elsewhere one program serves rows of all lengths up to its block, since compiling another one takes 0.3 s. Layer
    norm bfloat16, without and with masks: backward 131072x256 in 58.5 and 84.5, 262144x128 in 63.0 and 68.5, from
    65536x512 to 4096x8192 within 1%; forward 4096x8192 in 37.3 and 40.0, 2048x16384 in 39.6 and 41.3, from 262144x128
    to 8192x4096 within 1%. RMS norm and float32 differ by no more.
    """
    costs = config.block >= 8192 if isinstance(config, ForwardConfig) else config.block <= 256
    return costs and row_length == config.block and rows % config.rows_per_program == 0


def folds(config: BackwardConfig, row_length: int, element_size: int, device: DeviceFacts) -> bool:
    """Return whether the rows of a tile are summed at once, because separate sums would not fit into registers.

    Each thread loads 16 bytes of a row at a time, and must have all rows of its columns. With the gradient of an added
    bias bfloat16 8192x2048 in 55 (else 111), 4096x4096 in 54 (103), without it in 38 (41) and 41 (46). Not if single
    values are loaded: RMS norm bfloat16 22480x2051 in 199, folded 206.
    """
    if row_length * element_size % 16:
        return False
    threads = config.num_warps * device.warp_size
    return config.rows_per_program > 1 and config.block >= 2048 and config.block * element_size >= 16 * threads


def plain_programs(config: BackwardConfig, rows: int) -> int:
    """Return the number of programs if no parameter has a gradient: more, since there are no partial sums to keep few.

    RMS norm float32 19009x512 in 34.8, with twice the usual number 35.6, with a program for every tile 34.0; but
    bfloat16 43890x1160 in 86, 88 and 116, float32 8192x8192 in 196, 199 and 218.
    """
    return min(8 * config.programs, -(-rows // config.rows_per_program))


# Below this many elements the host is the limit and PyTorch's own operator, one C++ call, is quicker end to end.
NATIVE_BELOW = 1 << 23
