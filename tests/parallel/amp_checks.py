"""amp in two processes: overflow in one is overflow in all, and `combine_ddp` gives the same results as DDP."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex import amp
from apex.optimizers import FusedAdam, FusedLAMB, FusedSGD
from apex.parallel import LARC, DistributedDataParallel, Reducer
from tests.amp.common import quiet
from tests.parallel.processes import Check, assert_same_everywhere, everywhere

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.05, momentum=0.9),
    "FusedSGD, scaled": lambda params: FusedSGD(params, lr=0.05, momentum=0.9, materialize_master_grads=False),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=0.01),
    "LARC": lambda params: LARC(torch.optim.SGD(params, lr=0.05)),
}


class Net(nn.Module):
    """Layers of which a call may skip the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor, uses_last: bool = True) -> Tensor:
        x = self.norm(self.first(x)).tanh()
        return self.last(x) if uses_last else x


def loss_of(model: nn.Module, seed: int, factor: float = 1.0, **arguments: Any) -> Tensor:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
    return model(x, **arguments).float().square().mean() * factor


def scale() -> float:
    return amp.state_dict()["loss_scaler0"]["loss_scale"]


def assert_all_alike(model: nn.Module, optimizer: Any) -> None:
    assert_same_everywhere(list(model.parameters()))
    assert_same_everywhere(list(amp.master_params(optimizer)))
    assert_same_everywhere([torch.tensor(list(amp.state_dict()["loss_scaler0"].values()))])


def overflow(level: str, kind: str, combined: bool, **ddp: Any) -> Check:
    """One rank overflows: no rank steps, all halve their scale."""

    def check(rank: int) -> None:
        net = Net()
        options = {"combine_ddp": True} if combined else {}
        net, optimizer = quiet(net, OPTIMIZERS[kind](net.parameters()), opt_level=level, scale_window=3, **options)
        model = net if combined else DistributedDataParallel(net, **ddp)
        expected = 2.0**16
        clean = 0
        for step in range(8):
            culprit = {1: 0, 4: 1}.get(step)
            optimizer.zero_grad()
            before = [param.detach().clone() for param in net.parameters()]
            with amp.scale_loss(
                loss_of(model, 10 * step + rank, torch.inf if rank == culprit else 1.0), optimizer
            ) as scaled:
                scaled.backward()
            optimizer.step()
            changed = [not torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True)]
            assert any(changed) == (culprit is None)
            clean = 0 if culprit is not None else clean + 1
            expected *= 0.5 if culprit is not None else 2.0 if clean % 3 == 0 else 1.0
            assert scale() == expected
            assert_all_alike(net, optimizer)
        amp.shutdown()

    return check


def accumulation(level: str, kind: str, combined: bool, silent: bool) -> Check:
    """Two backward passes before a step, the first with `delay_unscale`; an overflow in either, in one rank."""

    def check(rank: int) -> None:
        net = Net()
        options = {"combine_ddp": True} if combined else {}
        net, optimizer = quiet(net, OPTIMIZERS[kind](net.parameters()), opt_level=level, **options)
        model = net if combined else DistributedDataParallel(net, message_size=1)
        expected = 2.0**16
        for step, culprit in enumerate([None, (0, 1), None, (1, 0), (1, 1), None]):
            optimizer.zero_grad()
            before = [param.detach().clone() for param in net.parameters()]
            for part in range(2):
                waits = model.no_sync() if silent and part == 0 else contextlib.nullcontext()
                factor = torch.inf if culprit == (rank, part) else 1.0
                with (
                    waits,
                    amp.scale_loss(
                        loss_of(model, 10 * step + 2 * rank + part, factor), optimizer, delay_unscale=part == 0
                    ) as scaled,
                ):
                    scaled.backward()
            optimizer.step()
            expected *= 1.0 if culprit is None else 0.5
            assert scale() == expected
            changed = [not torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True)]
            assert any(changed) == (culprit is None)
            assert_all_alike(net, optimizer)
        amp.shutdown()

    return check


def local_gradients_are_not_unscaled(rank: int) -> None:
    """Gradients that one process has for itself are kept scaled, or refused: the processes' weights drifted apart."""
    for level in ("O1", "O2"):
        net = Net()
        net, optimizer = quiet(net, OPTIMIZERS["SGD"](net.parameters()), opt_level=level)
        model = DistributedDataParallel(net)
        for is_outside in (True, False):
            outer, inner = (model.no_sync(), contextlib.nullcontext())[:: 1 if is_outside else -1]
            scaling = amp.scale_loss(loss_of(model, rank), optimizer)
            refusal = pytest.raises(RuntimeError, match=r"give delay_unscale=True to passes inside of no_sync\(\)")
            with refusal, outer, scaling as scaled, inner:
                scaled.backward()
            optimizer.zero_grad()
        wrapped = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)  # its forward pass decides
        with (
            pytest.raises(RuntimeError, match="give delay_unscale=True"),
            wrapped.no_sync(),
            amp.scale_loss(loss_of(wrapped, rank), optimizer) as scaled,
        ):
            scaled.backward()
        optimizer.zero_grad()
        with wrapped.no_sync(), amp.scale_loss(loss_of(wrapped, rank), optimizer, delay_unscale=True) as scaled:
            scaled.backward()
        with amp.scale_loss(loss_of(wrapped, rank), optimizer) as scaled, wrapped.no_sync():
            with torch.no_grad():
                loss_of(wrapped, rank)
            scaled.backward()
        assert_same_everywhere([param.grad for param in amp.master_params(optimizer)])
        other = Net()
        other, others = quiet(other, OPTIMIZERS["SGD"](other.parameters()), opt_level=level)
        with amp.scale_loss(loss_of(other, rank), others) as scaled:  # a model without a wrapper
            scaled.backward()
        amp.shutdown()


def trained(rank: int, level: str, kind: str, parts: int | None, **options: Any) -> list[Tensor]:
    """Return the parameters after accumulation, overflow and steps that skip a layer in one rank or in all."""
    torch.manual_seed(0)
    net = Net()
    if parts is not None:
        options.update(combine_ddp=True, ddp_replica_count=parts)
    net, optimizer = quiet(net, OPTIMIZERS[kind](net.parameters()), opt_level=level, **options)
    model = net if parts is not None else DistributedDataParallel(net)
    for step, uses in enumerate([(True, True), (True, False), (False, False), (True, True), (False, True)]):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for part in range(1 + step % 3):
            factor = torch.inf if (step, part, rank) == (3, 0, 1) and level != "O5" else 1.0
            loss = loss_of(model, 100 * step + 10 * part + rank, factor, uses_last=uses[rank])
            delays = step == 2 and part == 0
            # Gradients that are not unscaled are not reduced either: in half precision, reducing them twice rounds them
            # twice.
            waits = model.no_sync() if delays and parts is None else contextlib.nullcontext()
            with waits, amp.scale_loss(loss, optimizer, delay_unscale=delays) as scaled:
                scaled.backward()
        optimizer.step()
    assert_all_alike(net, optimizer)
    found = [param.detach().clone() for param in net.parameters()]
    amp.shutdown()
    return found


def combined_as_wrapped(level: str, kind: str, *parts: int) -> Check:
    def check(rank: int) -> None:
        expected = trained(rank, level, kind, None)
        for count in parts:
            for found, wanted in zip(trained(rank, level, kind, count), expected, strict=True):
                assert torch.equal(found, wanted)

    return check


def combined_is_sent_in_parts(rank: int) -> None:
    net = Net()
    net, optimizer = quiet(
        net, OPTIMIZERS["SGD"](net.parameters()), opt_level="O2", combine_ddp=True, ddp_replica_count=3
    )
    Reducer(net)
    sent: list[tuple[torch.dtype, int]] = []
    real = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append((tensor.dtype, tensor.numel()))
        return real(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        with amp.scale_loss(loss_of(net, rank), optimizer) as scaled:
            scaled.backward()
    finally:
        dist.all_reduce = real
    # 92 elements in float16, 16 in float32, and one flag for each of six parameters.
    assert sent == [
        *[(torch.float16, 32), (torch.float16, 32), (torch.float16, 32)],
        *[(torch.float32, 6), (torch.float32, 6), (torch.float32, 4)],
        (torch.uint8, 6),
    ]
    amp.shutdown()


def combined_can_be_switched_off(rank: int) -> None:
    """An optimizer whose parameters differ between processes can be excluded."""
    net, other = Net(), nn.Linear(6, 2 + rank)
    (net, other), (optimizer, own) = quiet(
        [net, other],
        [OPTIMIZERS["SGD"](net.parameters()), OPTIMIZERS["SGD"](other.parameters())],
        opt_level="O1",
        combine_ddp=True,
    )
    own.combine_ddp = False
    for step in range(2):
        optimizer.zero_grad()
        own.zero_grad()
        loss = loss_of(net, 10 * step + rank) + loss_of(other, 10 * step + rank)
        with amp.scale_loss(loss, [optimizer, own]) as scaled:
            scaled.backward()
        optimizer.step()
        own.step()
        assert_same_everywhere(list(net.parameters()))
    own.combine_ddp = True
    with (
        pytest.raises(RuntimeError, match=r"rank 0 and rank 1 differ.*optimizer\.combine_ddp = False"),
        amp.scale_loss(loss_of(other, rank), own) as scaled,
    ):
        scaled.backward()
    amp.shutdown()
    assert not hasattr(optimizer, "combine_ddp")


def masters_come_from_the_first_rank(rank: int) -> None:
    for wrap in (DistributedDataParallel, Reducer):
        torch.manual_seed(rank)
        net = Net()
        exact = everywhere(net.first.weight)[0]
        net, optimizer = quiet(net, OPTIMIZERS["SGD"](net.parameters()), opt_level="O2", loss_scale=1.0)
        wrap(net)
        masters = list(amp.master_params(optimizer))
        assert_same_everywhere(masters)
        assert torch.equal(masters[0], exact)
        optimizer.step()
        assert_same_everywhere(list(net.parameters()))
        amp.shutdown()


def checkpoint_of_the_first_rank(rank: int) -> None:
    """Rank 0 alone loads it before wrapping, into a layer that is frozen at first.

    Master weights are equal everywhere.
    """
    for wrap in (DistributedDataParallel, Reducer):
        torch.manual_seed(rank)
        net, trained = Net(), Net()
        exact = everywhere(trained.first.weight)[0]
        net.first.requires_grad_(False)
        net, optimizer = quiet(net, OPTIMIZERS["FusedAdam"](net.parameters()), opt_level="O2", loss_scale=1.0)
        if rank == 0:
            net.load_state_dict(trained.state_dict())
        model = wrap(net)
        net.first.requires_grad_(True)
        with amp.scale_loss(loss_of(net if wrap is Reducer else model, rank), optimizer) as scaled:
            scaled.backward()
        assert torch.equal(next(amp.master_params(optimizer)), exact)
        assert_same_everywhere(list(amp.master_params(optimizer)))
        amp.shutdown()


def amp_wants_to_be_first(rank: int) -> None:
    model = DistributedDataParallel(Net())
    with pytest.raises(RuntimeError, match="wrapped in DistributedDataParallel already"):
        quiet(model, OPTIMIZERS["SGD"](model.parameters()))
    local = everywhere(torch.tensor([float(rank)]))
    assert [each.item() for each in local] == [0.0, 1.0]


def _sharded_model(dtype: torch.dtype | None = None) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    return fully_shard(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), mesh=mesh, mp_policy=policy)


def sharded(rank: int) -> None:
    """Models of fully_shard train like in float32, with the loss scales of one process that sees every overflow."""
    losses: dict[str, list[float]] = {}
    for level, dtype in (("O0", None), ("O1", None), ("O4", None), ("O2", torch.float16), ("O5", torch.bfloat16)):
        for make in (FusedAdam, torch.optim.Adam):
            name = f"{level} {make.__name__}"
            model = _sharded_model(dtype)
            options = {} if level == "O0" else {"loss_scale": "dynamic"}
            model, optimizer = quiet(model, make(model.parameters(), lr=0.01), opt_level=level, **options)
            assert {param.dtype for param in model.parameters()} == {torch.float32}
            losses[name], scales = [], []
            for step in range(5):
                optimizer.zero_grad()
                before = [param.full_tensor().clone() for param in model.parameters()]
                loss = loss_of(model, 2 * step + rank)
                with amp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                    if step == 2 and rank == dist.get_world_size() - 1 and level != "O0":
                        model[0].weight.grad._local_tensor[0, 0] = torch.inf  # in the shard of one process
                optimizer.step()
                after = [param.full_tensor() for param in model.parameters()]
                assert any(not torch.equal(*pair) for pair in zip(before, after, strict=True)) == (
                    step != 2 or level == "O0"
                ), (name, step)
                losses[name].append(loss.item())
                scales.append(amp.state_dict()["loss_scaler0"]["loss_scale"])
            assert scales == ([1.0] * 5 if level == "O0" else [2.0**16] * 2 + [2.0**15] * 3), name
            amp.shutdown()
    for name, found in losses.items():
        assert found[:3] == pytest.approx(losses["O0 FusedAdam"][:3], rel=0.02), name


def sharded_refusals(rank: int) -> None:
    """A refused call leaves model and optimizer as they were, and the error names the remedy."""
    policy = r"mp_policy=MixedPrecisionPolicy\(param_dtype=torch.{}\)"
    for options, message in (
        ({"opt_level": "O2"}, policy.format("float16")),
        ({"opt_level": "O5"}, policy.format("bfloat16")),
        ({"opt_level": "O3"}, "use opt_level='O2' or 'O5'"),
        ({"opt_level": "O4", "combine_grad": True}, "combine_grad"),
    ):
        model = _sharded_model()
        optimizer = FusedAdam(model.parameters(), lr=0.01)
        kind = type(model)
        with pytest.raises(RuntimeError, match=rf"parameter 0.weight is sharded .*{message}"):
            quiet(model, optimizer, **options)
        assert type(model) is kind
        assert {param.dtype for param in model.parameters()} == {torch.float32}
        assert not hasattr(optimizer, "_amp_stash")
        loss_of(model, 0).backward()
        optimizer.step()


def other_settings_are_an_error(rank: int) -> None:
    """The first backward pass raises in both ranks for any difference; parameters stay unchanged."""
    for mine, other, message in (
        ({"opt_level": "O1"}, {"opt_level": "O0"}, r"opt_level of amp.initialize is O1 in rank 0 and O0 in rank 1"),
        ({"loss_scale": 8.0}, {"loss_scale": 16.0}, r"loss scale 0 is 8.0 in rank 0 and 16.0 in rank 1"),
        ({"lr": 0.25}, {"lr": 0.5}, r"lr of parameter group 0 of optimizer 0 is 0.25 in rank 0 and 0.5 in rank 1"),
    ):
        options = {"opt_level": "O1", "lr": 0.1, **(other if rank else mine)}
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=options.pop("lr"))
        model, optimizer = quiet(net, optimizer, **options)
        model = DistributedDataParallel(model)
        with (
            pytest.raises(RuntimeError, match=f"settings of amp of rank 0 and rank 1 differ: .*{message}"),
            amp.scale_loss(loss_of(model, rank), optimizer) as scaled,
        ):
            scaled.backward()
        amp.shutdown()


CHECKS: dict[str, Check] = {
    # PyTorch 2.6 has no FSDP2 for a CPU.
    **({"sharded": sharded, "sharded_refusals": sharded_refusals} if torch.__version__ >= "2.7" else {}),
    "overflow_O1": overflow("O1", "SGD", False),
    "overflow_O2": overflow("O2", "SGD", False),
    "overflow_O2_fused": overflow("O2", "FusedAdam", False, message_size=1),
    "overflow_O2_fused_sgd": overflow("O2", "FusedSGD, scaled", False, retain_allreduce_buffers=True),
    "overflow_O1_lamb": overflow("O1", "FusedLAMB", False, delay_allreduce=True),
    "overflow_O2_larc": overflow("O2", "LARC", False, allreduce_always_fp32=True),
    "overflow_O1_combined": overflow("O1", "FusedSGD", True),
    "overflow_O2_combined": overflow("O2", "SGD", True),
    "accumulation_O1": accumulation("O1", "SGD", False, False),
    "accumulation_O2": accumulation("O2", "FusedAdam", False, False),
    "accumulation_O1_no_sync": accumulation("O1", "FusedAdam", False, True),
    "accumulation_O2_no_sync": accumulation("O2", "SGD", False, True),
    "accumulation_O2_combined": accumulation("O2", "FusedAdam", True, False),
    "local_gradients_are_not_unscaled": local_gradients_are_not_unscaled,
    "combined_O1": combined_as_wrapped("O1", "FusedAdam", 1),
    "combined_O2": combined_as_wrapped("O2", "SGD", 1, 3, 1000),
    "combined_O2_fused": combined_as_wrapped("O2", "FusedSGD", 3),
    "combined_O5": combined_as_wrapped("O5", "FusedAdam", 1000),
    "combined_is_sent_in_parts": combined_is_sent_in_parts,
    "combined_can_be_switched_off": combined_can_be_switched_off,
    "checkpoint_of_the_first_rank": checkpoint_of_the_first_rank,
    "masters_come_from_the_first_rank": masters_come_from_the_first_rank,
    "amp_wants_to_be_first": amp_wants_to_be_first,
    "other_settings_are_an_error": other_settings_are_an_error,
}
