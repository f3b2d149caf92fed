"""DistributedDataParallel on a GPU: one process, NCCL, and user-provided streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex import amp
from apex._distributed.comparison import checksum
from apex.optimizers import FusedAdam
from apex.parallel import DistributedDataParallel, Reducer, check_replicas

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    amp.shutdown()
    torch.distributed.destroy_process_group()


def trained(wrap: Any, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 64)).cuda()
    net, optimizer = amp.initialize(
        net, FusedAdam(net.parameters(), lr=1e-3), opt_level="O2", dynamic_init_scale=128.0, verbosity=0, **options
    )
    model = wrap(net)
    for step in range(6):
        optimizer.zero_grad()
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).cuda()
        with amp.scale_loss(model(inputs).float().square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    found = [param.detach().clone() for param in net.parameters()]
    amp.shutdown()
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"message_size": 1},
        {"delay_allreduce": True},
        {"retain_allreduce_buffers": True, "message_size": 20000},
        {"allreduce_always_fp32": True, "gradient_predivide_factor": 2.0},
        {"num_allreduce_streams": 2, "message_size": 20000},
        {"num_allreduce_streams": 2, "message_size": 1, "communicators": True},
        {"prof": True},
    ],
    ids=str,
)
def test_one_process_changes_no_gradient(options: dict[str, Any]) -> None:
    arguments = dict(options)
    if arguments.pop("communicators", False):
        groups = [torch.distributed.new_group() for _ in range(2)]
        arguments["allreduce_communicators"] = groups, [torch.cuda.Stream() for _ in range(2)]
    expected = trained(lambda net: net)
    found = trained(lambda net: DistributedDataParallel(net, **arguments))
    assert all(map(torch.equal, found, expected))


def test_combined() -> None:
    def wrap(net: nn.Module) -> nn.Module:
        Reducer(net)
        return net

    assert all(map(torch.equal, trained(wrap, combine_ddp=True), trained(lambda net: net)))


def test_a_step_does_not_wait_for_the_device() -> None:
    """This holds if every parameter has a gradient."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda(), message_size=1)
    inputs = torch.randn(4, 64, device="cuda")
    for _ in range(2):
        model(inputs).sum().backward()
    net = nn.Linear(64, 64).cuda()
    net, optimizer = amp.initialize(net, FusedAdam(net.parameters()), opt_level="O2", combine_ddp=True, verbosity=0)
    with amp.scale_loss(net(inputs).sum(), optimizer) as scaled:
        scaled.backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.zero_grad()
        model(inputs).sum().backward()
        with amp.scale_loss(net(inputs).sum(), optimizer) as scaled:
            scaled.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(param.grad is not None for param in (*model.parameters(), *net.parameters()))


def test_gradients_live_in_buckets() -> None:
    """Gradients stay in the same memory in every pass, unless other code refers to it."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3)).cuda(), message_size=4000)

    def gradients(seed: int) -> list[Any]:
        model.zero_grad()
        inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)).cuda()
        model(inputs).square().sum().backward()
        return [param.grad for param in model.parameters()]

    def addresses(seed: int) -> list[int]:
        return [gradient.data_ptr() for gradient in gradients(seed)]

    addresses(0)
    assert addresses(1) == addresses(2)
    held = gradients(3)
    values = [gradient.clone() for gradient in held]
    new = gradients(4)
    assert not {gradient.data_ptr() for gradient in new} & {gradient.data_ptr() for gradient in held}
    assert all(map(torch.equal, held, values))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3)).cuda()
    net.load_state_dict(model.module.state_dict())
    net(torch.randn(4, 64, generator=torch.Generator().manual_seed(4)).cuda()).square().sum().backward()
    expected: list[Any] = [param.grad for param in net.parameters()]
    assert all(map(torch.equal, new, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.int64], ids=str)
def test_checksums_equal_the_hosts(dtype: torch.dtype) -> None:
    for size in (0, 1, 3, 1000, (1 << 22) + 5):
        tensor = torch.randint(0, 2 if dtype == torch.bool else 100, (size,)).to(dtype)
        assert checksum(tensor.cuda()).item() == checksum(tensor).item()


def test_replicas() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).cuda()
    net, optimizer = amp.initialize(net, FusedAdam(net.parameters()), opt_level="O2", verbosity=0)
    with amp.scale_loss(net(torch.randn(4, 64, device="cuda")).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    check_replicas(net, optimizer)
