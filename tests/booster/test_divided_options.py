"""Options of an optimizer that ZeRO divides: each acts as without ZeRO, or is refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex.booster import Booster
from apex.booster._zero import load_plain_state, zero_optimizer
from apex.booster.plugin import GeminiPlugin, TorchFSDPPlugin
from apex.optimizers import FusedAdam, FusedSGD, OffloadedOptimizer
from apex.optimizers.fused_adam import AdamOptions
from apex.optimizers.fused_sgd import SGDOptions
from tests.parallel.processes import needs_fsdp_on_a_cpu

# Values of options that change the numbers of an update: ZeRO must compute the same ones.
ACTING: dict[str, Any] = {
    "lr": 0.1,
    "bias_correction": False,
    "betas": (0.5, 0.6),
    "eps": 0.1,
    "adam_w_mode": False,
    "weight_decay": 0.3,
    "amsgrad": True,
    "momentum": 0.8,
    "dampening": 0.4,
    "nesterov": True,
    "wd_after_momentum": True,
    "decoupled_weight_decay": True,
    "cautious_weight_decay": True,
    "state_format": "int8",
}
# Options without which another one has no effect on the numbers.
NEEDED: dict[str, dict[str, Any]] = {
    "adam_w_mode": {"weight_decay": 0.3},
    "amsgrad": {"betas": (0.5, 0.5)},
    "decoupled_weight_decay": {"weight_decay": 0.3},
    "wd_after_momentum": {"weight_decay": 0.3},
    "cautious_weight_decay": {"weight_decay": 0.3},
}
# Values that ZeRO refuses.
REFUSED: dict[str, Any] = {
    "maximize": True,
    "differentiable": True,
    "stochastic_rounding": True,
    "master_bits": 24,
}
# Options that say how an update runs, not which numbers it computes. ZeRO keeps float32 weights by itself, and refuses
# to be captured in a CUDA graph.
WITHOUT_NUMBERS = {
    *("params", "foreach", "fused", "capturable", "set_grad_none", "master_weights", "materialize_master_grads"),
}
KINDS: list[Any] = [FusedAdam, FusedSGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD]


KEYWORDS = {FusedAdam: AdamOptions, FusedSGD: SGDOptions}


def options_of(kind: type) -> list[str]:
    """Return the names of an optimizer's options, with those of its annotated `**options`."""
    names = [name for name in inspect.signature(kind).parameters if name != "options"]
    return names + sorted(KEYWORDS[kind].__annotations__ if kind in KEYWORDS else ())


CASES = [(kind, name) for kind in KINDS for name in options_of(kind) if name not in WITHOUT_NUMBERS]


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(kind: Any, divides: bool, **options: Any) -> Tensor:
    """Return a parameter after some steps; its gradients change their signs."""
    param = nn.Parameter(torch.linspace(-1, 1, 1000))
    optimizer = kind([param], **{"lr": 0.01, **({"momentum": 0.9} if "SGD" in kind.__name__ else {}), **options})
    if divides:
        optimizer, _ = zero_optimizer(optimizer)
    for scale in (1.0, -0.5, 0.25, -0.1):
        optimizer.zero_grad()
        (param.square() * scale).sum().backward()
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_an_option_acts_or_is_refused(kind: Any, name: str) -> None:
    """The parameters take the steps of the plain optimizer, and not those of its defaults; or boost raises."""
    if name in REFUSED:
        with pytest.raises(ValueError, match=rf"{name}={REFUSED[name]!r} is not supported by ZeRO"):
            trained(kind, True, **{name: REFUSED[name]})
        return
    options = {name: ACTING[name], **NEEDED.get(name, {})}
    plain, divided = (trained(kind, divides, **options) for divides in (False, True))
    # float32: a few roundings in each of four steps.
    torch.testing.assert_close(divided, plain, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(plain, trained(kind, False, **NEEDED.get(name, {})), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD])
def test_encoded_state_of_before_goes_on(kind: Any) -> None:
    """An optimizer that has taken steps is divided, and its state dict, of float32 numbers, loaded.

    Adam gets the same bits. SGD's other random numbers, because its state has no count, are differences of one code:
    1/127 of a momentum of at most 2, times the learning rate, in three steps.
    """
    options = {"lr": 0.01, "state_format": "int8", **({"momentum": 0.9} if kind is FusedSGD else {})}
    params = [nn.Parameter(torch.linspace(-1, 1, 1000)) for _ in range(3)]
    optimizers = [kind([param], **options) for param in params]

    def step(number: int, scale: float) -> None:
        optimizers[number].zero_grad()
        (params[number].square() * scale).sum().backward()
        optimizers[number].step()

    for number, optimizer in enumerate(optimizers):
        step(number, 1.0)
        if number:
            optimizers[number], saved = zero_optimizer(optimizer)
            load_plain_state(optimizers[number], saved)
            assert any(shard.dtype == torch.int8 for shard in optimizers[number]._states[0].shards().values())
        step(number, -0.5)
    third, _ = zero_optimizer(kind([params[2]], **options))
    load_plain_state(third, {name: optimizers[2].state_dict()[name] for name in ("state", "param_groups")})
    optimizers[2] = third
    for number in range(3):
        step(number, 0.25)
        error = 0.0 if kind is FusedAdam else 3 * 0.01 * 2 / 127
        torch.testing.assert_close(params[number], params[0], rtol=0.0, atol=error)


def test_an_offloaded_optimizer_is_refused() -> None:
    optimizer = OffloadedOptimizer([nn.Parameter(torch.ones(3))], FusedAdam)
    with pytest.raises(ValueError, match="cpu_offload=True"):
        zero_optimizer(optimizer)


@needs_fsdp_on_a_cpu
@pytest.mark.parametrize("plugin", [TorchFSDPPlugin, GeminiPlugin])
def test_an_offloaded_optimizer_is_refused_before_a_model_is_sharded(plugin: Any) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="OffloadedOptimizer does not take sharded parameters"):
        Booster("cpu", plugin=plugin()).boost(model, OffloadedOptimizer(model.parameters(), FusedAdam))
    assert type(model.weight) is nn.Parameter


@pytest.mark.parametrize("name", ["amsgrad", "decoupled_weight_decay"])
def test_groups_that_differ_are_refused(name: str) -> None:
    groups = [{"params": [nn.Parameter(torch.ones(3))], name: value} for value in (False, True)]
    with pytest.raises(ValueError, match=f"{name} differs between parameter groups"):
        zero_optimizer(torch.optim.Adam(groups))


def test_parameters_do_not_change_if_an_option_is_refused() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([param], stochastic_rounding=True)
    before = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(ValueError, match="stochastic_rounding"):
        zero_optimizer(optimizer)
    assert optimizer.param_groups == before
    assert torch.equal(param, torch.ones(3))
