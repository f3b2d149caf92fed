"""Models of a LazyInitContext in several processes: each plugin trains them as models that were built outside."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from apex.booster.plugin import GeminiPlugin, TorchFSDPPlugin
from apex.booster.plugin import torch_fsdp_plugin as fsdp
from apex.lazy import LazyInitContext
from apex.lazy._recorded import LazyTensor
from tests.booster.problem import DEVICE, OPTIMIZERS, STEPS, Net, assert_as_plain, assert_equal, booster, net, train
from tests.parallel.processes import Check, assert_same_everywhere


def lazy_net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    with LazyInitContext(default_device=DEVICE):
        model = Net()
        model.register_buffer("mean", torch.arange(3.0))
    assert all(isinstance(tensor, LazyTensor) for tensor in (*model.parameters(), model.mean))
    return model


def starts_and_trains(make: Any, whole: Any, ended: Any, optimizer: str) -> Check:
    """Return a check that a recorded model starts with the values of the first process, and trains as a plain one."""

    def check(rank: int) -> None:
        with ended():
            started = make()
            model = lazy_net(seed=rank)
            parts = started.boost(model, OPTIMIZERS[optimizer](model), nn.CrossEntropyLoss())
            assert_equal(dict(whole(parts[0])), {**net(0).state_dict(), "mean": torch.arange(3.0)})
            train(started, parts, range(STEPS), rank, dist.get_world_size())
            found = {name: value for name, value in whole(parts[0]).items() if name != "mean"}
            assert_same_everywhere(list(found.values()))
            assert_as_plain(found, optimizer, 1e-4)

    return check


def computes_in_the_first_process_only(rank: int) -> None:
    """Parameters of FSDP2 are computed one by one, whole in the first process, and only parts of them are kept."""
    sizes: list[int] = []
    replay = fsdp.replay

    def counted(tensors: list[LazyTensor]) -> Any:
        sizes.append(len(tensors))
        return replay(tensors)

    fsdp.replay = counted
    try:
        model = lazy_net()
        ignored = TorchFSDPPlugin(ignored_modules=[model.last])
        boosted, *_ = booster(plugin=ignored).boost(model)
    finally:
        fsdp.replay = replay
    params = dict(boosted.unwrap().named_parameters())
    assert sizes == ([1] * len(params) if rank == 0 else [])
    assert torch.equal(params["last.weight"], net().last.weight)
    assert params["first.weight"].to_local().numel() == net().first.weight.numel() // dist.get_world_size()


def is_computed_before_layers_are_replaced(rank: int) -> None:
    """Precisions and arguments that replace layers, and processes with values of their own, start equally too."""
    for plugin in (
        GeminiPlugin(precision="fp32", enable_fused_normalization=True),
        GeminiPlugin(use_fp8=True),
        TorchFSDPPlugin(sync_module_states=False),
    ):
        boosted, *_ = booster(plugin=plugin).boost(lazy_net())
        found = dict(boosted.unwrap().named_parameters())
        for name, value in net().named_parameters():
            assert torch.equal(found[name].full_tensor(), value), (type(plugin), name)


CHECKS: dict[str, Check] = {
    "lazy in the first process": computes_in_the_first_process_only,
    "lazy before layers are replaced": is_computed_before_layers_are_replaced,
}
