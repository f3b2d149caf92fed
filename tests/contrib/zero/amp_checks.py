"""DistributedFusedAdam under apex.amp in two processes: the numbers of one process with the mean of their gradients."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from apex import amp
from apex.contrib.optimizers import DistributedFusedAdam
from apex.optimizers import FusedAdam
from tests.amp.common import quiet
from tests.parallel.processes import Check, assert_same_everywhere


def make_net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4))


def loss_of(model: nn.Module, step: int, part: int, rank: int, factor: float) -> Tensor:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank))
    return model(x).float().square().mean() * factor


def factor_of(step: int, part: int, rank: int, overflows: bool) -> float:
    return torch.inf if overflows and (step, part, rank) in ((1, 0, 1), (4, 1, 0)) else 1.0


def trained(rank: int | None, level: str, silent: bool, overflows: bool, **options: Any) -> tuple[list[Tensor], Any]:
    """With `rank` None, FusedAdam has the mean of both ranks' losses; else each rank has its own."""
    net = make_net()
    kind: Any = FusedAdam if rank is None else DistributedFusedAdam
    more = {} if rank is None else {"bucket_cap_mb": 100 / 2**20, "store_params": level != "O3", **options}
    net, optimizer = quiet(net, kind(net.parameters(), lr=0.01, **more), opt_level=level, scale_window=3)
    for step in range(6):
        optimizer.zero_grad()
        parts = 1 + step % 2
        for part in range(parts):
            waits = silent and rank is not None and part + 1 < parts
            ranks = (0, 1) if rank is None else (rank,)
            losses = [loss_of(net, step, part, each, factor_of(step, part, each, overflows)) for each in ranks]
            with (
                optimizer.no_sync() if waits else contextlib.nullcontext(),
                amp.scale_loss(sum(losses) / len(losses), optimizer) as scaled,
            ):  # type: ignore[arg-type]
                scaled.backward()
        if rank is None:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
        else:
            optimizer.clip_grad_norm(0.1)
        optimizer.step()
    found = [param.detach().clone() for param in net.parameters()]
    scaler = amp.state_dict()["loss_scaler0"]
    amp.shutdown()
    return found, scaler if overflows else scaler["loss_scale"]


def equal_to_one(level: str, silent: bool = False, **options: Any) -> Check:
    def check(rank: int) -> None:
        overflows = level in ("O1", "O2")
        expected, scales = trained(None, level, silent, overflows)
        found, found_scales = trained(rank, level, silent, overflows, **options)
        assert_same_everywhere(found)
        assert found_scales == scales, (found_scales, scales)
        tolerance = 1e-5 if level == "O0" else 2e-2 if level == "O3" else 5e-3
        for mine, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=tolerance, atol=tolerance / 4)

    return check


def an_overflow_skips_the_step_everywhere(rank: int) -> None:
    for level in ("O1", "O2"):
        net = make_net()
        net, optimizer = quiet(net, DistributedFusedAdam(net.parameters(), lr=0.01), opt_level=level)
        for step in range(3):
            before = [param.detach().clone() for param in net.parameters()]
            optimizer.zero_grad()
            with amp.scale_loss(loss_of(net, step, 0, rank, torch.inf if rank == step else 1.0), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            changed = any(not torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True))
            assert changed == (step == 2)
            assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0 ** (15 if step == 0 else 14)
        assert_same_everywhere(list(net.parameters()))
        amp.shutdown()


def goes_on_after_shutdown(rank: int) -> None:
    net = make_net()
    net, optimizer = quiet(net, DistributedFusedAdam(net.parameters(), lr=0.01), opt_level="O2")
    for step in range(4):
        if step == 2:
            amp.shutdown()
            assert {param.dtype for param in net.parameters()} == {torch.float32}
        optimizer.zero_grad()
        loss = loss_of(net, step, 0, rank, 1.0)
        if step < 2:
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        else:
            loss.backward()
        optimizer.step()
        assert_same_everywhere(list(net.parameters()))
    expected = [optimizer.state_dict()["state"][index]["param"] for index in range(6)]
    for param, value in zip(net.parameters(), expected, strict=True):
        assert torch.equal(param, value)


CHECKS: dict[str, Check] = {
    **{f"equal_to_one_{level}": equal_to_one(level) for level in ("O0", "O1", "O2", "O3", "O4", "O5")},
    "equal_to_one_no_sync": equal_to_one("O2", silent=True),
    "equal_to_one_buffers": equal_to_one("O2", silent=True, contiguous_grad_buffer=True),
    "equal_to_one_without_overlap": equal_to_one("O1", overlap_grad_sync=False),
    "equal_to_one_late_parameters": equal_to_one("O2", overlap_param_sync=True),
    "an_overflow_skips_the_step_everywhere": an_overflow_skips_the_step_everywhere,
    "goes_on_after_shutdown": goes_on_after_shutdown,
}
