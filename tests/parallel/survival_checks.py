"""Problems of long runs, in two processes: drifting replicas, slow ranks, gradients that other code holds."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex import amp, checkpoint
from apex.checkpoint import _background
from apex.optimizers import FusedAdam
from apex.parallel import DistributedDataParallel, ReplicaCheck, check_replicas
from apex.parallel._buckets import _USES_ARE_KNOWN
from tests.parallel.processes import Check, assert_same_everywhere

# Events with periods of 3, 5 and 7 steps, in all combinations.
STEPS, PARTS = 3 * 5 * 7, 2


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def batch(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


def rows_of(step: int, rank: int, part: int) -> int:
    """Return a number of rows from 0 to 4; rank 1 has none in some steps."""
    return 0 if rank == 1 and step % 7 == 0 else (3 * step + 2 * rank + part) % 5


def plain_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def inputs_of(step: int, rank: int, part: int) -> Tensor:
    return batch(rows_of(step, rank, part), 1000 * step + 10 * rank + part).double()


def long_run(**options: Any) -> Check:
    """Every row has the same weight in any process: losses are sums, divided by the rows of all processes."""

    def check(rank: int) -> None:
        model = DistributedDataParallel(plain_net(), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(STEPS):
            if rank == step // 10 % 2 and step % 10 == 0:
                time.sleep(0.02)
            rows = torch.tensor(float(sum(rows_of(step, rank, part) for part in range(PARTS))))
            dist.all_reduce(rows)
            optimizer.zero_grad(set_to_none=step % 3 > 0)
            for part in range(PARTS):
                with contextlib.nullcontext() if part == PARTS - 1 else model.no_sync():
                    sums = model(inputs_of(step, rank, part)).square().sum()
                    (sums * dist.get_world_size() / rows.clamp(min=1)).backward()
            optimizer.step()
        assert_same_everywhere(list(model.parameters()))

        alone = plain_net()
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
        for step in range(STEPS):
            joined = torch.cat([inputs_of(step, other, part) for other in range(2) for part in range(PARTS)])
            optimizer.zero_grad()
            (alone(joined).square().sum() / max(1, len(joined))).backward()
            optimizer.step()
        for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(found, expected)

    return check


def trained(rank: int) -> tuple[nn.Module, Any]:
    net = small()
    net, optimizer = amp.initialize(net, FusedAdam(net.parameters()), opt_level="O2", verbosity=0)
    model = DistributedDataParallel(net)
    for step in range(2):
        optimizer.zero_grad()
        with amp.scale_loss(model(batch(3, step)).float().square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    return model, optimizer


def replicas_are_named(rank: int) -> None:
    def with_one_bit(tensor: Tensor) -> None:
        bits = tensor.detach().reshape(-1).view(torch.int16 if tensor.dtype == torch.float16 else torch.int32)
        bits[-1] ^= 1

    def change_a_parameter(model: Any, optimizer: Any) -> None:
        with_one_bit(model.module[3].weight)

    def change_a_buffer(model: Any, optimizer: Any) -> None:
        model.module[1].running_var[0] += 1

    def change_a_master(model: Any, optimizer: Any) -> None:
        with_one_bit(next(iter(amp.master_params(optimizer))))

    def change_a_scale(model: Any, optimizer: Any) -> None:
        amp._amp_state.loss_scalers[0]._loss_scale *= 2

    def change_a_state(model: Any, optimizer: Any) -> None:
        with_one_bit(optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"])

    def change_an_option(model: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 2

    def swap_two_elements(model: Any, optimizer: Any) -> None:
        weight = model.module[0].weight.detach()
        weight[0, :2] = weight[0, :2].flip(0)

    cases: list[tuple[Callable[[Any, Any], None], str]] = [
        (change_a_parameter, "parameter 3.weight"),
        (change_a_buffer, "buffer 1.running_var"),
        (change_a_master, "master of parameter 0.weight"),
        (change_a_scale, "loss scale 0"),
        (change_a_state, "state exp_avg of parameter 0.weight"),
        (change_an_option, "option lr of group 0"),
        (swap_two_elements, "parameter 0.weight"),
    ]
    for change, name in cases:
        model, optimizer = trained(rank)
        check_replicas(model, optimizer)
        if rank == 1:
            change(model, optimizer)
        with pytest.raises(
            RuntimeError, match=rf"differ in 1 of \d+ things: {name} \(rank 1 differs from the others\)"
        ):
            check_replicas(model, optimizer)
        amp.shutdown()


def replicas_of_other_kinds(rank: int) -> None:
    net = nn.Linear(3, 2)
    net.register_buffer("flags", torch.tensor([True, rank == 0]))
    net.register_buffer("nothing", torch.empty(0))
    net.register_buffer("phase", torch.full((1,), 1j * rank))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0 + rank)
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match=r"buffer flags .*; buffer phase .*; scale of the scaler"):
        check_replicas(net, scaler=scaler)
    # Equal numbers, which in one process do not start at the beginning of their memory.
    placed = nn.Module()
    placed.register_buffer("values", torch.arange(8.0) if rank == 0 else torch.arange(-1.0, 8.0)[1:])
    check_replicas(placed)
    optimizer = torch.optim.Adam(net.parameters())
    if rank == 1:
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"not all have state exp_avg of parameter weight torch.float32"):
        check_replicas(net, optimizer)


def replicas_in_a_loop(rank: int) -> None:
    net = small()
    check = ReplicaCheck(net, every=3)
    for step in range(9):
        if step == 4 and rank == 1:
            net[0].bias.data += 1
        with pytest.raises(RuntimeError, match=r"parameter 0.bias") if step == 6 else contextlib.nullcontext():
            check()
    with pytest.raises(ValueError, match="every must be at least 1"):
        ReplicaCheck(net, every=0)


def silence_is_an_error(rank: int) -> None:
    groups = [dist.new_group(timeout=timedelta(seconds=1)) for _ in range(2)]
    model = DistributedDataParallel(
        small(), message_size=20, num_allreduce_streams=2, allreduce_communicators=(groups, None)
    )
    model(batch(3, 0)).sum().backward()
    if rank == 0:
        before = [param.detach().clone() for param in model.parameters()]
        with pytest.raises(RuntimeError, match=r"rank 0 of 2: .* failed") as failure:
            model(batch(3, 0)).sum().backward()
        assert "gradient" in str(failure.value)
        assert "last checkpoint" in str(failure.value)
        assert all(map(torch.equal, before, model.parameters()))


def gradients_live_in_buckets(rank: int) -> None:
    """Gradients stay in the same memory in every pass, and each bucket's are contiguous."""
    model = DistributedDataParallel(small(), message_size=30)
    addresses = []
    for step in range(4):
        model.zero_grad()
        model(batch(3, step)).sum().backward()
        addresses.append([param.grad.data_ptr() for param in model.parameters()])
        owners = {param.grad.untyped_storage().data_ptr() for param in model.parameters()}
        if not _USES_ARE_KNOWN:  # PyTorch 2.6 for a CPU cannot tell, and gradients stay where they are
            assert len(owners) == len(addresses[-1])
            continue
        assert len(owners) == model.num_buckets
        assert all(address % 16 == 0 for address in addresses[-1])
        for param in model.parameters():
            assert param.grad.stride() == param.stride()
    assert not _USES_ARE_KNOWN or addresses[1] == addresses[2] == addresses[3]


def gradients_that_others_hold_stay(rank: int) -> None:
    model = DistributedDataParallel(small(), message_size=30)
    for look in (lambda grad: grad, lambda grad: grad.view(-1), lambda grad: grad.detach()):
        held, copies = [], []
        for step in range(4):
            model.zero_grad()
            model(batch(3, 10 * rank + step)).sum().backward()
            held.append([look(param.grad) for param in model.parameters()])
            copies.append([tensor.clone() for tensor in held[-1]])
        for tensors, expected in zip(held, copies, strict=True):
            assert all(map(torch.equal, tensors, expected))


def gradients_of_a_users_buffer_are_written_in_place(rank: int) -> None:
    net = small()
    own = torch.zeros(sum(param.numel() for param in net.parameters()))
    parts = own.split([param.numel() for param in net.parameters()])
    for param, part in zip(net.parameters(), parts, strict=True):
        param.grad = part.view_as(param)
    model = DistributedDataParallel(net, message_size=30)
    other = DistributedDataParallel(small(), message_size=30)
    for step in range(3):
        own.zero_()
        other.zero_grad()
        for each in (model, other):
            each(batch(3, 10 * rank + step)).square().sum().backward()
        assert torch.equal(own, torch.cat([param.grad.reshape(-1) for param in other.parameters()]))


def hooks_come_before_the_reduction(rank: int) -> None:
    """Hooks, also those registered after wrapping, see and change this process's own gradient."""
    net = nn.Linear(200, 100, bias=False)  # large enough to move to its bucket as it arrives
    model = DistributedDataParallel(net)
    seen: list[Tensor] = []

    def triple(param: Tensor) -> None:
        seen.append(param.grad.clone())
        param.grad = param.grad * 3

    for step in range(4):
        if step == 1:
            net.weight.register_post_accumulate_grad_hook(triple)
        inputs = [torch.full((1, 200), float(step + each + 1)) for each in range(2)]
        model.zero_grad()
        model(inputs[rank]).sum().backward()
        mean = (inputs[0] + inputs[1]) / 2
        assert torch.equal(net.weight.grad, ((3 if step else 1) * mean).expand(100, 200))
        if step:
            assert torch.equal(seen[-1], inputs[rank].expand(100, 200))


def other_shapes_are_named(rank: int) -> None:
    named = r"parameter 1.weight has shape \(5, 8\) and a gradient of shape {}, but its bucket was made for shape {}"
    for passes in range(3):  # buckets are made at the end of the first
        net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2, bias=False))
        model = DistributedDataParallel(net)
        for _ in range(passes):
            model(batch(3, 0)).sum().backward()
            model.zero_grad()
        loss = model(batch(3, 0)).sum()
        net[1].weight.data = torch.ones(5, 8)
        with pytest.raises(RuntimeError, match=named.format(r"\(2, 8\)", r"\(2, 8\)" if passes else r"\(5, 8\)")):
            loss.backward()
        del loss
        model.zero_grad()
        if passes:
            with pytest.raises(RuntimeError, match=named.format(r"\(5, 8\)", r"\(2, 8\)")):
                model(batch(3, 0)).sum().backward()
            model.zero_grad()
        model = DistributedDataParallel(net)
        model(batch(3, 0)).sum().backward()
        assert net[1].weight.grad.shape == (5, 8)


def gradients_with_a_graph_keep_it(rank: int) -> None:
    model = DistributedDataParallel(plain_net())
    for step in range(2):
        model.zero_grad()
        model(batch(3, step).double()).square().sum().backward(create_graph=True)
        weight = model.module[0].weight
        assert weight.grad.requires_grad
        torch.autograd.grad(weight.grad.sum(), weight)


def checkpoints(rank: int) -> None:
    series = checkpoint.Series(Path("run"), keep=2)
    for step in range(3):
        path = series.save({"step": step, "rank": rank}, step, wait=True)
        assert path.exists()
    assert series.load() == {"step": 2, "rank": 0}
    dist.barrier()
    if rank == 1:
        path.write_bytes(b"")
    dist.barrier()
    assert series.load() == {"step": 1, "rank": 0}
    with pytest.raises(RuntimeError, match="could not be written; rank 0 had"):
        checkpoint.save({"function": lambda: None}, "x.pt", wait=True)

    def may_not_be_read(*_: object) -> None:
        raise PermissionError(f"not for rank {rank}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "iterdir", may_not_be_read)
        with pytest.raises(PermissionError, match="not for rank 0"):
            series.latest()


def sharded_checkpoints(rank: int) -> None:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    series = checkpoint.Series(Path("sharded"), sharded=True)
    whole = torch.arange(10.0)
    series.save({"weights": distribute_tensor(whole, mesh, [Shard(0)]), "step": 5}, 5)
    path = series.latest()
    assert path == series.path_of(5)
    state = {"weights": distribute_tensor(torch.zeros(10), mesh, [Shard(0)]), "step": 0}
    checkpoint.load_sharded(state, path)
    assert isinstance(state["weights"], DTensor)
    assert torch.equal(state["weights"].full_tensor(), whole)
    assert state["step"] == 5
    dist.barrier()
    if rank == 1:
        (path / "__1_0.distcp").write_bytes(b"")
    dist.barrier()
    with pytest.raises(checkpoint.DamagedCheckpoint, match=r"__1_0.distcp"):
        checkpoint.load_sharded(state, path)
    assert series.latest() is None
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint .*nothing"):
        checkpoint.load_sharded(state, "nothing")


def asynchronous_checkpoints(rank: int) -> None:
    """Sharded tensors are saved as at the time of the call; all ranks learn of an error or a writer that ended."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    series = checkpoint.Series(Path("asynchronous"), keep=2, sharded=True)

    def state_of(number: float) -> dict[str, Any]:
        return {"weights": distribute_tensor(torch.full((10,), number), mesh, [Shard(0)]), "step": number}

    def check(number: float) -> None:
        found = state_of(0.0)
        path = series.latest()
        assert path is not None
        checkpoint.load_sharded(found, path)
        assert isinstance(found["weights"], DTensor)
        assert found["weights"].full_tensor().tolist() == [number] * 10
        assert found["step"] == number

    for number in (1.0, 2.0, 3.0):
        state = state_of(number)
        series.save(state, int(number), use_async=True)
        state["weights"].zero_()
    check(3.0)
    assert {path.name for path in series.folder.iterdir()} == {"step-00000002", "step-00000003"}
    with pytest.raises(RuntimeError, match=r"could not be written; rank 1 had .*local object"):
        series.save({**state_of(4.0), **({"function": lambda: None} if rank == 1 else {})}, 4, use_async=True)
    writer: Any = _background._writer_of_process
    if rank == 1:
        writer._process.kill()
    series.save(state_of(5.0), 5, use_async=True)
    with pytest.raises(RuntimeError, match=r"step-00000005 could not be written; (the process|rank 0 had)"):
        checkpoint.wait()
    check(3.0)
    series.save(state_of(6.0), 6, use_async=True)
    check(6.0)
    assert _background._writer_of_process is not writer


def sharded_saves_that_fail(rank: int) -> None:
    """If one rank fails, all raise its error, the old checkpoint stays, and no other files remain."""
    path = Path("failing") / "checkpoint"
    checkpoint.save_sharded({"mine": torch.ones(3), "step": 1}, path)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for failing, name in ((1, "apex.checkpoint._sharded.size_and_checksum"), (0, "torch.save"), (0, "json.dump")):
        with pytest.MonkeyPatch.context() as patch:
            if rank == failing:
                patch.setattr(name, full)
            message = rf"checkpoint could not be written; rank {failing} had OSError: .*No space left"
            with pytest.raises(OSError, match=message) as failure:
                checkpoint.save_sharded({f"of rank {rank}": torch.ones(3), "step": 2}, path)
        assert failure.value.errno == errno.ENOSPC
        dist.barrier()
        assert [each.name for each in path.parent.iterdir()] == [path.name]
        state = {"step": 0}
        checkpoint.load_sharded(state, path)
        assert state["step"] == 1
        with pytest.raises(RuntimeError, match=r"checkpoint could not be loaded; rank 1 had .*other"):
            checkpoint.load_sharded({"step": 0, **({"other": torch.ones(2)} if rank == 1 else {})}, path)


CHECKS: dict[str, Check] = {
    "long_run": long_run(message_size=40),
    "long_run_retained": long_run(retain_allreduce_buffers=True),
    **{
        check.__name__: check
        for check in (
            replicas_are_named,
            replicas_of_other_kinds,
            replicas_in_a_loop,
            gradients_live_in_buckets,
            gradients_that_others_hold_stay,
            gradients_of_a_users_buffer_are_written_in_place,
            hooks_come_before_the_reduction,
            other_shapes_are_named,
            gradients_with_a_graph_keep_it,
            checkpoints,
            sharded_checkpoints,
            asynchronous_checkpoints,
            sharded_saves_that_fail,
            silence_is_an_error,
        )
    },
}
