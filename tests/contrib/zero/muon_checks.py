"""DistributedFusedMuon in several processes, against FusedMuon on the mean of their gradients in one."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from apex.contrib.optimizers.distributed_fused_muon import DistributedFusedMuon, MatrixState
from apex.optimizers import FusedMuon
from tests.parallel.processes import Check, assert_same_everywhere

STEPS = 4
SHAPES = [(12, 8), (8, 12), (12, 8), (6, 6), (3, 5, 4), (0, 4), (7,), (9,), (12, 5), (4, 0)]
EXACT: dict[str, Any] = {"lr": 0.1, "ns_dtype": torch.float32, "adjust_lr_fn": "match_rms_adamw"}
# float32 sums of gradients in another order, and four updates of up to 0.1 with it.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def values(seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def made(
    dtype: torch.dtype = torch.float32, beta2: float | None = None
) -> tuple[list[nn.Parameter], list[dict[str, Any]]]:
    """Parameters, and groups: heads, stacks and vectors for Muon, one matrix for AdamW and one vector for Lion."""
    params = [nn.Parameter(value) for value in values(0, dtype)]
    params[1].data = params[1].data.t().contiguous().t()  # transposed in memory
    groups: list[dict[str, Any]] = [
        {"params": [*params[:3], params[9]], "beta2": beta2},
        {"params": params[3:7], "lr": 0.05},
        {"params": params[7:8], "algorithm": "lion", "lr": 0.01},
        {"params": params[8:9], "algorithm": "adamw", "weight_decay": 0.2},
    ]
    return params, groups


def give_gradients(params: list[nn.Parameter], step: int, ranks: list[int], factor: float = 1.0) -> None:
    """Give parameters the mean gradient of ranks, times a factor."""
    every = [values(100 * step + rank + 1, torch.float32) for rank in ranks]
    for index, param in enumerate(params):
        mean = sum((each[index] for each in every), torch.zeros(SHAPES[index])) / len(ranks)
        param.grad = (mean * factor).to(param.dtype)


def train(optimizer: Any, params: list[nn.Parameter], ranks: list[int], steps: range = range(STEPS)) -> None:
    for step in steps:
        optimizer.zero_grad()
        give_gradients(params, step, ranks)
        optimizer.step()


def expected(steps: range = range(STEPS), **options: Any) -> tuple[list[nn.Parameter], FusedMuon]:
    params, groups = made()
    optimizer = FusedMuon(groups, **EXACT, **options)
    train(optimizer, params, list(range(dist.get_world_size())), steps)
    return params, optimizer


def like_one_process(**options: Any) -> Check:
    def check(rank: int) -> None:
        params, groups = made()
        optimizer = DistributedFusedMuon(groups, **EXACT, bucket_cap_mb=0.0005, **options)
        train(optimizer, params, [rank])
        optimizer.param_sync()
        torch.testing.assert_close(params, expected()[0], **CLOSE)
        assert_same_everywhere(params)
        (matrices,) = (state for state in optimizer._states if isinstance(state, MatrixState))
        layout = matrices.arena.layout
        owned = [piece for each in range(layout.ranks) for piece in layout.owned_by(each)]
        assert sorted(piece.param for piece in owned) == [k for k, size in enumerate(layout.sizes) if size]
        assert all(piece.size == layout.sizes[piece.param] for piece in owned)  # no matrix is cut

    return check


def changed_options(rank: int) -> None:
    """Options that change between steps act at once; they may need directions of another dtype."""
    runs: list[list[nn.Parameter]] = []
    for kind, ranks in ((DistributedFusedMuon, [rank]), (FusedMuon, list(range(dist.get_world_size())))):
        params, groups = made()
        optimizer = kind(groups, lr=0.1)
        train(optimizer, params, ranks, range(2))
        for group in optimizer.param_groups:
            group.update(EXACT)
        train(optimizer, params, ranks, range(2, STEPS))
        runs.append(params)
    # The first steps multiplied in bfloat16.
    for found, exact in zip(*runs, strict=True):
        assert float((found - exact).norm()) <= 0.02 * float(exact.norm())


def bfloat16(rank: int) -> None:
    """bfloat16 parameters follow float32 weights, which are stored, or joined from 16-bit remainders."""
    reference, _ = made()
    for options in ({}, {"store_params": False, "store_param_remainders": True}):
        params, groups = made(torch.bfloat16)
        optimizer = DistributedFusedMuon(groups, **EXACT, param_sync_dtype=torch.bfloat16, **options)
        train(optimizer, params, [rank])
        moved = expected()[0]
        for found, before, after in zip(params, reference, moved, strict=True):
            # Gradients and parameters in bfloat16 have 8 bits.
            torch.testing.assert_close(found.float(), after.detach(), rtol=2e-2, atol=2e-2)
            assert not found.numel() or not torch.equal(found.float(), before)


def clipping_and_scaling(rank: int) -> None:
    """A step whose gradients overflow in one process changes nothing in any; others are unscaled and clipped."""
    world = list(range(dist.get_world_size()))
    params, groups = made()
    optimizer = DistributedFusedMuon(groups, **EXACT)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    for step in range(3):
        optimizer.zero_grad()
        give_gradients(params, step, [rank], scaler.get_scale())
        if step == 1 and rank == world[-1]:
            params[0].grad[0, 0] = torch.inf
        optimizer.unscale_grads(grad_scaler=scaler)
        optimizer.clip_grad_norm(0.5)
        before = [value.clone() for _, _, _, value in optimizer._own_state()[0]]
        scaler.step(optimizer)
        scaler.update()
        if step == 1:
            after = [value for _, _, _, value in optimizer._own_state()[0]]
            assert all(map(torch.equal, before, after))
    exact, exact_groups = made()
    whole = FusedMuon(exact_groups, **EXACT)
    for step in (0, 2):
        give_gradients(exact, step, world)
        nn.utils.clip_grad_norm_(exact, 0.5)
        whole.step()
    torch.testing.assert_close(params, exact, **CLOSE)


def state_dicts(rank: int) -> None:
    """State goes to FusedMuon and back, and on as if nothing had happened."""
    params, groups = made()
    optimizer = DistributedFusedMuon(groups, **EXACT)
    train(optimizer, params, [rank], range(2))
    saved = optimizer.state_dict()
    whole_params, whole_groups = made()
    whole = FusedMuon(whole_groups, **EXACT)
    whole.load_state_dict(
        {
            "state": {k: _plain(v, saved) for k, v in saved["state"].items() if k != "step"},
            "param_groups": saved["param_groups"],
        }
    )
    for param, source in zip(whole_params, params, strict=True):
        param.data.copy_(source)
    train(whole, whole_params, list(range(dist.get_world_size())), range(2, STEPS))
    torch.testing.assert_close(whole_params, expected()[0], **CLOSE)
    again_params, again_groups = made()
    _, first_steps = expected(range(2))
    again = DistributedFusedMuon(again_groups, **EXACT)
    for param, source in zip(again_params, expected(range(2))[0], strict=True):
        param.data.copy_(source)
    again.load_state_dict(first_steps.state_dict())
    train(again, again_params, [rank], range(2, STEPS))
    torch.testing.assert_close(again_params, expected()[0], **CLOSE)


def _plain(state: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != "param"} | {"step": saved["state"]["step"]}


def resharded(rank: int) -> None:
    """Two processes save through torch.distributed.checkpoint, four load."""
    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    two = dist.new_group([0, 1])
    path = Path(folder[0], "muon")
    if rank < 2:
        params, groups = made(beta2=0.9)
        optimizer = DistributedFusedMuon(groups, **EXACT, process_group=two)
        train(optimizer, params, [0, 1, 2, 3], range(2))
        dcp.save({"optimizer": optimizer.sharded_state_dict()}, checkpoint_id=path, process_group=two)
    dist.barrier()
    params, groups = made(beta2=0.9)
    optimizer = DistributedFusedMuon(groups, **EXACT)
    state = {"optimizer": optimizer.sharded_state_dict()}
    dcp.load(state, checkpoint_id=path)
    optimizer.load_sharded_state_dict(state["optimizer"])
    train(optimizer, params, [rank], range(2, STEPS))
    exact, exact_groups = made(beta2=0.9)
    train(FusedMuon(exact_groups, **EXACT), exact, [0, 1, 2, 3])
    torch.testing.assert_close(params, exact, **CLOSE)
    dist.barrier()


def normuon(rank: int) -> None:
    """Averages of rows of some groups, in every format of state dicts, and by FusedMuon."""
    every = list(range(dist.get_world_size()))

    def run(kind: Any, **options: Any) -> tuple[list[nn.Parameter], Any]:
        params, groups = made(beta2=0.9)
        groups[1] |= {"beta2": 0.8, "lr": 0.1}
        return params, kind(groups, **EXACT, **options)

    params, optimizer = run(DistributedFusedMuon, bucket_cap_mb=0.0005)
    exact, other = run(FusedMuon)
    train(optimizer, params, [rank], range(2))
    train(other, exact, every, range(2))
    torch.testing.assert_close(params, exact, **CLOSE)
    saved, theirs, sharded = optimizer.state_dict(), other.state_dict(), optimizer.sharded_state_dict()
    for key in range(5):
        squares = [each["state"][key]["second_momentum_buffer"] for each in (saved, theirs)]
        torch.testing.assert_close(*squares, **CLOSE)
    resumed = []
    for each in (saved, theirs, sharded):
        twins, again = run(DistributedFusedMuon, bucket_cap_mb=0.0005)
        for twin, param in zip(twins, params, strict=True):
            twin.data.copy_(param)
        if each is sharded:
            again.load_sharded_state_dict(each)
        else:
            again.load_state_dict(each)
        resumed.append((twins, again))
    one, plain = run(FusedMuon)
    for twin, param in zip(one, params, strict=True):
        twin.data.copy_(param)
    plain.load_state_dict(
        {**saved, "format": None, "state": {k: _plain(v, saved) for k, v in saved["state"].items() if k != "step"}}
    )
    train(other, exact, every, range(2, STEPS))
    train(plain, one, every, range(2, STEPS))
    torch.testing.assert_close(one, exact, **CLOSE)
    for twins, again in resumed:
        train(again, twins, [rank], range(2, STEPS))
        torch.testing.assert_close(twins, exact, **CLOSE)


def refusals(rank: int) -> None:
    params, groups = made()
    with pytest.raises(TypeError, match="unexpected keyword arguments: amsgrad"):
        DistributedFusedMuon(groups, amsgrad=True)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="algorithm='sgd' is none of"):
        DistributedFusedMuon([{**groups[0], "algorithm": "sgd"}])
    optimizer = DistributedFusedMuon(groups, **EXACT)
    encoded_params, encoded_groups = made(torch.bfloat16)
    encoded = FusedMuon(encoded_groups, state_format="int8", **EXACT)
    train(encoded, encoded_params, [0], range(1))
    before = [param.detach().clone() for param in params]
    with pytest.raises(ValueError, match="momentum_buffer::quantized"):
        optimizer.load_state_dict(encoded.state_dict())
    rows_params, rows_groups = made(beta2=0.9)
    with_rows = FusedMuon(rows_groups, **EXACT)
    train(with_rows, rows_params, [0], range(1))
    with pytest.raises(ValueError, match="it is of NorMuon, so give the parameter groups"):
        optimizer.load_state_dict(with_rows.state_dict())
    assert all(map(torch.equal, before, params))
    optimizer.load_state_dict(encoded.state_dict(decoded=True))


CHECKS: dict[str, Check] = {
    "muon_like_one_process": like_one_process(),
    "muon_in_buffers": like_one_process(contiguous_param_buffer=True, contiguous_grad_buffer=True, capturable=True),
    "muon_rows": normuon,
    "muon_overlapped": like_one_process(overlap_param_sync=True),
    "muon_bfloat16": bfloat16,
    "muon_changed_options": changed_options,
    "muon_clipping_and_scaling": clipping_and_scaling,
    "muon_state_dicts": state_dicts,
    "muon_refusals": refusals,
}
FOUR_CHECKS: dict[str, Check] = {"muon_like_one_process": like_one_process(), "muon_resharded": resharded}
