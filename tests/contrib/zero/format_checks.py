"""`state_format` of divided optimizers, against FusedAdam and FusedMuon with the same format in one process.

Every process has the same gradients, whose mean is exact, so that the numbers are those of one process to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
from apex.contrib.optimizers.distributed_fused_muon import DistributedFusedMuon
from apex.optimizers import FusedAdam, FusedMuon
from tests.contrib.zero import muon_checks
from tests.parallel.processes import Check, assert_same_everywhere
from tests.support.grids import pairs

# Cut over buckets and processes; the second one in another order of memory.
SHAPES = ((64, 30), (3, 8, 5, 5), (130,), (1,), (500,))
# Buckets of 512 elements, and learning rates that float32 holds, as `capturable` keeps them.
OPTIONS: dict[str, Any] = {"lr": 2**-7, "weight_decay": 0.1, "bucket_cap_mb": 512 * 4 / 2**20}
FORMATS = ("bfloat16", "int8", "float8")


def values(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    tensors[1] = tensors[1].contiguous(memory_format=torch.channels_last)
    return tensors


def made(kind: Any, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[list[nn.Parameter], Any]:
    params = [nn.Parameter(value) for value in values(0, dtype)]
    chosen = {name: value for name, value in OPTIONS.items() if kind is not FusedAdam or name != "bucket_cap_mb"}
    return params, kind([{"params": params[:2]}, {"params": params[2:], "lr": 2**-6}], **chosen, **options)


def train(params: list[nn.Parameter], optimizer: Any, steps: range = range(4)) -> None:
    for step in steps:
        optimizer.zero_grad()
        for param, gradient in zip(params, values(1 + step, params[0].dtype), strict=True):
            param.grad = gradient
        optimizer.step()


def like_one_process(rank: int) -> None:
    """Check all settings in all formats; in samples one setting per format, others in each number of processes."""
    bits = {"store_params": False, "store_param_remainders": True, "param_sync_dtype": torch.bfloat16}
    cases: list[tuple[torch.dtype, dict[str, Any], dict[str, Any]]] = [
        (torch.float32, {}, {}),
        (torch.float32, {"contiguous_param_buffer": True, "contiguous_grad_buffer": True, "capturable": True}, {}),
        (torch.bfloat16, {"param_sync_dtype": torch.bfloat16}, {"master_weights": True}),
        (torch.bfloat16, bits, {"master_bits": 32}),
    ]
    for format, (dtype, options, whole) in pairs(FORMATS, cases, each=1, first=dist.get_world_size() // 2):
        params, optimizer = made(DistributedFusedAdam, dtype, state_format=format, **options)
        exact, other = made(FusedAdam, dtype, state_format=format, **whole)
        train(params, optimizer)
        train(exact, other)
        for param, twin in zip(params, exact, strict=True):
            if whole == {"master_bits": 32}:  # halves are rounded to even here, away from zero there
                torch.testing.assert_close(param.float(), twin.float(), rtol=2.0**-7, atol=0)
            else:
                assert torch.equal(param, twin), (format, options)
        assert_same_everywhere(params)
        saved, expected = optimizer.state_dict()["state"], other.state_dict(decoded=True)["state"]
        for index in range(len(params)):
            for name in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(saved[index][name], expected[index][name]), (format, options, name)


def bytes_of_state(rank: int) -> None:
    _, optimizer = made(DistributedFusedAdam, state_format="int8")
    optimizer.init_params()
    for state in optimizer._states:
        stored = sum(each.nbytes for each in (*state.moments.values(), *state._scales.values()))
        assert stored == state.arena.layout.shard_size * 2.125
        assert all(size % 64 == 0 for size in state.arena.layout.shard_sizes)


def saved_and_loaded(rank: int) -> None:
    """Every format of state dicts has float32 numbers, which are encoded again: to the same codes."""
    for format in FORMATS:
        params, optimizer = made(DistributedFusedAdam, state_format=format)
        train(params, optimizer)
        sharded = optimizer.sharded_state_dict()
        saved = [optimizer.state_dict(), optimizer.state_dict(state_dict_format=1, gather_on_root=False)]
        resumed = []
        for each in (*saved[:1], sharded):
            twins, other = made(DistributedFusedAdam, state_format=format)
            other.load_sharded_state_dict(each) if each is sharded else other.load_state_dict(each)
            resumed.append((twins, other))
        plain, alone = made(FusedAdam, state_format=format)
        for param, twin in zip(params, plain, strict=True):
            twin.data.copy_(param)
        alone.load_state_dict(saved[0])
        assert all(bucket.exp_avg_shard.dtype == torch.float32 for bucket in saved[1]["state"]["buckets"])
        train(params, optimizer, range(4, 5))
        for twins, other in (*resumed, (plain, alone)):
            train(twins, other, range(4, 5))
            for param, twin in zip(params, twins, strict=True):  # scales of roots may differ in their last bit
                torch.testing.assert_close(twin, param, rtol=1e-5, atol=1e-6)


def a_skipped_step_changes_nothing(rank: int) -> None:
    params, optimizer = made(DistributedFusedAdam, state_format="int8")
    train(params, optimizer, range(2))
    stored = [each for state in optimizer._states for each in (*state.moments.values(), *state._scales.values())]
    before = [each.clone() for each in (*params, *stored)]
    optimizer.found_inf = torch.ones(1)
    train(params, optimizer, range(2, 3))
    assert all(torch.equal(each, old) for each, old in zip((*params, *stored), before, strict=True))
    optimizer.found_inf = None
    train(params, optimizer, range(2, 4))
    exact, other = made(FusedAdam, state_format="int8")
    train(exact, other)
    assert all(map(torch.equal, params, exact))


def muon(rank: int) -> None:
    """Momentum of whole matrices, and moments of AdamW's and Lion's groups."""
    for format in FORMATS:
        runs = []
        for kind, more in ((DistributedFusedMuon, {"bucket_cap_mb": 0.0005}), (FusedMuon, {})):
            params, groups = muon_checks.made()
            optimizer = kind(groups, **muon_checks.EXACT, state_format=format, **more)
            muon_checks.train(optimizer, params, [0])
            runs.append(params)
            if kind is DistributedFusedMuon:
                assert {moment.element_size() for s in optimizer._states for moment in s.moments.values()} <= {1, 2}
        for found, exact in zip(*runs, strict=True):  # matrices are batched otherwise: a code may be a neighbour
            assert float((found - exact).detach().norm()) <= 0.01 * float(exact.detach().norm())


CHECKS: dict[str, Check] = {
    "formats_like_one_process": like_one_process,
    "formats_bytes_of_state": bytes_of_state,
    "formats_saved_and_loaded": saved_and_loaded,
    "formats_a_skipped_step_changes_nothing": a_skipped_step_changes_nothing,
    "formats_muon": muon,
}
