"""The launch rule over a grid of shapes: rows are covered, fit the registers, and kernels know what divides them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from apex.ops._compile_ahead import GPUS, planning
from apex.ops.softmax import masked_softmax
from apex.ops.softmax.config import rows_config

KEYS = (1, 7, 16, 31, 128, 235, 512, 941, 1000, 2047, 4096, 6106, 8192, 8193, 16384, 20000, 151936)


@pytest.mark.parametrize("gpu", ["sm_90", "gfx942"])
def test_rows_are_covered_and_fit_the_registers(gpu: str) -> None:
    device = GPUS[gpu].facts
    for queries, keys, causal, backward in itertools.product((1, 3, 128, 4096), KEYS, (False, True), (False, True)):
        held, rows, block, num_warps = rows_config(queries, keys, causal, backward, 2, device)
        threads = num_warps * device.warp_size
        assert threads <= 1024
        assert rows * block <= max(32 * threads, 1024), "more than 32 elements of a thread spill"
        assert rows == 1 or (held and rows <= queries)
        assert held == (block >= keys)


@pytest.mark.parametrize("keys", [941, 1002, 1004, 1000, 1024])
@pytest.mark.parametrize("kind", ["scaled", "masked", "causal"])
def test_kernels_know_what_divides_a_row(kind: str, keys: int) -> None:
    with planning(GPUS["sm_90"]) as launches:
        x = torch.empty(64, 4, keys, keys, dtype=torch.bfloat16, device="meta", requires_grad=True)
        mask = torch.empty(64, 1, keys, keys, dtype=torch.bool, device="meta") if kind == "masked" else None
        masked_softmax(x, mask, scale=0.3, causal=kind == "causal").backward(torch.empty_like(x))
    assert [each.prepared.kernel.name for each in launches] == ["softmax_forward", "softmax_backward"]
    for each in launches:
        names = each.prepared.kernel.function.arg_names
        constants = dict(zip(reversed(names), reversed(each.prepared.constants), strict=False))
        sizes = dict(zip(names[len(each.tensors) :], each.prepared.sizes, strict=False))
        assert constants["ALIGN"] == math.gcd(keys, 16)
        assert constants["ALIGN"] * sizes["keys_by_align"] == keys
        assert constants["FULL"] == (keys == 1024)
