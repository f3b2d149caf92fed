"""Every optimizer on parameters that are sharded over four processes, against one process that has them whole.

Gradients are those of a small model that PyTorch has sharded: FSDP2, FSDP2 with replicas, tensor parallelism with
FSDP2. The last bias has one element, so that most of its shards are empty; no number of rows is a multiple of four.
"""

from __future__ import annotations

import functools
import itertools
import shutil
import tempfile
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from apex import optimizers
from apex._distributed import collectives
from apex.contrib.clip_grad import clip_grad_norm_
from apex.parallel.LARC import LARC
from apex.transformer.amp import GradScaler
from tests.optimizers.test_every_step import OPTIONS as ALL_OPTIONS
from tests.parallel.processes import Check
from tests.support.grids import full_grids, pairs

STEPS = 4 if full_grids() else 3
REFUSES = "OffloadedOptimizer"  # says that it does not take sharded parameters
OPTIONS = {name: options for name, options in ALL_OPTIONS.items() if name != REFUSES}
OVERFLOW = 1  # the step with an infinite gradient in one process's shard, if losses are scaled
# Processes that hold the infinite element; replicas have the same gradients.
OVERFLOWS = {"hsdp": (1, 3)}
# Exact float32 sums over shards are added in another order than sums over whole parameters.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
# Options under which an optimizer needs sums over whole parameters.
MORE_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "FusedNovoGrad": [{"lr": 0.01}, {"lr": 0.01, "norm_type": 0, "init_zero": True}],
    "NpuFusedAdamP": [{"lr": 0.01, "delta": 0.1, "weight_decay": 0.1}, {"lr": 0.01, "delta": 5.0, "weight_decay": 0.1}],
    "Lamb": [{"lr": 0.01, "use_global_grad_norm": True, "weight_decay": 0.1}],
    "FusedLAMB": [{"lr": 0.01, "max_grad_norm": 0.5}, {"lr": 0.01, "use_nvlamb": True, "weight_decay": 0.0}],
    "FusedMuon": [
        {"lr": 0.1, "ns_dtype": torch.float32, "adjust_lr_fn": "match_rms_adamw"},
        {"lr": 0.1, "ns_dtype": torch.float32, "nesterov": False, "cautious_weight_decay": True},
    ],
}
# Optimizers that exchange nothing: shards are tensors like others to them.
ELEMENTWISE = (
    "FusedAdEMAMix",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLion",
    "FusedNAdam",
    "FusedRAdam",
    "FusedSGD",
    "FusedScheduleFreeAdamW",
    "NpuFusedAdadelta",
    "NpuFusedAdam",
    "NpuFusedAdamW",
    "NpuFusedRMSprop",
    "NpuFusedRMSpropTF",
    "NpuFusedSGD",
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(6, 10), nn.Linear(10, 7), nn.LayerNorm(7)
        self.last = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.second(torch.tanh(self.first(x)))))


class Sharded(NamedTuple):
    """Parameters of a sharded model as they were made, and their gradients at each step; both also whole."""

    params: list[Tensor]
    gradients: list[list[Tensor]]
    whole_params: list[Tensor]
    whole_gradients: list[list[Tensor]]


@functools.cache
def all_four() -> DeviceMesh:
    return init_device_mesh("cpu", (4,))


def _fsdp(model: nn.Module) -> None:
    fully_shard(model, mesh=all_four())


def _hsdp(model: nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))


def _tensor_parallel(model: nn.Module) -> None:
    """The linear layers on a mesh of two dimensions, all other parameters on one of one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])


SHARDINGS = {"fsdp": _fsdp, "hsdp": _hsdp, "tensor": _tensor_parallel}


@functools.cache
def sharded(name: str) -> Sharded:
    torch.manual_seed(0)
    model = Model()
    SHARDINGS[name](model)
    gradients = []
    for step in range(STEPS):
        model.zero_grad()
        model(torch.linspace(-1, 1, 18).view(3, 6) + step).square().sum().backward()
        gradients.append([param.grad.clone() for param in model.parameters()])
    params = [param.detach().clone() for param in model.parameters()]
    return Sharded(params, gradients, whole(params), [whole(step) for step in gradients])


def made(tensors: list[Tensor]) -> list[nn.Parameter]:
    return [nn.Parameter(tensor.detach().clone()) for tensor in tensors]


def whole(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone() for tensor in tensors]


def train(params: list[nn.Parameter], gradients: list[list[Tensor]], optimizer: Any) -> None:
    for step in gradients:
        for param, gradient in zip(params, step, strict=True):
            param.grad = gradient.clone()
        optimizer.step()


def train_scaled(params: list[nn.Parameter], gradients: list[list[Tensor]], optimizer: Any, overflows: bool) -> None:
    """The same with scaled gradients, of which one has an infinite element in a shard of processes that overflow."""
    scaler = GradScaler(init_scale=8.0)
    scaler.scale(torch.ones(()))
    for number, step in enumerate(gradients):
        for param, gradient in zip(params, step, strict=True):
            param.grad = gradient * scaler.get_scale()
        if number == OVERFLOW and overflows:
            param = params[0]
            getattr(param.grad, "_local_tensor", param.grad).view(-1)[:1] = torch.inf
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4.0


def assert_like_whole(params: list[nn.Parameter], exact: list[nn.Parameter]) -> None:
    for found, expected in zip(whole(params), exact, strict=True):
        torch.testing.assert_close(found, expected.detach(), **CLOSE)


@functools.cache
def trained_whole(case: str, make: Any, skipped: int | None = None) -> list[nn.Parameter]:
    """Return the parameters as one process trains them; `make` is cached by its identity."""
    exact = made(sharded(case).whole_params)
    train(exact, [step for number, step in enumerate(sharded(case).whole_gradients) if number != skipped], make(exact))
    return exact


def train_sharded(rank: int, case: str, make: Any) -> None:
    """Train sharded parameters alone."""
    found = made(sharded(case).params)
    train(found, sharded(case).gradients, make(found))
    assert_like_whole(found, trained_whole(case, make))


def train_with_overflow(rank: int, case: str, make: Any) -> None:
    """Train with scaled losses; all processes skip the step that overflows in one."""
    found = made(sharded(case).params)
    train_scaled(found, sharded(case).gradients, make(found), rank in OVERFLOWS.get(case, (1,)))
    assert_like_whole(found, trained_whole(case, make, OVERFLOW))


def train_beside_plain(rank: int, case: str, make: Any) -> None:
    """Train plain parameters beside sharded ones: every second one is whole in every process."""
    params, gradients, wholes, grads = sharded(case)
    found, mixed = made(params), []
    found[::2] = made(wholes)[::2]
    for step, plain in zip(gradients, grads, strict=True):
        mixed.append([plain[i] if i % 2 == 0 else step[i] for i in range(len(step))])
    train(found, mixed, make(found))
    assert_like_whole(found, trained_whole(case, make))


WAYS = (train_sharded, train_with_overflow, train_beside_plain)


def like_one_process(name: str) -> Check:
    """Return a check of an optimizer, and of its further options, in every sharding: in one way, another one in each.

    The next optimizer begins with the next way, so that each sharding has each way with many of them.
    """
    first = list(OPTIONS).index(name)

    def check(rank: int) -> None:
        for number, options in enumerate(MORE_OPTIONS.get(name, [OPTIONS[name]])):
            make = functools.partial(getattr(optimizers, name), **options)
            for case, way in pairs(SHARDINGS, WAYS, 1, first + number):
                way(rank, case, make)

    return check


def _normuon(params: Any) -> Any:
    return optimizers.FusedMuon([{"params": list(params), "beta2": 0.9}], 0.1, ns_dtype=torch.float32)


def normuon(rank: int) -> None:
    """Averages of squares of rows; those of a skipped step stay."""
    for case, way in pairs(SHARDINGS, WAYS, 1, 1):
        way(rank, case, _normuon)


def refuses(rank: int) -> None:
    params, gradients, *_ = sharded("fsdp")
    found = made(params)
    with pytest.raises(NotImplementedError, match=f"{REFUSES} does not take sharded parameters"):
        train(found, gradients, getattr(optimizers, REFUSES)(found))


def larc(rank: int) -> None:
    for case in SHARDINGS:
        params, gradients, wholes, grads = sharded(case)
        found, exact = made(params), made(wholes)
        for some, steps in ((found, gradients), (exact, grads)):
            train(some, steps, LARC(optimizers.FusedSGD(some, lr=0.1, momentum=0.9, weight_decay=0.1)))
        assert_like_whole(found, exact)


def clipping(rank: int) -> None:
    """Of gradients on one mesh, on two meshes, and of plain ones beside sharded ones."""
    for case in SHARDINGS:
        params, gradients, wholes, grads = sharded(case)
        for order in (2.0, torch.inf, 3.0):
            for plain in (False, True):
                found, exact = made(params), made(wholes)
                for param, gradient in zip(found, gradients[0], strict=True):
                    param.grad = gradient.clone()
                if plain:
                    found[0] = made(wholes)[0]
                    found[0].grad = grads[0][0].clone()
                for param, gradient in zip(exact, grads[0], strict=True):
                    param.grad = gradient.clone()
                norms = [clip_grad_norm_(some, 0.1, order) for some in (found, exact)]
                torch.testing.assert_close(whole(norms[:1])[0], norms[1], **CLOSE)
                for one, other in zip(found, exact, strict=True):
                    torch.testing.assert_close(whole([one.grad])[0], other.grad, **CLOSE)
    # Squares of these numbers overflow float32; three of the four shards are empty.
    param = nn.Parameter(distribute_tensor(torch.ones(1, dtype=torch.float64), all_four(), [Shard(0)]))
    param.grad = torch.full_like(param, 1e30)
    norm = clip_grad_norm_([param], 0.1)
    torch.testing.assert_close(whole([norm])[0], torch.tensor(1e30, dtype=torch.float64), rtol=1e-15, atol=0)
    torch.testing.assert_close(whole([param.grad])[0], torch.full((1,), 0.1, dtype=torch.float64))


def stochastic_rounding(rank: int) -> None:
    """bfloat16 shards are rounded to the bits of whole parameters; with masters they follow these."""
    cases: list[tuple[str, dict[str, Any]]] = [
        ("FusedAdam", {"lr": 0.01}),
        ("FusedSGD", {"lr": 0.1, "momentum": 0.9}),
        ("NpuFusedRMSprop", {"lr": 0.01}),
        ("NpuFusedAdamP", {"lr": 0.01, "delta": 0.0}),  # rounds by rows
    ]
    for case, (name, options) in pairs(SHARDINGS, cases, 2):
        half = [[each.bfloat16() for each in step] for step in (sharded(case).params, *sharded(case).gradients)]
        wholes = [[each.bfloat16() for each in step] for step in (sharded(case)[2], *sharded(case)[3])]
        for rounding in ({"stochastic_rounding": True}, {"master_weights": True}):
            found, exact = made(half[0]), made(wholes[0])
            for params, steps in ((found, half[1:]), (exact, wholes[1:])):
                train(params, steps, getattr(optimizers, name)(params, **options, **rounding))
            for one, other in zip(whole(found), exact, strict=True):
                assert torch.equal(one, other.detach()), (case, name, rounding)


def matrices_of_muon(rank: int) -> None:
    """Matrices cut in every way; shards of whole matrices are not sent, others by one all-to-all each way."""
    mesh = all_four()
    cases: list[tuple[list[tuple[int, ...]], dict[str, Any], int, int]] = [
        ([(7, 5), (2, 6), (7, 5), (6, 9), (1, 3)], {}, 0, 2),  # uneven and empty shards
        ([(5, 4, 6), (2, 3, 3)], {}, 0, 0),  # experts
        ([(16, 6)], {"num_heads": 8}, 0, 0),
        ([(9, 6)], {"num_heads": 3}, 0, 0),  # a shard is one head, and one process has none
        ([(12, 6)], {"num_heads": 3}, 0, 2),  # heads that shards cut
        ([(12, 6), (12, 6)], {"split_sizes": (6, 3, 3)}, 0, 2),
        ([(6, 2, 3, 3)], {"flatten": True}, 0, 2),
        ([(4, 8, 3)], {"flatten": True}, 0, 2),
        ([(6, 5), (5, 6, 4)], {}, 1, 0),  # columns, or rows of every expert
    ]
    sent = mock.Mock(side_effect=collectives.all_to_all)
    for (shapes, options, dimension, exchanges), beta2 in itertools.product(cases, (None, 0.9)):
        generator = torch.Generator().manual_seed(0)
        values = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(3)]
        shards = [[distribute_tensor(each, mesh, [Shard(dimension)]) for each in some] for some in values]
        found, exact = made(shards[0]), made(values[0])
        options = {"lr": 0.1, "ns_dtype": torch.float32, "adjust_lr_fn": "match_rms_adamw", "beta2": beta2, **options}
        with mock.patch.object(collectives, "all_to_all", sent):
            optimizer = optimizers.FusedMuon([{"params": found, **options}])
            train(found, shards[1:], optimizer)
        other = optimizers.FusedMuon([{"params": exact, **options}])
        train(exact, values[1:], other)
        assert_like_whole(found, exact)
        assert sent.call_count == 2 * exchanges * (1 if beta2 is None else 2), (shapes, options)
        sent.reset_mock()
        if beta2 is None:
            continue
        for param, twin in zip(found, exact, strict=True):
            squares = [each.state[key]["second_momentum_buffer"] for each, key in ((optimizer, param), (other, twin))]
            torch.testing.assert_close(whole(squares[:1])[0], squares[1], **CLOSE)
        # A bucket that is made again, by a loaded optimizer, goes on with the same averages.
        resumed = [nn.Parameter(param.detach().clone()) for param in found]
        again = optimizers.FusedMuon([{"params": resumed, **options}])
        again.load_state_dict(optimizer.state_dict())
        train(resumed, shards[1:2], again)
        train(exact, values[1:2], other)
        assert_like_whole(resumed, exact)


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 18).view(3, 6) + step).square().sum().backward()
        optimizer.step()


def checkpoints(rank: int) -> None:
    """Save optimizers through torch.distributed.checkpoint in two processes and load them in four."""
    # The states of elementwise optimizers differ in their names and numbers only: a few of them are a sample.
    some = ("FusedAdam", "FusedScheduleFreeAdamW", "NpuFusedRMSprop", "NpuFusedSGD")
    chosen = [name for name in OPTIONS if name not in ELEMENTWISE or name in some or full_grids()]
    names: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(names)
    meshes = {2: DeviceMesh("cpu", [0, 1]), 4: all_four()}

    def made_for(name: str, processes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Model()
        if processes > 1:
            fully_shard(model, mesh=meshes[processes])
        if name == "FusedMuon":
            return model, _normuon(model.parameters())
        return model, getattr(optimizers, name)(model.parameters(), **OPTIONS[name])

    def states(runs: dict[str, Any]) -> dict[str, Any]:
        return {
            name: {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
            for name, (model, optimizer) in runs.items()
        }

    if rank < 2:
        trained = {name: made_for(name, 2) for name in chosen}
        for model, optimizer in trained.values():
            take_steps(model, optimizer, range(2))
        save(states(trained), checkpoint_id=names[0], process_group=meshes[2].get_group())
    dist.barrier()
    others = {name: made_for(name, 4) for name in chosen}
    loaded = states(others)
    load(loaded, checkpoint_id=names[0])
    for name, (model, optimizer) in others.items():
        set_model_state_dict(model, loaded[name]["model"])
        set_optimizer_state_dict(model, optimizer, loaded[name]["optimizer"])
        assert len(optimizer.state) == len(list(model.parameters())), name  # also of empty shards
        take_steps(model, optimizer, range(2, STEPS))
        expected, reference = made_for(name, 1)
        take_steps(expected, reference, range(STEPS))
        for found, exact in zip(whole(list(model.parameters())), expected.parameters(), strict=True):
            torch.testing.assert_close(found, exact.detach(), **CLOSE, msg=lambda text, name=name: f"{name}: {text}")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(names[0])


CHECKS: dict[str, Check] = {
    **{name: like_one_process(name) for name in OPTIONS},
    REFUSES: refuses,
    "larc": larc,
    "clipping": clipping,
    "checkpoints": checkpoints,
    "matrices_of_muon": matrices_of_muon,
    "normuon": normuon,
    "stochastic_rounding": stochastic_rounding,
}
