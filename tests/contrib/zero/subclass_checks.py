"""A subclass of DistributedFusedAdam that overrides upstream's private methods in the manner of NeMo's."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex.contrib.optimizers.distributed_fused_adam import (
    DistributedFusedAdam,
    _coalescing_manager,
    _coalescing_manager_append_work,
    _disable_pre_forward_hook,
    _multi_tensor_copy,
)
from tests.contrib.zero.adam_checks import STEPS, Net, batch, expected, groups_of, train, uses
from tests.parallel.processes import Check

LR = 0.01


class Subclass(DistributedFusedAdam):
    """Holds the gradients of some parameters back, and measures norms over processes of its own choice."""

    # What its norms are multiplied by, in the place of a sum over further processes.
    factor = 1.0

    def _make_post_backward_hook(self, param: Any, param_group_id: int, param_id: int) -> Callable[..., None]:
        def hook(*unused: Any) -> None:
            with self._lock:
                is_new = "fragments" not in self.state[param]
                if is_new:
                    self._init_param_state(param, param_group_id, param_id)
                if self.greedy_grad_copy and not getattr(param, "_disable_greedy_grad_copy", False):
                    self._grad_copy(param)
                    if self.overlap_grad_sync and not getattr(param, "_disable_overlap_grad_sync", False):
                        self._try_start_bucket_grad_sync(params=[param], ignore_last_bucket=is_new)

        return hook

    def try_grad_sync(self, params: Iterable[Any]) -> None:
        """Send gradients of `params`; outside of backward passes."""
        chosen = [param for param in params if not getattr(param, "_disable_overlap_grad_sync", False)]
        for param in chosen:
            self._grad_copy(param)
        self._try_start_bucket_grad_sync(params=chosen)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        super().zero_grad(*args, **kwargs)
        if self.contiguous_grad_buffer:
            for param in self.parameters():
                with _disable_pre_forward_hook(param):
                    param.main_grad = self.grad_buffer_view(param)

    def grad_norm(self, parameters: Any = None, norm_type: float = 2.0, force: bool = False) -> Tensor:
        if force or self._grad_norm is None:
            square = self._local_grad_norm(parameters=parameters, norm_type=norm_type)
            dist.all_reduce(square)
            self._grad_norm = square.sqrt() * self.factor
        return super().grad_norm()


class Counting(DistributedFusedAdam):
    """Counts gradients and leaves the rest to the hook of the base class."""

    count = 0

    def _make_post_backward_hook(self, param: Any, param_group_id: int, param_id: int) -> Callable[..., None]:
        hook = super()._make_post_backward_hook(param, param_group_id, param_id)

        def counting(*arguments: Any) -> None:
            self.count += 1
            hook(*arguments)

        return counting


def extended_hook(rank: int) -> None:
    """A subclass may call the hook of the base class in its own."""
    net = Net()
    optimizer = Counting(groups_of(net), lr=LR, bucket_cap_mb=0.001)
    train(net, optimizer, rank)
    used = [step for step in range(STEPS) if uses(step, rank)]
    assert optimizer.count == 5 * STEPS + 2 * len(used)
    for param, other in zip(net.parameters(), expected().parameters(), strict=True):
        torch.testing.assert_close(param, other)


def held_back(late: bool = False, **options: Any) -> Check:
    """Gradients that the hook leaves alone stay with their parameters until the step, and may be changed there.

    If `late`, backward passes send nothing, and `try_grad_sync` sends all other gradients after them.
    """

    def check(rank: int) -> None:
        net = Net()
        held = net.last.weight
        held._disable_greedy_grad_copy = held._disable_overlap_grad_sync = True
        optimizer = Subclass(groups_of(net), lr=LR, bucket_cap_mb=0.001, **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            with optimizer.no_sync():
                net(batch(step, 0, rank), uses(step, rank)).backward()
            with optimizer.no_sync() if late else contextlib.nullcontext():
                (net(batch(step, 1, rank), uses(step, rank)) / 2).backward()
            assert held.grad is not None
            if late:
                optimizer.try_grad_sync(net.parameters())
            elif step == 2 and uses(step, rank) and dist.get_world_size() > 1 and optimizer.overlap_grad_sync:
                # In the order of the first step complete buckets precede that of the parameter that is held back.
                assert 0 < len(optimizer._gradients._sent) < len(optimizer.state["buckets"])
            optimizer._finish_bucket_grad_sync()
            held.grad.mul_(2.0)  # in the place of a sum over tensor-parallel ranks
            optimizer.clip_grad_norm(0.05)
            optimizer.step()
            optimizer._try_start_bucket_param_sync(net.parameters())
        optimizer.param_sync()
        reference = held_in_one_process()
        for param, other in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param, other)

    return check


def held_in_one_process() -> nn.Module:
    """Train with everybody's batches in one process, with twice the gradient of one parameter."""
    net = Net()
    optimizer = torch.optim.AdamW(groups_of(net), lr=LR, weight_decay=0.0)
    size = dist.get_world_size()
    for step in range(STEPS):
        for param in net.parameters():
            param.grad = torch.zeros_like(param)
        for rank in range(size):
            (net(batch(step, 0, rank), uses(step, rank)) / size).backward()
            (net(batch(step, 1, rank), uses(step, rank)) / 2 / size).backward()
        net.last.weight.grad.mul_(2.0)
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
    return net


def main_gradients(rank: int) -> None:
    """Gradients that a subclass's users write to `main_grad` are those of the step."""
    net = Net()
    optimizer = Subclass(groups_of(net), lr=LR, bucket_cap_mb=0.001, contiguous_grad_buffer=True)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        loss = net(batch(step, 0, rank), uses(step, rank))
        params = list(net.parameters())
        for param, gradient in zip(params, torch.autograd.grad(loss, params, allow_unused=True), strict=True):
            if gradient is not None:
                param.main_grad.add_(gradient)
        optimizer.step()
    for param, other in zip(net.parameters(), expected().parameters(), strict=True):
        torch.testing.assert_close(param, other)


def own_norm(rank: int) -> None:
    """The norm that a subclass measures is what clips, and what decides whether a step is skipped."""
    net = Net()
    optimizer = Subclass(net.parameters(), lr=LR)
    net(batch(0, 0, rank), True).backward()
    plain = DistributedFusedAdam.grad_norm(optimizer, force=True)
    optimizer._grad_norm = None
    optimizer.factor = 3.0
    torch.testing.assert_close(optimizer.grad_norm(), 3 * plain)
    torch.testing.assert_close(optimizer.grad_norm([net.scale]), 3 * plain)  # remembered
    alone = optimizer.grad_norm([net.scale], force=True)
    assert 0 < alone < 3 * plain
    optimizer.zero_grad()
    net(batch(0, 0, rank), True).backward()
    before = [param.clone() for param in net.parameters()]
    optimizer.factor = torch.inf
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    assert optimizer.unscale_grads(grad_scaler=scaler)[optimizer.device].item() == 1.0
    optimizer.step(grad_scaler=scaler)
    assert all(map(torch.equal, before, net.parameters()))


def own_parameter_buffer(rank: int) -> None:
    """A subclass may make parameters views of a buffer in which fragments and buckets say where each one is."""
    net = Net()
    optimizer = Subclass(groups_of(net), lr=LR, bucket_cap_mb=0.001, param_sync_dtype=torch.float32)
    optimizer.init_params_bucket([net.last.weight, net.first.weight])
    optimizer.init_params()
    buckets = optimizer.state["buckets"]
    assert len({bucket.dtypes() for bucket in buckets}) == 1
    buffer = torch.zeros(max(bucket.contiguous_buffer_offset + bucket.bucket_size for bucket in buckets))
    optimizer._param_buffers[buckets[0].dtypes()] = buffer
    places = []
    for param in net.parameters():
        fragment = optimizer.state[param]["fragments"][0]
        start = buckets[fragment.bucket_id].contiguous_buffer_offset + fragment.bucket_range[0]
        places.append((start, start + param.numel()))
        view = buffer[start : start + param.numel()].view_as(param)
        _multi_tensor_copy([param.detach()], [view], dummy_overflow_buf=optimizer._dummy_overflow_buf)
        param.data = view
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(sorted(places)))
    for step in range(STEPS):
        optimizer.zero_grad()
        net(batch(step, 0, rank), uses(step, rank)).backward()
        optimizer.step()
    for param, other in zip(net.parameters(), expected().parameters(), strict=True):
        torch.testing.assert_close(param, other)
        assert param.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def coalesced(rank: int) -> None:
    """Both ways in which clients use the manager of collectives."""
    size = dist.get_world_size()
    tensors = [torch.full((3,), rank + 1.0), torch.full((2,), 2.0)]
    with _coalescing_manager(None, tensors[0].device, async_ops=True) as manager:
        for tensor in tensors:
            _coalescing_manager_append_work(manager, dist.all_reduce(tensor, async_op=True))
    manager.wait()
    requests: list[Any] = []
    with _coalescing_manager(None, tensors[0].device, requests):
        requests += [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for request in requests:
        request.wait()
    assert tensors[0].tolist() == [size * size * (size + 1) / 2] * 3
    assert tensors[1].tolist() == [2.0 * size * size] * 2


CHECKS: dict[str, Check] = {
    "subclass_extends_the_hook": extended_hook,
    "subclass_holds_back": held_back(),
    "subclass_holds_back_late": held_back(late=True),
    "subclass_without_overlap": held_back(overlap_grad_sync=False),
    "subclass_with_buffers": held_back(overlap_param_sync=True, contiguous_param_buffer=True),
    "subclass_main_gradients": main_gradients,
    "subclass_norm": own_norm,
    "subclass_parameter_buffer": own_parameter_buffer,
    "coalesced_collectives": coalesced,
}
