"""DistributedFusedLAMB in two processes: every flag against FusedLAMB and the formula on the joined gradients."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex.ops.multi_tensor.packed_floats import from_bytes, to_bytes
from apex.optimizers import FusedLAMB
from tests.contrib import lamb_options
from tests.contrib.lamb_passes import (
    accumulation,
    accumulation_undeclared,
    as_clients_do,
    closure_and_schedule,
    early_zero_grad,
    reentrant,
    unused,
)
from tests.contrib.lamb_problem import (
    HYPER,
    STEPS,
    assert_solved,
    averaged,
    backward,
    distributed_step,
    made,
    parameters,
    part,
    share,
    solved,
)
from tests.contrib.lamb_resharding import resumes
from tests.parallel.processes import Check, assert_same_everywhere


def trains(**options: Any) -> Check:
    def check(rank: int) -> None:
        params = parameters()
        optimizer = made(params, **options)
        for step in range(STEPS):
            distributed_step(optimizer, params, step)
        assert_solved(params, STEPS, **options)

    return check


def clips_before(**options: Any) -> Check:
    """Every process shortens its own gradient; then they are averaged."""

    def check(rank: int) -> None:
        params = parameters()
        optimizer = made(params, clip_after_ar=False, **options)
        scale = 8.0
        optimizer.set_global_scale(scale)
        count = dist.get_world_size()

        def clipped_average(step: int, params: Sequence[Tensor]) -> list[Tensor]:
            every = []
            for process in range(count):
                parts = [part(step, index, params) for index in range(process * 4 // count, (process + 1) * 4 // count)]
                own = [sum(each) / len(parts) for each in zip(*parts, strict=True)]
                norm = torch.cat([gradient.reshape(-1) for gradient in own]).double().norm()
                factor = min(1.0, HYPER["max_grad_norm"] / norm.item())
                if process == rank:
                    norms.append(norm.item() * scale)
                every.append([gradient.double() * factor for gradient in own])
            return [sum(each) / count for each in zip(*every, strict=True)]

        norms: list[float] = []
        expected = solved(FusedLAMB, torch.float32, STEPS, gradients=clipped_average, max_grad_norm=0.0)
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(params, share(step, params), scale)
            optimizer.complete_reductions()
            assert optimizer.L2_grad_norm.item() == pytest.approx(norms[step], rel=1e-5)
            optimizer.step()
        for found, truth in zip(params, expected, strict=True):
            torch.testing.assert_close(found.detach(), truth, rtol=1e-5, atol=1e-6)
        assert_same_everywhere([param for param in params if param.numel()])

    return check


def views(rank: int) -> None:
    """Parameters become views of one buffer, in the order asked for, and keep their values."""
    params = parameters()
    before = [param.detach().clone() for param in params]
    order = {param: len(params) - index for index, param in enumerate(params)}
    optimizer = made(params, set_param_views_to_flat_buffer=True, param_order=order)
    optimizer._lazy_init_stage1()
    assert all(map(torch.equal, params, before))
    storages = {param.untyped_storage().data_ptr() for param in params if param.numel()}
    assert len(storages) == 1
    addresses = [param.data_ptr() for param in params if param.numel()]
    assert addresses == sorted(addresses, reverse=True)
    for step in range(STEPS):
        distributed_step(optimizer, params, step)
    assert_solved(params, STEPS)
    assert addresses == [param.data_ptr() for param in params if param.numel()]


def skips_allgather(**options: Any) -> Check:
    def check(rank: int) -> None:
        params = parameters()
        optimizer = made(params, skip_allgather=True, **options)
        for step in range(STEPS):
            distributed_step(optimizer, params, step)
            with pytest.raises(AssertionError):
                assert_solved(params, step + 1)
            optimizer.param_sync()
            assert_solved(params, step + 1)

    return check


def e5m2(rank: int) -> None:
    """Eight bits travel; what is updated has 32."""
    params = parameters()
    optimizer = made(params, e5m2_allgather=True)
    for step in range(STEPS):
        distributed_step(optimizer, params, step)
    expected = solved(FusedLAMB, torch.float32, STEPS)
    for found, truth in zip(params, expected, strict=True):
        assert torch.equal(found.detach(), from_bytes(to_bytes(found.detach())).float())
        torch.testing.assert_close(found.detach(), truth, rtol=0.13, atol=1e-5)
    assert_same_everywhere([param for param in params if param.numel()])


def mixed_dtypes(rank: int) -> None:
    """float32 masters for halves, each dtype in messages of its own."""
    dtypes = [torch.float16, torch.bfloat16, torch.float32]
    params = [nn.Parameter(param.detach().to(dtypes[index % 3])) for index, param in enumerate(parameters())]
    start = [param.detach().float() for param in params]
    optimizer = made(params)
    optimizer.set_global_scale(torch.tensor(64.0))
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(params, share(step, params), 64.0)
        optimizer.step()

    def rounded(step: int, params: Sequence[Tensor]) -> list[Tensor]:
        return [gradient.to(dtypes[index % 3]).float() for index, gradient in enumerate(averaged(step, params))]

    expected = solved(FusedLAMB, torch.float32, STEPS, gradients=rounded, start=start)
    for found, truth in zip(params, expected, strict=True):
        limit = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}[found.dtype]
        torch.testing.assert_close(found.detach().float(), truth, rtol=limit, atol=1e-6)
    assert_same_everywhere([param for param in params if param.numel()])


def overflow(rank: int) -> None:
    """An infinite element in one process: no process takes the step, and none counts it."""
    params = parameters()
    optimizer = made(params)
    last = dist.get_world_size() - 1
    finite = 0
    for step in range(STEPS + 1):
        before = [param.detach().clone() for param in params]
        gradients = share(step, params) if step == 1 else share(finite, params)
        if step == 1 and rank == last:
            gradients[0].view(-1)[3] = torch.inf
        optimizer.zero_grad()
        backward(params, gradients)
        optimizer.complete_reductions()
        optimizer.step()
        assert optimizer.has_overflow == (step == 1)
        assert optimizer._overflow_buf.item() == (step == 1)
        finite += step != 1
        assert int(optimizer._step) == finite
        if step == 1:
            assert not math.isfinite(optimizer.L2_grad_norm.item())
            assert all(map(torch.equal, params, before))
    assert_solved(params, STEPS)


def overflow_before_clipping(rank: int) -> None:
    params = parameters()
    optimizer = made(params, clip_after_ar=False, max_grad_norm=0.0)
    gradients = share(0, params)
    if rank == 0:
        gradients[4][7] = torch.nan
    backward(params, gradients)
    optimizer.complete_reductions()
    optimizer.step()
    assert optimizer.has_overflow
    assert int(optimizer._step) == 0
    assert all(map(torch.equal, params, parameters()))
    for step in range(STEPS):
        distributed_step(optimizer, params, step)
    assert_solved(params, STEPS, max_grad_norm=0.0)


def scaled(supports: bool) -> Check:
    """With torch.amp.GradScaler; the loss scale falls everywhere when a gradient overflows anywhere."""

    def check(rank: int) -> None:
        params = parameters()
        optimizer = made(params, step_supports_amp_scaling=supports)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100)
        finite = 0
        for step in range(STEPS + 1):
            gradients = share(finite, params)
            if step == 2 and rank == 1:
                gradients[1][0] = torch.nan
            optimizer.zero_grad()
            sum((p * g).sum() for p, g in zip(params, gradients, strict=True)).mul(
                scaler.scale(torch.ones(()))
            ).backward()
            optimizer.complete_reductions()
            optimizer.set_global_scale(scaler._get_scale_async())
            scaler.step(optimizer)
            scaler.update()
            finite += step != 2
            assert scaler.get_scale() == (256.0 if step < 2 else 128.0)
        assert_solved(params, STEPS)

    return check


def scaler_alone(rank: int) -> None:
    """Without `set_global_scale` the scaler's is used, and `step` completes the reductions."""
    params = parameters()
    optimizer = made(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(params, share(step, params), scaler.scale(torch.ones(())))
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 1024.0 * 2**STEPS
    assert_solved(params, STEPS)


def norm(rank: int) -> None:
    params = parameters()
    optimizer = made(params)
    optimizer.set_global_scale(16.0)
    assert optimizer.global_scale == 16.0
    backward(params, share(0, params), 16.0)
    optimizer.complete_reductions()
    expected = torch.cat([gradient.reshape(-1) for gradient in averaged(0, params)]).norm() * 16
    assert optimizer.L2_grad_norm.item() == pytest.approx(expected.item(), rel=1e-5)


def saved(dtype: torch.dtype, **options: Any) -> Check:
    """A run that goes on from a state dict has the bits of one that was never interrupted."""

    def check(rank: int) -> None:
        params = parameters(dtype)
        optimizer = made(params, **options)
        for step in range(2):
            distributed_step(optimizer, params, step)
        file = io.BytesIO()
        torch.save({"optimizer": optimizer.state_dict(), "params": [param.detach() for param in params]}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        resumed = [nn.Parameter(param) for param in loaded["params"]]
        other = made(resumed, **options)
        untouched = copy.deepcopy(loaded["optimizer"])
        other.load_state_dict(loaded["optimizer"])
        for step in range(2, STEPS):
            distributed_step(optimizer, params, step)
            distributed_step(other, resumed, step)
        assert all(map(torch.equal, params, resumed))
        first, second = optimizer.state_dict(), other.state_dict()
        for name in ("step", "fp32_p", "fp32_m", "fp32_v"):
            assert torch.equal(first[name], second[name]), name
            assert torch.equal(untouched[name], loaded["optimizer"][name]), f"{name} of the state that was loaded"

    return check


def refuses(rank: int) -> None:
    params = parameters()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"dwu_group_size": 3}, "dwu_group_size=3"),
        ({"dwu_num_blocks": 0}, "dwu_num_blocks=0"),
        ({"dwu_num_chunks": -1}, "dwu_num_chunks=-1"),
        ({"dwu_num_ar_pg": 0}, "dwu_num_ar_pg=0"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\]=1.0"),
        ({"param_order": {params[0]: 0}, "set_param_views_to_flat_buffer": True}, "param_order"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            made(params, **options)
    optimizer = made(params)
    distributed_step(optimizer, params, 0)
    state = optimizer.state_dict()
    before = [param.detach().clone() for param in params]
    with pytest.raises(ValueError, match="fp32_m"):
        optimizer.load_state_dict({**state, "fp32_m": state["fp32_m"][:-1]})
    with pytest.raises(KeyError, match="fp32_v"):
        optimizer.load_state_dict({name: value for name, value in state.items() if name != "fp32_v"})
    with pytest.raises(TypeError):
        optimizer.load_state_dict({**state, "fp32_p": state["fp32_p"] + 1, "step": None})
    assert torch.equal(optimizer.state_dict()["fp32_p"], state["fp32_p"])
    assert all(map(torch.equal, params, before))
    assert torch.equal(optimizer.state_dict()["fp32_m"], state["fp32_m"])


CHECKS: dict[str, Check] = {
    "default": trains(),
    "unclipped": trains(max_grad_norm=0.0),
    "unclipped_none": trains(max_grad_norm=None),
    "hardly_clipped": trains(max_grad_norm=1e6),
    "hyperparameters": trains(lr=0.02, betas=(0.7, 0.95), eps=0.1),
    "l2_regularization": trains(adam_w_mode=False),
    "nvlamb": trains(use_nvlamb=True),
    "nvlamb_uncorrected": trains(use_nvlamb=True, bias_correction=False, grad_averaging=False),
    "after_backward": trains(overlap_reductions=False),
    "full_ar": trains(full_ar=True),
    "full_ar_after_backward": trains(full_ar=True, overlap_reductions=False, dwu_num_ag_pg=2),
    "replicas": trains(dwu_group_size=1),
    "replicas_full_ar": trains(dwu_group_size=1, full_ar=True),
    "one_message": trains(dwu_num_blocks=1, dwu_num_chunks=1),
    "many_messages": trains(dwu_num_blocks=7, dwu_num_chunks=5, dwu_num_rs_pg=2, dwu_num_ag_pg=2),
    "verbose": trains(verbose=True, nccl_allgather_channels=2),
    "clips_before": clips_before(),
    "clips_before_fused": clips_before(fused_norm=True, fuse_scale=True, overlap_reductions=False),
    "clips_before_full_ar": clips_before(full_ar=True, fuse_scale=True, set_param_views_to_flat_buffer=True),
    "views": views,
    "skips_allgather": skips_allgather(),
    "skips_allgather_views": skips_allgather(set_param_views_to_flat_buffer=True),
    "e5m2": e5m2,
    "mixed_dtypes": mixed_dtypes,
    "overflow": overflow,
    "overflow_before_clipping": overflow_before_clipping,
    "scaled": scaled(True),
    "scaled_by_the_scaler": scaled(False),
    "scaler_alone": scaler_alone,
    "accumulation": accumulation(),
    "accumulation_after_backward": accumulation(overlap_reductions=False, full_ar=True),
    "accumulation_undeclared": accumulation_undeclared,
    "unused": unused,
    "as_clients_do": as_clients_do,
    "reentrant": reentrant,
    "early_zero_grad": early_zero_grad(),
    "early_zero_grad_after_backward": early_zero_grad(overlap_reductions=False),
    "closure_and_schedule": closure_and_schedule,
    "norm": norm,
    "saved": saved(torch.float32),
    "saved_half": saved(torch.float16),
    "saved_views": saved(torch.bfloat16, set_param_views_to_flat_buffer=True, e5m2_allgather=True),
    "refuses": refuses,
    **lamb_options.CHECKS,
    "resumes": resumes("four", "two", 2, dwu_num_blocks=3),
    "resumes_of_replicas": resumes("two_by_two", None, 2),
}
