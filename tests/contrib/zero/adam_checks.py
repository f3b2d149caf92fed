"""DistributedFusedAdam in several processes, against torch.optim.AdamW on the joined gradients in one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
from apex.optimizers import FusedAdam
from tests.parallel.processes import Check, assert_same_everywhere

STEPS = 4
# One step of a bfloat16 number, and what a gradient that is off by as much makes of four updates of 0.02.
BF16 = {"rtol": 1.6e-2, "atol": 2e-3}


class Net(nn.Module):
    """Layers of odd sizes, of which one is used in some steps, by some ranks, only; one parameter is never used."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 33, dtype=dtype)
        self.sometimes = nn.Linear(33, 33, dtype=dtype)
        self.last = nn.Linear(33, 3, dtype=dtype)
        self.never = nn.Parameter(torch.randn(5, dtype=dtype))
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=dtype))

    def forward(self, x: Tensor, uses: bool = True) -> Tensor:
        hidden = self.first(x).tanh()
        if uses:
            hidden = hidden + self.sometimes(hidden)
        return (self.last(hidden) * self.scale).square().mean()


def batch(step: int, micro: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(3, 7, generator=generator).to(dtype)


def uses(step: int, rank: int) -> bool:
    return step == 0 or (step == 2 and rank == 0)


def groups_of(net: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups, neighbours in different ones."""
    params = list(net.parameters())
    return [{"params": params[0::2]}, {"params": params[1::2], "weight_decay": 0.1, "lr": 0.02}]


def expected(
    steps: int = STEPS, micros: int = 1, dtype: torch.dtype = torch.float32, clip: float | None = None, **options: Any
) -> nn.Module:
    """One process with everybody's batches; a missing gradient counts as zeros."""
    net = Net(dtype)
    reference = copy.deepcopy(net).float()
    optimizer = torch.optim.AdamW(groups_of(reference), **{"lr": 0.01, "weight_decay": 0.0, **options})
    size = dist.get_world_size()
    for step in range(steps):
        optimizer.zero_grad()
        for param in reference.parameters():
            param.grad = torch.zeros_like(param)
        for rank in range(size):
            for micro in range(micros):
                if dtype == torch.float32:
                    (reference(batch(step, micro, rank), uses(step, rank)) / size).backward()
                    continue
                with torch.no_grad():  # gradients of half-precision parameters, averaged in float32
                    for mine, theirs in zip(net.parameters(), reference.parameters(), strict=True):
                        mine.copy_(theirs)
                net.zero_grad()
                net(batch(step, micro, rank, dtype), uses(step, rank)).backward()
                for mine, theirs in zip(net.parameters(), reference.parameters(), strict=True):
                    if mine.grad is not None:
                        theirs.grad += mine.grad.float() / size
        if clip is not None:
            nn.utils.clip_grad_norm_(reference.parameters(), clip)
        optimizer.step()
    return reference


def train(
    net: nn.Module, optimizer: Any, rank: int, steps: range = range(STEPS), micros: int = 1, clip: float | None = None
) -> None:
    dtype = next(net.parameters()).dtype
    for step in steps:
        optimizer.zero_grad()
        for micro in range(micros):
            last = micro == micros - 1
            with contextlib.nullcontext() if last else optimizer.no_sync(micro % 2 == 1 or dtype != torch.float32):
                net(batch(step, micro, rank, dtype), uses(step, rank)).backward()
        if clip is not None:
            optimizer.clip_grad_norm(clip)
        optimizer.step()


def like_one_process(
    micros: int = 1, kind: torch.dtype = torch.float32, clip: float | None = None, tolerance: Any = None, **options: Any
) -> Check:
    """A `kind` of parameters."""

    def check(rank: int) -> None:
        net = Net(kind)
        if rank:
            with torch.no_grad():
                net.first.weight.zero_()  # the first rank's parameters are those of all
        optimizer = DistributedFusedAdam(groups_of(net), lr=0.01, **options)
        train(net, optimizer, rank, micros=micros, clip=clip)
        optimizer.param_sync()
        reference = expected(micros=micros, dtype=kind, clip=clip)
        for param, other in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param, other.to(kind), **(tolerance or {}))
        assert_same_everywhere(list(net.parameters()))
        saved = optimizer.state_dict()["state"]
        assert saved["step"] == STEPS
        others = dict(zip(net.parameters(), reference.parameters(), strict=True))
        for index, param in enumerate(optimizer.parameters()):
            torch.testing.assert_close(saved[index]["param"].float(), others[param].detach(), **(tolerance or {}))

    return check


def several_synced_passes(rank: int) -> None:
    """Every backward pass sends; sums add up."""
    net = Net()
    optimizer = DistributedFusedAdam(groups_of(net), lr=0.01, bucket_cap_mb=0.001)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        for micro in range(3):
            net(batch(step, micro, rank), uses(step, rank)).backward()
        optimizer.step()
    for param, other in zip(net.parameters(), expected(micros=3).parameters(), strict=True):
        torch.testing.assert_close(param, other)


def processes_that_differ(rank: int) -> None:
    for options in ({}, {"contiguous_grad_buffer": True, "contiguous_param_buffer": True}):
        differ(rank, **options)


def differ(rank: int, **options: Any) -> None:
    """Passes do not use what others use; the first sends nothing; clients have collectives of their own in between."""
    size = dist.get_world_size()
    net, reference = Net(), Net()
    optimizer = DistributedFusedAdam(groups_of(net), lr=0.01, bucket_cap_mb=0.0008, pipeline_size=1, **options)
    plain = torch.optim.AdamW(groups_of(reference), lr=0.01, weight_decay=0.0)
    for step in range(3):
        optimizer.zero_grad()
        for param in reference.parameters():
            param.grad = torch.zeros_like(param)
        for micro in range(3):
            used = [(step + micro + other) % 2 == 0 for other in range(size)]
            with optimizer.no_sync() if micro == 0 else contextlib.nullcontext():
                net(batch(step, micro, rank), used[rank]).backward()
            total = torch.tensor([1.0])
            dist.all_reduce(total)
            assert total.item() == size
            for other in range(size):
                (reference(batch(step, micro, other), used[other]) / size).backward()
        optimizer.step()
        plain.step()
    for param, other in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param, other)


def checkpointed(rank: int) -> None:
    for options in ({}, {"contiguous_grad_buffer": True, "contiguous_param_buffer": True}):
        in_checkpoints(rank, **options)


def in_checkpoints(rank: int, **options: Any) -> None:
    """Reentrant checkpoints have backward passes inside the backward pass; a shared layer's gradients arrive twice."""
    size = dist.get_world_size()

    def loss(net: Net, x: Tensor) -> Tensor:
        hidden = net.first(x)
        for _ in range(2):
            hidden = checkpoint(lambda value: net.sometimes(value).tanh(), hidden, use_reentrant=True)
        return (net.last(hidden) if outside else checkpoint(net.last, hidden, use_reentrant=True)).square().mean()

    outside = bool(options)  # whether the first gradient of all arrives in the pass itself, or in one inside it
    net, reference = Net(), Net()
    optimizer = DistributedFusedAdam(groups_of(net), lr=0.01, bucket_cap_mb=0.0008, **options)
    plain = torch.optim.AdamW(groups_of(reference), lr=0.01, weight_decay=0.0)
    for step in range(3):
        optimizer.zero_grad()
        loss(net, batch(step, 0, rank)).backward()
        optimizer.step()
        for param in reference.parameters():
            param.grad = torch.zeros_like(param)
        for other in range(size):
            (loss(reference, batch(step, 0, other)) / size).backward()
        plain.step()
    for param, other in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param, other)


def norms(rank: int) -> None:
    net, whole = Net(), Net()
    optimizer = DistributedFusedAdam(net.parameters(), bucket_cap_mb=0.001)
    for other in range(dist.get_world_size()):
        (whole(batch(0, 0, other)) / dist.get_world_size()).backward()
    net(batch(0, 0, rank)).backward()
    gradients = [param.grad for param in whole.parameters() if param.grad is not None]
    torch.testing.assert_close(optimizer.grad_norm(), nn.utils.get_total_norm(gradients))
    largest = nn.utils.get_total_norm(gradients, torch.inf)
    torch.testing.assert_close(optimizer.grad_norm(norm_type=torch.inf), largest)
    some = optimizer.grad_norm([net.first.weight, net.scale], force=True)
    torch.testing.assert_close(some, nn.utils.get_total_norm([whole.first.weight.grad, whole.scale.grad]))
    norm = optimizer.clip_grad_norm(0.01)
    torch.testing.assert_close(optimizer.grad_norm(), torch.tensor(0.01))
    torch.testing.assert_close(optimizer.grad_norm(force=True), torch.tensor(0.01))
    torch.testing.assert_close(norm, nn.utils.get_total_norm(gradients))


def overflow(rank: int) -> None:
    """An infinite gradient in the last rank skips the step in all; scales stay equal."""
    last = dist.get_world_size() - 1
    net = Net()
    optimizer = DistributedFusedAdam(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for step in range(5):
        optimizer.zero_grad()
        before = [param.detach().clone() for param in net.parameters()]
        loss = net(batch(step, 0, rank))
        scaler.scale(loss * torch.inf if (step, rank) == (1, last) else loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)  # finds no gradients, which are the optimizer's
        if step == 4:
            optimizer.unscale_grads(grad_scaler=scaler)
            assert optimizer.clip_grad_norm(100.0) < 10
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        assert optimizer.state["step"] == step + (step < 1)  # the host reads a flag of its own at once
        same = all(map(torch.equal, before, net.parameters()))
        assert same == (step == 1), step
    assert scales == [2.0**10, 2.0**9, 2.0**9, 2.0**10, 2.0**10]
    assert optimizer.state_dict()["state"]["step"] == 4
    assert_same_everywhere([*net.parameters(), torch.tensor(scales)])
    scaler.unscale_(optimizer)
    optimizer.clip_grad_norm(1.0)
    with pytest.raises(RuntimeError, match=r"call optimizer\.unscale_grads\(grad_scaler=scaler\)"):
        scaler.step(optimizer)
    reference = Net()
    plain = FusedAdam(reference.parameters(), lr=0.01)
    for step in (0, 2, 3, 4):
        plain.zero_grad()
        for param in reference.parameters():
            param.grad = torch.zeros_like(param)
        for other in range(last + 1):
            (reference(batch(step, 0, other)) / (last + 1)).backward()
        plain.step()
    for param, other in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param, other)


# For docs/zero.md: dtype of parameters, options, bytes per element that are divided among processes, and those of one.
MEMORY: list[tuple[torch.dtype, dict[str, Any], int, int]] = [
    (torch.float32, {}, 12, 8),
    (torch.bfloat16, {"param_sync_dtype": torch.bfloat16}, 14, 12),
    (
        torch.bfloat16,
        {"param_sync_dtype": torch.bfloat16, "store_params": False, "store_param_remainders": True},
        12,
        12,
    ),
    (torch.bfloat16, {"param_sync_dtype": torch.bfloat16, "store_params": False}, 10, 8),
    (torch.float16, {"dtype": torch.float16, "with_scaled_states": True}, 8, 8),
]


def skipped(rank: int) -> None:
    """A first step that an overflow keeps from happening leaves parameters as they are, however they are kept."""
    last = dist.get_world_size() - 1
    bf16: dict[str, Any] = {"param_sync_dtype": torch.bfloat16}
    ways: list[tuple[torch.dtype, dict[str, Any]]] = [
        (torch.bfloat16, bf16),
        (torch.bfloat16, {**bf16, "contiguous_param_buffer": True}),
        (torch.bfloat16, {**bf16, "store_params": False}),
        (torch.bfloat16, {**bf16, "store_params": False, "store_param_remainders": True}),
        (torch.float16, {"dtype": torch.float16, "with_scaled_states": True}),
        (torch.float32, {"dtype": torch.float16, "with_scaled_states": True, "param_sync_dtype": torch.float32}),
    ]
    for kind, options in ways:
        net = Net(kind)
        before = [param.detach().clone() for param in net.parameters()]
        optimizer = DistributedFusedAdam(net.parameters(), lr=0.01, bucket_cap_mb=0.001, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for overflows in (True, True, False):
            optimizer.zero_grad()
            loss = net(batch(0, 0, rank, kind))
            scaler.scale(loss * torch.inf if overflows and rank == last else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            assert all(map(torch.equal, before, net.parameters())) == overflows, (kind, options)
        assert optimizer.state_dict()["state"]["step"] == 1


def memory(rank: int) -> None:
    """State per rank is a part of that of one process: bytes are counted."""
    size = dist.get_world_size()
    for kind, options, divided, alone in MEMORY:
        net = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 77)).to(kind)
        elements = sum(param.numel() for param in net.parameters())
        optimizer = DistributedFusedAdam(net.parameters(), bucket_cap_mb=0.1, **options)
        net(torch.ones(1, 300, dtype=kind)).sum().backward()
        optimizer.step()
        tensors = [shard for state in optimizer._states for shard in state.shards().values()]
        tensors += [shard for state in optimizer._states for shard in state.arena.outgoing]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        bytes_each = alone if size == 1 else divided
        expected = bytes_each * elements / size
        # Parameters start at multiples of 128 bytes of gradients, buckets are divided at such.
        assert expected <= sum(storages.values()) <= expected + 128 * bytes_each * 6, (kind, options)
        assert sum(len(bucket.exp_avg_shard) for bucket in optimizer.state["buckets"]) >= elements / size


def buffers(rank: int) -> None:
    """Gradients that are written to the buffer, not to parameters, count."""
    net, twin = Net(), Net()
    optimizer = DistributedFusedAdam(net.parameters(), lr=0.01, contiguous_grad_buffer=True, bucket_cap_mb=0.001)
    optimizer.init_param_buffer()
    other = DistributedFusedAdam(twin.parameters(), lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        other.zero_grad()
        twin(batch(step, 0, rank)).backward()
        plain = Net()
        plain.load_state_dict(twin.state_dict())
        plain(batch(step, 0, rank)).backward()
        for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            assert mine.grad.data_ptr() == optimizer.grad_buffer_view(mine).data_ptr()
            if theirs.grad is not None:
                optimizer.grad_buffer_view(mine).add_(theirs.grad)
        optimizer.step()
        other.step()
    assert all(map(torch.equal, net.parameters(), twin.parameters()))
    addresses = sorted(param.untyped_storage().data_ptr() for param in net.parameters())
    assert addresses[0] == addresses[-1]


def later_group(rank: int) -> None:
    """Parameters that come later have state of their own; frozen ones have none and stay."""
    net = Net()
    net.last.weight.requires_grad_(False)
    frozen = net.last.weight.detach().clone()
    optimizer = DistributedFusedAdam([net.first.weight, net.last.weight, net.never], lr=0.01, weight_decay=0.5)
    train(net, optimizer, rank, range(1))
    optimizer.add_param_group({"params": [net.first.bias, net.scale], "lr": 0.1})
    before = net.scale.item()
    train(net, optimizer, rank, range(1, 3))
    assert torch.equal(net.last.weight, frozen)
    net.last.weight.requires_grad_(True)
    train(net, optimizer, rank, range(3, 5))
    assert not torch.equal(net.last.weight, frozen)
    assert net.scale.item() != before
    assert len(optimizer.state_dict()["state"]) == 1 + 5
    assert_same_everywhere(list(net.parameters()))


def replaced(rank: int) -> None:
    """Of two optimizers of the same parameters the one that was made last has the gradients."""
    net, twin = Net(), Net()
    first = DistributedFusedAdam(net.parameters(), lr=1.0)
    second = DistributedFusedAdam(groups_of(net), lr=0.01)
    train(net, second, rank)
    train(twin, DistributedFusedAdam(groups_of(twin), lr=0.01), rank)
    assert all(map(torch.equal, net.parameters(), twin.parameters()))
    assert not first._locations


def order(rank: int) -> None:
    """Buckets are sent in the order in which they become complete in the first process, not in that of the layout."""
    net = Net()
    optimizer = DistributedFusedAdam(net.parameters(), bucket_cap_mb=0.0001)
    optimizer.init_params(net.parameters())  # first ones first: the wrong way round
    sync = optimizer._gradients
    places = [list(sync._order)]
    for step in range(2):
        optimizer.zero_grad()
        net(batch(step, 0, rank)).backward()
        optimizer.step()
        places.append(list(sync._order))
    if dist.get_world_size() > 1:
        assert places[0] != places[1] == places[2]
        number = {key: place for place, key in enumerate(places[1])}
        last, first = (
            max(number[bucket] for bucket in buckets_of(sync, layer.weight)) for layer in (net.last, net.first)
        )
        assert last < first


def buckets_of(sync: Any, param: Tensor) -> tuple[int, ...]:
    arena = sync.arenas[0]
    index = next(index for index, other in enumerate(arena.params) if other is param)
    return arena.layout.buckets_of[index]


def overlapping_parameters(rank: int) -> None:
    """The step returns before parameters have arrived; whatever uses one waits for it."""
    if dist.get_world_size() == 1:
        return
    uses_of: list[Callable[[nn.Module], Any]] = [
        lambda net: net.state_dict(),
        lambda net: copy.deepcopy(net),
        lambda net: nn.functional.linear(torch.ones(1, 7), net.first.weight),
        lambda net: [param.sum() for param in net.parameters()],
    ]
    for use in uses_of:
        net, twin = Net(), Net()
        optimizer = DistributedFusedAdam(
            groups_of(net), lr=0.01, overlap_param_sync=True, bucket_cap_mb=0.001, pipeline_size=1
        )
        plain = DistributedFusedAdam(groups_of(twin), lr=0.01, bucket_cap_mb=0.001)
        train(net, optimizer, rank, range(2))
        train(twin, plain, rank, range(2))
        optimizer.zero_grad()
        assert not optimizer._parameters.is_complete
        assert type(net.first.weight) is not nn.Parameter
        assert net.first.weight.grad is None
        assert not optimizer._parameters.is_complete
        use(net)
        assert type(net.first.weight) is nn.Parameter
        optimizer.param_sync()
        assert {type(param) for param in net.parameters()} == {nn.Parameter}
        assert all(map(torch.equal, net.parameters(), twin.parameters()))


def init_by_hand(rank: int) -> None:
    """Parameters that are laid out one by one, in one bucket, or with other dtypes."""
    net = Net()
    optimizer = DistributedFusedAdam(groups_of(net), lr=0.01, bucket_cap_mb=0.001)
    optimizer.init_params(net.scale)
    optimizer.init_params_bucket([net.last.weight, net.first.weight, net.scale])
    optimizer.init_params([net.never], param_sync_dtype=torch.bfloat16)
    fragments = [optimizer.state[param]["fragments"] for param in (net.last.weight, net.first.weight)]
    assert {fragment.bucket_id for each in fragments for fragment in each} == {1}
    assert optimizer.parameter(fragments[0][0]) is net.last.weight
    assert optimizer.parameter(1, 3) is net.last.bias
    train(net, optimizer, rank)
    reference = expected()
    for (name, param), other in zip(net.named_parameters(), reference.named_parameters(), strict=True):
        assert name == other[0]
        wanted = other[1].bfloat16().float() if name == "never" else other[1]
        torch.testing.assert_close(param, wanted)


CHECKS: dict[str, Check] = {
    "plain": like_one_process(),
    "small_buckets": like_one_process(bucket_cap_mb=0.001, pipeline_size=1),
    "accumulated": like_one_process(micros=3, bucket_cap_mb=0.001),
    "no_overlap": like_one_process(micros=2, overlap_grad_sync=False),
    "clipped": like_one_process(clip=0.05),
    "contiguous": like_one_process(
        micros=3, contiguous_param_buffer=True, contiguous_grad_buffer=True, bucket_cap_mb=0.001, nccl_ub=True
    ),
    "overlap_params": like_one_process(overlap_param_sync=True, bucket_cap_mb=0.001),
    "not_stored": like_one_process(store_params=False, bucket_cap_mb=0.001),
    "capturable": like_one_process(capturable=True),
    "bf16": like_one_process(kind=torch.bfloat16, param_sync_dtype=torch.bfloat16, micros=2, tolerance=BF16),
    "bf16_remainders": like_one_process(
        kind=torch.bfloat16,
        store_params=False,
        store_param_remainders=True,
        param_sync_dtype=torch.bfloat16,
        tolerance=BF16,
    ),
    "bf16_remainders_contiguous": like_one_process(
        kind=torch.bfloat16,
        tolerance=BF16,
        store_params=False,
        store_param_remainders=True,
        param_sync_dtype=torch.bfloat16,
        contiguous_param_buffer=True,
        bucket_cap_mb=0.001,
    ),
    "scaled_states": like_one_process(
        with_scaled_states=True,
        dtype=torch.float16,
        grad_sync_dtype=torch.float32,
        param_sync_dtype=torch.float32,
        bucket_cap_mb=0.001,
        tolerance={"rtol": 1e-2, "atol": 2e-3},
    ),
    "several_synced_passes": several_synced_passes,
    "processes_that_differ": processes_that_differ,
    "checkpointed": checkpointed,
    "norms": norms,
    "overflow": overflow,
    "skipped": skipped,
    "memory": memory,
    "buffers": buffers,
    "later_group": later_group,
    "replaced": replaced,
    "order": order,
    "overlapping_parameters": overlapping_parameters,
    "init_by_hand": init_by_hand,
}
