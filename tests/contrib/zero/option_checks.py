"""Every option of DistributedFusedAdam does what it says: each of these fails where one is passed over."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex.contrib.optimizers._zero import optimizer as optimizer_module
from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
from tests.contrib.exchanges import listed
from tests.contrib.zero.adam_checks import Net, batch, like_one_process
from tests.parallel.processes import Check, assert_same_everywhere

SIZES = (300, 7, 40, 129)


def vectors(dtype: torch.dtype = torch.float32, value: float = 1.0) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((size,), value, dtype=dtype)) for size in SIZES]


def pass_back(params: list[nn.Parameter], gradient: float = 1.0) -> None:
    torch.stack([(param.float() * gradient).sum() for param in params]).sum().backward()


def step(params: list[nn.Parameter], optimizer: DistributedFusedAdam, gradient: float = 1.0) -> None:
    optimizer.zero_grad()
    pass_back(params, gradient)
    optimizer.step()


def overlapping_gradients(rank: int) -> None:
    """Gradients are sent in backward passes, unless they are not to be, or in `no_sync`."""
    several = dist.get_world_size() > 1
    for overlap in (True, False):
        params = vectors()
        optimizer = DistributedFusedAdam(params, overlap_grad_sync=overlap, bucket_cap_mb=0.0005)
        for _ in range(2):
            optimizer.zero_grad()
            with listed() as exchanges, optimizer.no_sync():
                pass_back(params)
            assert not exchanges
            with listed() as exchanges:
                pass_back(params)
            assert any(each.sends_gradients for each in exchanges) == (several and overlap)
            with listed() as exchanges:
                optimizer.step()
            assert any(each.sends_gradients for each in exchanges) == (several and not overlap)


def most_under_way(sync: Any) -> list[int]:
    """A list that grows by how many buckets are under way whenever one is waited for."""
    found: list[int] = []
    finish = sync._finish_first

    def noted() -> None:
        found.append(len(sync._under_way))
        finish()

    sync._finish_first = noted
    return found


def buckets(rank: int) -> None:
    """Of `bucket_cap_mb` at most, in the dtype that gradients travel in; at most `pipeline_size` under way."""
    for dtype, cap, pipeline in ((torch.float32, 0.0005, 1), (torch.bfloat16, 0.0005, 3), (torch.float32, 100.0, 2)):
        params = vectors()
        optimizer = DistributedFusedAdam(
            params, bucket_cap_mb=cap, pipeline_size=pipeline, overlap_grad_sync=False, grad_sync_dtype=dtype
        )
        step(params, optimizer)
        made = optimizer.state["buckets"]
        assert (len(made) > 2) == (cap < 1)
        assert all(bucket.bucket_size * dtype.itemsize <= cap * 2**20 for bucket in made)
        if dist.get_world_size() == 1:
            continue
        optimizer._gradients._is_done = lambda sent: False  # type: ignore[method-assign]
        most = [most_under_way(sync) for sync in (optimizer._gradients, optimizer._parameters)]
        with listed() as exchanges:
            step(params, optimizer)
        assert [max(each) for each in most] == [min(pipeline, len(made))] * 2
        for each in exchanges:
            if each.sends_gradients:
                bits = 8 * sum(tensor.nbytes for tensor in each.tensors[-1:])
                assert bits in {8 * bucket.bucket_size * dtype.itemsize for bucket in made}


def summed(rank: int) -> None:
    """Without `average_grad_sync` gradients are sums; eps is so large that steps are longer by that."""
    for average in (True, False):
        params = vectors()
        optimizer = DistributedFusedAdam(params, average_grad_sync=average, lr=1.0, eps=1.0)
        pass_back(params)
        gradient = 1.0 if average else float(dist.get_world_size())
        torch.testing.assert_close(optimizer.grad_norm(), torch.tensor(float(sum(SIZES))).sqrt() * gradient)
        optimizer.step()
        torch.testing.assert_close(params[0].detach(), torch.full((300,), 1 - gradient / (gradient + 1)))


def dtypes(rank: int) -> None:
    """Of the state, and of gradients and parameters on their way."""
    third = torch.tensor(1 / 3)
    for kinds in (
        {"dtype": torch.bfloat16},
        {"grad_sync_dtype": torch.float16},
        {"param_sync_dtype": torch.bfloat16},
        {"dtype": torch.float16, "grad_sync_dtype": torch.float32, "param_sync_dtype": torch.bfloat16},
    ):
        params = vectors()
        optimizer = DistributedFusedAdam(params, lr=0.01, contiguous_grad_buffer=True, **kinds)
        step(params, optimizer, third.item())
        state = kinds.get("dtype", torch.float32)
        gradients, parameters = (kinds.get(name, state) for name in ("grad_sync_dtype", "param_sync_dtype"))
        bucket = optimizer.state["buckets"][0]
        assert bucket.dtypes() == (state, gradients, parameters)
        assert bucket.exp_avg_shard.dtype == bucket.exp_avg_sq_shard.dtype == state
        assert optimizer.grad_buffer_view(params[0]).dtype == gradients
        average = optimizer.state_dict()["state"][0]["exp_avg"]
        # Rounded when it is sent, and when it is stored.
        expected = (third.to(gradients).float() * 0.1).to(state).float()
        torch.testing.assert_close(average.float(), expected.expand(300), rtol=1e-6, atol=0)
        for param in params:
            assert torch.equal(param, param.to(parameters).float())
            assert not torch.equal(param, torch.ones_like(param))


def as_integers(rank: int) -> None:
    """Parameters travel as they are in integers that are long enough, and without their last bits in shorter ones."""
    ways: list[tuple[torch.dtype, dict[str, Any], int]] = [
        (torch.float32, {"param_sync_dtype": torch.int64}, 0),
        (torch.float32, {"param_sync_dtype": torch.int32, "contiguous_param_buffer": True}, 0),
        (torch.float32, {"param_sync_dtype": torch.int16, "contiguous_param_buffer": True}, 16),
        (torch.float32, {"param_sync_dtype": torch.int16, "overlap_param_sync": True}, 16),
        (torch.float32, {"param_sync_dtype": torch.int16, "store_params": False}, 16),
        (torch.float16, {"param_sync_dtype": torch.uint8, "dtype": torch.float16}, 8),
        (torch.bfloat16, {"param_sync_dtype": torch.int32, "dtype": torch.float16, "with_scaled_states": True}, 0),
    ]
    for kind, options, lost in ways:
        params, twins = vectors(kind, 1.37), vectors(kind, 1.37)
        optimizer = DistributedFusedAdam(params, lr=0.2, bucket_cap_mb=0.0005, **options)
        same = {**options, "param_sync_dtype": kind}
        other = DistributedFusedAdam(twins, lr=0.2, bucket_cap_mb=0.0005, **same)
        for _ in range(1 if options.get("store_params") is False else 3):
            step(params, optimizer)
            step(twins, other)
        optimizer.param_sync()
        other.param_sync()
        integer = {2: torch.int16, 4: torch.int32}[kind.itemsize]
        for param, twin in zip(params, twins, strict=True):
            bits = twin.detach().view(integer)
            assert torch.equal(param.detach().view(integer), bits >> lost << lost), (kind, options)
            assert lost == 0 or not torch.equal(param, twin)
        assert_same_everywhere([param.detach() for param in params])
        assert optimizer.state["buckets"][0].param_sync_dtype == options["param_sync_dtype"]


def scaled_states(rank: int) -> None:
    """Squares of gradients that float16 has no number for are there all the same."""
    moved = {}
    for scaled in (True, False):
        params = vectors(torch.float16)
        optimizer = DistributedFusedAdam(
            params, lr=0.125, eps=1e-12, dtype=torch.float16, grad_sync_dtype=torch.float32, with_scaled_states=scaled
        )
        for _ in range(2):
            step(params, optimizer, 2.0**-14)
        moved[scaled] = params[0].detach().float()
    torch.testing.assert_close(moved[True], torch.full((300,), 0.75), rtol=2e-3, atol=0)
    assert not torch.allclose(moved[False], moved[True])


def capturable(rank: int) -> None:
    params = vectors()
    for wanted in (True, False):
        optimizer = DistributedFusedAdam(params, capturable=wanted)
        step(params, optimizer)
        assert isinstance(optimizer.param_groups[0]["lr"], Tensor) == wanted
        assert isinstance(optimizer.state["step"], Tensor) == wanted


def registered_buffers(rank: int) -> None:
    """With `nccl_ub` buffers that are sent come from the backend's allocator; there is none for this device."""
    for wanted in (True, False):
        params = vectors()
        used = []

        def zeros(*args: Any, used: list[Any] = used, **kwargs: Any) -> Tensor:
            used.append(args)
            return torch.zeros(*args, **kwargs)

        def allocator(group: Any, device: torch.device, registered: bool, zeros: Any = zeros) -> Any:
            return zeros if registered else torch.zeros

        with mock.patch.object(optimizer_module, "allocator", allocator):
            optimizer = DistributedFusedAdam(params, contiguous_grad_buffer=True, nccl_ub=wanted)
            optimizer.init_params()
        assert bool(used) == wanted


def groups(rank: int) -> None:
    """Processes of another group are not asked; of the same parameters each has a half, or all."""
    size = dist.get_world_size()
    alone = [dist.new_group([other]) for other in range(size)][rank]
    for options, ranks in (
        ({}, size),
        ({"process_group": alone}, 1),
        ({"distributed_process_group": alone, "redundant_process_group": dist.group.WORLD}, 1),
    ):
        net = Net()
        optimizer = DistributedFusedAdam(net.parameters(), **options)
        assert optimizer.distributed_size == ranks
        with listed() as exchanges:
            net(batch(0, 0, rank)).backward()
            optimizer.step()
        held = sum(len(bucket.exp_avg_shard) for bucket in optimizer.state["buckets"])
        elements = sum(param.numel() for param in net.parameters())
        assert elements / ranks <= held <= elements / ranks + 300
        if "process_group" in options:
            assert not exchanges
        elif size > 1:
            assert exchanges
            assert_same_everywhere(list(net.parameters()))


CHECKS: dict[str, Check] = {
    **{
        f"option_{check.__name__}": check
        for check in (
            overlapping_gradients,
            buckets,
            summed,
            dtypes,
            as_integers,
            scaled_states,
            capturable,
            registered_buffers,
            groups,
        )
    },
    "as_integers": like_one_process(param_sync_dtype=torch.int64, bucket_cap_mb=0.001),
    "as_integers_contiguous": like_one_process(
        param_sync_dtype=torch.int32, contiguous_param_buffer=True, contiguous_grad_buffer=True
    ),
}
