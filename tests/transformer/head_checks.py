"""Checks of linear heads whose classes several processes share, against one process with all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from apex.contrib.xentropy import TokenOutputs, linear_cross_entropy, linear_log_probs
from tests.support.grids import full_grids

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
FEATURES, ROWS = 4, 8
OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 2.0, "temperature": 0.7},
    {"label_smoothing": 0.1, "class_weight": True, "z_loss": 0.01},
    {"token_scaling": True, "reduction": "sum"},
    {"reduction": "none", "label_smoothing": 0.1, "smoothing": "megatron"},
]
NAMES = TokenOutputs._fields


def problem(ranks: int) -> tuple[list[Tensor], Tensor, list[int]]:
    """Return input, weight and bias of all classes, labels, and where each rank's classes begin: parts are uneven."""
    generator = torch.Generator().manual_seed(3)
    edges = [0]
    for rank in range(ranks):
        edges.append(edges[-1] + 3 + 2 * (rank % 2))
    classes = edges[-1]
    shapes = ((ROWS, FEATURES), (classes, FEATURES), (classes,))
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    labels = torch.randint(0, classes, (ROWS,), generator=generator)
    labels[2], labels[5] = -100, classes - 1
    return tensors, labels, edges


def results(value: Any) -> list[Tensor]:
    """Return a loss, or log-probabilities and entropies, with the other outputs."""
    return [value[0], *value[1]] if isinstance(value[0], Tensor) and isinstance(value[1], tuple) else list(value)


def gradients(value: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    total = sum((v * torch.arange(1, v.numel() + 1).view(v.shape)).sum() for v in value if v.requires_grad)
    return list(torch.autograd.grad(total, leaves))


def shared_classes(rank: int) -> None:
    """Losses, outputs and gradients equal those of one process; rows of the input may be shared, too."""
    ranks = dist.get_world_size()
    group = dist.group.WORLD
    tensors, labels, edges = problem(ranks)
    here, rows = slice(edges[rank], edges[rank + 1]), slice(ROWS // ranks * rank, ROWS // ranks * (rank + 1))
    calls = [(linear_cross_entropy, {**options, "outputs": NAMES}) for options in OPTIONS]
    calls += [(linear_log_probs, {"outputs": NAMES, "keep_logits": keep}) for keep in (True, False)]
    for function, options in calls:
        if "class_weight" in options:
            options["class_weight"] = torch.linspace(0.5, 2.0, edges[-1], dtype=torch.float64)
        whole = results(function(*tensors[:2], labels, tensors[2], **options))
        expected = gradients(whole, tensors)
        for sequence_parallel in (False, True):
            mine = [tensors[0][rows] if sequence_parallel else tensors[0], tensors[1][here], tensors[2][here]]
            mine = [tensor.detach().clone().requires_grad_() for tensor in mine]
            parallel = {"group": group, "sequence_parallel": sequence_parallel, "chunk_rows": 3}
            found = results(function(*mine[:2], labels, mine[2], **options, **parallel))
            for name, actual, wanted in zip(("loss", *NAMES)[-len(whole) :], found, whole, strict=True):
                torch.testing.assert_close(actual, wanted, **CLOSE, msg=lambda m, w=(name, options): f"{w}: {m}")
            parts = (expected[0][rows] if sequence_parallel else expected[0], expected[1][here], expected[2][here])
            for actual, wanted in zip(gradients(found, mine), parts, strict=True):
                torch.testing.assert_close(actual, wanted, **CLOSE, msg=lambda m, o=options: f"{o}: {m}")


def shared_classes_are_refused_where_they_cannot_work(rank: int) -> None:
    ranks, group = dist.get_world_size(), dist.group.WORLD
    tensors, labels, edges = problem(ranks)
    mine = tensors[1].detach()[edges[rank] : edges[rank + 1]].requires_grad_()
    loss = linear_cross_entropy(tensors[0], mine, labels, group=group)
    with pytest.raises(RuntimeError, match="several ranks share has a first derivative only"):
        torch.autograd.grad(loss, mine, create_graph=True)
    with pytest.raises(ValueError, match=r"target has shape \[8\], expected"):
        linear_cross_entropy(tensors[0], mine, labels, group=group, sequence_parallel=True)
    wrong = labels.clone()
    wrong[0] = edges[-1]  # no class of any rank
    assert linear_cross_entropy(tensors[0], mine, wrong, group=group, reduction="none")[0].isnan()


def one_exchange_per_chunk(rank: int) -> None:
    """Beside the statistics only the numbers of classes are gathered, once, and the input's gradient summed, once."""
    from apex._distributed import collectives, exchange

    tensors, labels, edges = problem(dist.get_world_size())
    mine = tensors[1].detach()[edges[rank] : edges[rank + 1]].requires_grad_()
    seen: list[str] = []
    kept = exchange.check_alike, collectives.all_gather, collectives.all_reduce
    exchange.check_alike = lambda *_: None  # compares shapes on Gloo alone
    try:
        collectives.all_gather = lambda *a: seen.append("gather") or kept[1](*a)
        collectives.all_reduce = lambda *a: seen.append("sum") or kept[2](*a)
        linear_cross_entropy(tensors[0], mine, labels, group=dist.group.WORLD, chunk_rows=3).backward()
    finally:
        exchange.check_alike, collectives.all_gather, collectives.all_reduce = kept
    assert seen == ["gather"] * 4 + ["sum"]


def heads_that_are_dtensors(rank: int) -> None:
    """A sharded head with an input on its mesh is tensor-parallel; with rows that differ by rank it is gathered."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    ranks = dist.get_world_size()
    tensors, labels, _ = problem(ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    whole = linear_cross_entropy(*tensors[:2], labels, tensors[2])
    expected = torch.autograd.grad(whole, tensors)
    weight, bias = (distribute_tensor(tensor.detach(), mesh, [Shard(0)]).requires_grad_() for tensor in tensors[1:])
    input = DTensor.from_local(tensors[0].detach(), mesh, [Replicate()]).requires_grad_()
    loss = linear_cross_entropy(input, weight, labels, bias)
    torch.testing.assert_close(loss, whole, **CLOSE)
    for actual, wanted in zip(torch.autograd.grad(loss, (input, weight, bias)), expected, strict=True):
        torch.testing.assert_close(actual.full_tensor(), wanted, **CLOSE)
    local = tensors[0].detach().clone().requires_grad_()
    loss = linear_cross_entropy(local, weight, labels, bias) / ranks  # the same rows here, so that sums are known
    found = torch.autograd.grad(loss, (local, weight, bias))
    torch.testing.assert_close(found[0] * ranks, expected[0], **CLOSE)
    for actual, wanted in zip(found[1:], expected[1:], strict=True):
        assert actual.placements == (Shard(0),)
        torch.testing.assert_close(actual.full_tensor(), wanted, **CLOSE)


def compiled_shared_classes(rank: int) -> None:
    """Check the losses under torch.compile; tracing takes seconds in each of four processes, so two are enough."""
    if dist.get_world_size() > 2 and not full_grids():
        return
    tensors, labels, edges = problem(dist.get_world_size())
    mine = tensors[1].detach()[edges[rank] : edges[rank + 1]].requires_grad_()
    group = dist.group.WORLD

    def step(input: Tensor, weight: Tensor) -> Tensor:
        rows = linear_log_probs(input, weight, labels, outputs=("log_probs", "entropy"), group=group)
        loss = linear_cross_entropy(input, weight, labels, group=group, softcap=3.0)
        return loss + (rows.log_probs * rows.entropy).sum()

    expected = step(tensors[0], mine)
    wanted = torch.autograd.grad(expected, (tensors[0], mine))
    loss = torch.compile(step, fullgraph=True, backend="aot_eager")(tensors[0], mine)
    torch.testing.assert_close(loss, expected, **CLOSE)
    for actual, gradient in zip(torch.autograd.grad(loss, (tensors[0], mine)), wanted, strict=True):
        torch.testing.assert_close(actual, gradient, **CLOSE)


CHECKS = (
    shared_classes,
    shared_classes_are_refused_where_they_cannot_work,
    one_exchange_per_chunk,
    heads_that_are_dtensors,
    compiled_shared_classes,
)
