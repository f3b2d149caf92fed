"""`state_format` and `master_bits` on sharded parameters, in four processes, against one process.

A shard whose cuts are multiples of 64 elements has the bits of one process; the groups of other shards are others.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from apex import optimizers
from tests.parallel.processes import Check
from tests.support.grids import pairs

# In groups of 64 by whichever of SHARDINGS, with uneven and empty shards.
ALIGNED = ((10, 128), (5, 3, 256), (1, 128), (256,), (6, 8, 16))
OTHERS = ((6, 10), (130,), (3, 96), (1,))
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "FusedAdam": {"lr": 0.01, "weight_decay": 0.1},
    "FusedLion": {"lr": 0.01},
    "FusedSGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.1},
    "FusedAdEMAMix": {"lr": 0.01},
    "FusedMuon": {"lr": 0.01, "ns_dtype": torch.float32},
}
FORMATS: tuple[dict[str, Any], ...] = (
    {"state_format": "int8", "master_bits": 24},
    {"state_format": "bfloat16", "master_bits": 32},
    {"state_format": "float8", "stochastic_rounding": True},
    {"state_format": "int8", "master_weights": True},
)
SHARDINGS: dict[str, Sequence[Any]] = {
    "rows": [Shard(0)],
    "replicas": [Replicate(), Shard(0)],
    "rows and columns": [Shard(0), Shard(1)],
}


def values(shapes: Sequence[Sequence[int]], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


@functools.cache
def mesh_of(*sizes: int) -> DeviceMesh:
    """Return a mesh of these sizes; each new one would connect its processes anew."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=("one", "other")[: len(sizes)])


def distribute(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    """Return a tensor's shards; every process has the whole tensor, so none is sent."""
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def sharded(tensors: Sequence[Tensor], case: str) -> list[Tensor]:
    placements = SHARDINGS[case]
    mesh = mesh_of(4) if len(placements) == 1 else mesh_of(2, 2)
    fit = lambda each, tensor: Replicate() if each.is_shard() and each.dim >= tensor.dim() else each  # noqa: E731
    return [distribute(tensor, mesh, [fit(each, tensor) for each in placements]) for tensor in tensors]


def train(params: Sequence[nn.Parameter], optimizer: Any, gradients: Sequence[Sequence[Tensor]]) -> None:
    for step in gradients:
        for param, gradient in zip(params, step, strict=True):
            param.grad = gradient
        optimizer.step()


def trained(
    name: str, options: dict[str, Any], shapes: Sequence[Sequence[int]], case: str, steps: int = 4
) -> tuple[list[nn.Parameter], Any, list[nn.Parameter], Any]:
    """Return shards and their optimizer, and whole parameters and theirs, after some steps."""
    results: list[Any] = []
    for place in (lambda tensors: sharded(tensors, case), list):
        params = [nn.Parameter(each.clone()) for each in place(values(shapes, 0))]
        optimizer = getattr(optimizers, name)(params, **OPTIMIZERS[name], **options)
        train(params, optimizer, [place(values(shapes, 1 + step)) for step in range(steps)])
        results += [params, optimizer]
    return results[0], results[1], results[2], results[3]


def whole(tensor: Any) -> Tensor:
    """Return a whole tensor; Gloo knows neither int16 nor float8, whose numbers float32 holds."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    return tensor.detach().to(torch.float32).full_tensor().to(tensor.dtype)


def own(tensor: Any, like: Any) -> Tensor:
    """Return this process's shard of a tensor, or of a whole tensor as `like` is sharded."""
    if isinstance(like, DTensor) and not isinstance(tensor, DTensor):
        tensor = distribute(tensor.detach().reshape(like.shape), like.device_mesh, like.placements)
    return getattr(tensor, "_local_tensor", tensor).detach()


def same(found: Any, expected: Any) -> bool:
    """Return whether two tensors of any dtype have the same bits; the first one may be sharded or of another shape."""
    one, two = (own(each, found).reshape(-1).contiguous().view(torch.uint8) for each in (found, expected))
    return torch.equal(one, two)


def bits_of_one_process(rank: int) -> None:
    """Also codes, scales and remainders; only scales of vectors belong to a shard alone."""
    for number, name in enumerate(OPTIMIZERS):
        for case, options in pairs(SHARDINGS, FORMATS, 1 if number else 2, number):
            found, optimizer, exact, other = trained(name, options, ALIGNED, case)
            assert all(map(same, found, exact)), (name, case, options)
            for param, twin in zip(found, exact, strict=True):
                mine, theirs = optimizer.state[param], other.state[twin]
                assert mine.keys() == theirs.keys()
                for key in mine:
                    if not key.endswith("::scales") or param.dim() > 1:
                        assert same(mine[key], theirs[key]), (name, case, options, key)
            masters = zip(optimizer.master_parameters(), other.master_parameters(), strict=True)
            assert all(same(one, two) for one, two in masters)


def groups_that_shards_cut(rank: int) -> None:
    """Results differ from one process's as little as codes allow: here by 4% of the way, of 4 steps."""
    for name, options in pairs(OPTIMIZERS, FORMATS, 1, 0):
        for case in SHARDINGS:
            found, _, exact, _ = trained(name, options, OTHERS, case)
            for param, twin, start in zip(found, exact, values(OTHERS, 0), strict=True):
                change = (whole(param).detach().double() - twin.detach().double()).norm()
                assert change <= 0.04 * (twin.detach().double() - start.double()).norm() + 0.004, (name, options, case)


def decoded_and_gathered_state(rank: int) -> None:
    """State dicts of shards, decoded or gathered, are state dicts of one process; both go on with the same bits."""
    for case in SHARDINGS:
        found, optimizer, exact, other = trained("FusedAdam", FORMATS[0], ALIGNED, case)
        names = {"step", "exp_avg", "exp_avg_sq", "master_param"}
        decoded, expected = (each.state_dict(decoded=True)["state"] for each in (optimizer, other))
        for index, state in expected.items():
            assert names == decoded[index].keys() == state.keys()
            assert all(same(decoded[index][name], state[name]) for name in names)
        saved = optimizer.state_dict()
        vector = {"exp_avg", "exp_avg_sq", "master_param::remainder", "step"}
        for index, param in enumerate(found):
            assert (saved["state"][index].keys() == vector) == (param.dim() == 1)
        gathered = {i: {name: whole(each) for name, each in state.items()} for i, state in saved["state"].items()}
        params = [nn.Parameter(param.detach().clone()) for param in exact]
        resumed = optimizers.FusedAdam(params, lr=0.01, weight_decay=0.1, **FORMATS[0])
        resumed.load_state_dict({**saved, "state": gathered})
        shards = [nn.Parameter(param.detach().clone()) for param in found]
        again = optimizers.FusedAdam(shards, lr=0.01, weight_decay=0.1, **FORMATS[0])
        again.load_state_dict(saved)
        gradients = values(ALIGNED, 9)
        for some, each in ((exact, other), (params, resumed)):
            train(some, each, [gradients])
        for some, each in ((found, optimizer), (shards, again)):
            train(some, each, [sharded(gradients, case)])
        assert all(map(same, params, exact))
        assert all(map(same, found, exact))
        assert all(map(same, shards, exact))


def other_formats_of_shards(rank: int) -> None:
    """Loaded state of another format is encoded shard by shard, with empty shards."""
    found, optimizer, *_ = trained("FusedAdam", {"master_weights": True}, ALIGNED + OTHERS, "rows")
    saved = optimizer.state_dict()
    for options in ({"state_format": "int8", "master_bits": 24}, {"state_format": "bfloat16", "master_weights": True}):
        other = optimizers.FusedAdam([nn.Parameter(param.detach().clone()) for param in found], **options)
        other.load_state_dict(saved)
        for index, state in other.state_dict(decoded=True)["state"].items():
            for name, values_of in state.items():
                exact = whole(saved["state"][index][name]).double()
                limit = float(exact.abs().max()) / 100
                torch.testing.assert_close(whole(values_of).double(), exact, rtol=0.01, atol=limit)
        plain = optimizers.FusedAdam([nn.Parameter(param.detach().clone()) for param in found], master_weights=True)
        plain.load_state_dict(other.state_dict())
        assert all(set(state) == {"exp_avg", "exp_avg_sq", "master_param"} for state in plain.state.values())


def state_of_other_shards_is_refused(rank: int) -> None:
    _, optimizer, _, other = trained("FusedAdam", FORMATS[0], ALIGNED, "rows", steps=1)
    columns = sharded(values(ALIGNED, 0), "rows and columns")
    for each, wrong in ((optimizer, other), (other, optimizer)):
        before = [dict(state) for state in each.state.values()]
        with pytest.raises(ValueError, match=r"exp_avg.* in the state of parameter 0 is distributed as"):
            each.load_state_dict(wrong.state_dict())
        kept = zip(each.state.values(), before, strict=True)
        assert all(state[name] is old[name] for state, old in kept for name in old)
    for name in ("exp_avg", "master_param::remainder"):
        saved = optimizer.state_dict(decoded=name == "exp_avg")
        saved["state"][0][name] = torch.zeros_like(columns[0], dtype=saved["state"][0][name].dtype)
        with pytest.raises(ValueError, match=f"{name} in the state of parameter 0 is distributed as"):
            optimizer.load_state_dict(saved)


def resharded(rank: int) -> None:
    """Save in two processes, load in four: whole groups keep their codes, others are encoded anew."""
    names: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(names)
    meshes = {2: DeviceMesh("cpu", [0, 1]), 4: mesh_of(4)}

    def run(processes: int, options: dict[str, Any]) -> tuple[nn.Module, list[nn.Parameter], Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 10), nn.Linear(10, 7), nn.Linear(192, 3)).bfloat16()
        if processes > 1:
            fully_shard(model, mesh=meshes[processes])
        params = list(model.parameters())
        return model, params, optimizers.FusedAdam(params, lr=0.01, weight_decay=0.1, **options)

    def step(params: list[Any], optimizer: Any, seed: int) -> None:
        gradients = values([param.shape for param in params], seed)
        if hasattr(params[0], "placements"):
            gradients = [distribute(g, params[0].device_mesh, params[0].placements) for g in gradients]
        train(params, optimizer, [gradients])

    for number, options in enumerate(FORMATS):
        folder = f"{names[0]}/{number}"
        saved: list[Any] = [None]
        if rank < 2:
            model, params, optimizer = run(2, options)
            for seed in (1, 2, 3):
                step(params, optimizer, seed)
            save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder,
                 process_group=meshes[2].get_group())  # fmt: skip
            saved = [[whole(param).detach() for param in params]]
        dist.broadcast_object_list(saved)
        model, params, optimizer = run(4, options)
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        load(state, checkpoint_id=folder)
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        _, exact, other = run(1, options)
        for seed in (1, 2, 3):
            step(exact, other, seed)
        with torch.no_grad():
            for param, twin, value in zip(params, exact, saved[0], strict=True):
                param.copy_(distribute(value, meshes[4], param.placements))
                if twin.shape[-1] % 64 == 0:
                    assert same(value, twin)
        for param, twin in zip(params, exact, strict=True):
            mine, theirs = optimizer.state[param], other.state[twin]
            for key in theirs if param.dim() > 1 and param.shape[-1] % 64 == 0 else ():
                assert same(mine[key], theirs[key]), (options, key)
        step(params, optimizer, 4)
        step(exact, other, 4)
        for param, twin in zip(params, exact, strict=True):
            if twin.dim() > 1 and twin.shape[-1] % 64 == 0:
                assert same(param, twin), options
            else:  # within a tenth of the learning rate, and a digit of bfloat16
                torch.testing.assert_close(whole(param).detach(), twin.detach(), rtol=0.01, atol=0.001)
    # Decoded, state goes into plain parameters too.
    save(optimizer.state_dict(decoded=True), checkpoint_id=f"{names[0]}/decoded")
    template = other.state_dict(decoded=True)
    template["state"] = {
        key: {n: torch.zeros_like(v) for n, v in each.items()} for key, each in template["state"].items()
    }
    load(template, checkpoint_id=f"{names[0]}/decoded")
    other.load_state_dict(template)
    loaded, expected = (each.state_dict(decoded=True)["state"] for each in (other, optimizer))
    for key, state in expected.items():
        for name in ("exp_avg", "exp_avg_sq"):
            exact = whole(state[name])
            torch.testing.assert_close(loaded[key][name], exact, rtol=0, atol=float(exact.abs().max()) / 100)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(names[0])


CHECKS: dict[str, Check] = {
    "bits_of_one_process": bits_of_one_process,
    "groups_that_shards_cut": groups_that_shards_cut,
    "decoded_and_gathered_state": decoded_and_gathered_state,
    "other_formats_of_shards": other_formats_of_shards,
    "state_of_other_shards_is_refused": state_of_other_shards_is_refused,
    "resharded": resharded,
}
