"""State that four processes save and four, two or one load: all formats, and torch.distributed.checkpoint."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
from tests.contrib.zero.adam_checks import STEPS, Net, groups_of, like_one_process, overflow, train
from tests.parallel.processes import Check, assert_same_everywhere

BF16 = {"store_params": False, "store_param_remainders": True, "param_sync_dtype": torch.bfloat16}


def made(kind: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> tuple[nn.Module, DistributedFusedAdam]:
    net = Net(kind)
    with torch.no_grad():
        for param in net.parameters():
            param.add_(seed)  # other parameters than those that are loaded
    return net, DistributedFusedAdam(groups_of(net), **{"lr": 0.01, "bucket_cap_mb": 0.002, **options})


@functools.cache
def subgroups(rank: int) -> dict[str, Any]:
    """Process groups of one, two and four processes that this rank is in."""
    singles = [dist.new_group([other]) for other in range(4)]
    pairs = [dist.new_group(ranks) for ranks in ((0, 1), (2, 3))]
    return {"one": singles[rank], "two": pairs[rank // 2], "four": dist.group.WORLD}


def continues(expected: dict[Any, Any], net: nn.Module, optimizer: DistributedFusedAdam, twin: nn.Module) -> None:
    """The same parameters and state, wherever they are."""
    assert all(map(torch.equal, net.parameters(), twin.parameters()))
    found = optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    assert found["state"]["step"] == expected["state"]["step"] == STEPS
    for index in range(len(list(net.parameters()))):
        for name, value in expected["state"][index].items():
            assert torch.equal(found["state"][index][name], value), (index, name)


def formats(**options: Any) -> Check:
    def check(rank: int) -> None:
        kind = torch.bfloat16 if options.get("store_param_remainders") else torch.float32
        net, optimizer = made(kind, **options)
        train(net, optimizer, rank)
        whole = optimizer.state_dict()
        only = optimizer.state_dict(gather_on_root=True)
        assert (only is None) == (rank > 0)
        shards = [optimizer.state_dict(state_dict_format=1)]
        dist.broadcast_object_list(shards, 0)
        own = optimizer.state_dict(state_dict_format=1, gather_on_root=False)
        assert own is not None
        assert [len(bucket.exp_avg_shard) for bucket in own["state"]["buckets"]] == [
            bucket.shard_size for bucket in optimizer.state["buckets"]
        ]
        for name, group in subgroups(rank).items():
            for state_dict in (whole, shards[0], own):
                if state_dict is own and name != "four":
                    continue
                twin, other = made(
                    kind, seed=0 if state_dict is not whole else 1, lr=3.0, process_group=group, **options
                )
                if state_dict is not whole:
                    twin.load_state_dict(net.state_dict())
                other.load_state_dict(state_dict)
                continues(whole, net, other, twin)
        train(net, optimizer, rank, range(STEPS, STEPS + 2))
        train(twin, other, rank, range(STEPS, STEPS + 2))
        assert all(map(torch.equal, net.parameters(), twin.parameters()))
        other.zero_grad()

    return check


def one_ranks_own(rank: int) -> None:
    """What one rank of four has is not enough for one of two, which is then as it was."""
    net, optimizer = made()
    train(net, optimizer, rank, range(1))
    own = optimizer.state_dict(state_dict_format=1, gather_on_root=False)
    _, other = made(process_group=subgroups(rank)["two"])
    before = other.state_dict()
    with pytest.raises(ValueError, match="of one rank among others"):
        other.load_state_dict(own)
    after = other.state_dict()
    assert after["state"]["step"] == 0
    assert torch.equal(after["state"][0]["param"], before["state"][0]["param"])


def distributed_checkpoint(**options: Any) -> Check:
    def check(rank: int) -> None:
        folder = [tempfile.mkdtemp() if rank == 0 else ""]
        dist.broadcast_object_list(folder, 0)
        kind = torch.bfloat16 if options.get("store_param_remainders") else torch.float32
        net, optimizer = made(kind, **options)
        train(net, optimizer, rank)
        dcp.save({"optimizer": optimizer.sharded_state_dict()}, checkpoint_id=Path(folder[0], "sharded"))
        # Every rank wrote what it owns, not all of it.
        files = list(Path(folder[0], "sharded").glob("*.distcp"))
        assert len(files) == 4
        expected = optimizer.state_dict()
        for name, group in subgroups(rank).items():
            twin, other = made(kind, seed=1, lr=3.0, process_group=group, **options)
            if dist.get_process_group_ranks(group)[0] == 0 or name == "one":
                state = {"optimizer": other.sharded_state_dict()}
                alone = {"no_dist": True} if name == "one" else {"process_group": group}
                dcp.load(state, checkpoint_id=Path(folder[0], "sharded"), **alone)
                other.load_sharded_state_dict(state["optimizer"])
                assert all(map(torch.equal, net.parameters(), twin.parameters()))
                found = other.state_dict()
                assert found is not None
                assert found["state"]["step"] == STEPS
                assert found["param_groups"][0]["lr"] == 0.01
            else:
                found = None
            for index in range(len(list(net.parameters())) if found else 0):
                for key, value in expected["state"][index].items():
                    assert torch.equal(found["state"][index][key], value), (name, index, key)

    return check


def grid(rank: int) -> None:
    """State divided among two processes and repeated in two."""
    across = [dist.new_group(ranks) for ranks in ((0, 1), (2, 3))][rank // 2]
    along = [dist.new_group(ranks) for ranks in ((0, 2), (1, 3))][rank % 2]
    groups = {"distributed_process_group": across, "redundant_process_group": along}
    like_one_process(bucket_cap_mb=0.001, **groups)(rank)
    net, optimizer = made(**groups)
    train(net, optimizer, rank)
    saved = [optimizer.state_dict(state_dict_format=1)]
    assert (saved[0] is None) == (rank > 0)
    dist.broadcast_object_list(saved, 0)
    twin, other = made()
    twin.load_state_dict(net.state_dict())
    other.load_state_dict(saved[0])
    continues(optimizer.state_dict(), net, other, twin)
    assert_same_everywhere(list(twin.parameters()))


CHECKS: dict[str, Check] = {
    "plain": like_one_process(),
    "overlap": like_one_process(micros=2, overlap_param_sync=True, bucket_cap_mb=0.001),
    "contiguous": like_one_process(contiguous_param_buffer=True, contiguous_grad_buffer=True, bucket_cap_mb=0.001),
    "overflow": overflow,
    "formats": formats(),
    "formats_remainders": formats(**BF16),
    "one_ranks_own": one_ranks_own,
    "distributed_checkpoint": distributed_checkpoint(),
    "distributed_checkpoint_remainders": distributed_checkpoint(**BF16),
    "grid": grid,
}
