"""Blocks of attention that are put together, against whole attention in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from apex.ops import _library
from apex.ops.attention import op_blocks, reference
from apex.ops.attention.op_blocks import Block, Part, merge_parts
from apex.transformer.context_parallel._blocks import Merged
from apex.transformer.context_parallel._ring import Plan, add_rows
from tests.ops.attention.cases import assert_close
from tests.support.harness import Route, routes

pytestmark = pytest.mark.usefixtures("poisoned_memory")

_ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def _random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    ("partial", "heads", "size", "dtype"),
    [
        ((False,), 2, 16, torch.float32),
        ((False, True), 3, 24, torch.bfloat16),
        ((False, False, False), 1, 16, torch.float16),
        ((False, True, False, True), 2, 32, torch.bfloat16),
    ],
)
def test_parts_are_put_together(
    route: Route, weighted: bool, partial: tuple[bool, ...], heads: int, size: int, dtype: torch.dtype
) -> None:
    rows, chosen = 150, torch.arange(0, 150, 2)
    places = torch.full((rows,), -1).index_copy_(0, chosen, torch.arange(75))
    expected, logs = torch.zeros(rows, heads, size, dtype=torch.float64), []
    parts = []
    for index, some in enumerate(partial):
        taken = chosen if some else torch.arange(rows)
        result = _random(len(taken), heads, size + index)[..., :size].to(dtype)
        lse = 10 * _random(heads, len(taken) + index)[:, : len(taken)].float()
        lse[:, 3:5] = -torch.inf  # rows that see no key in any block
        log = torch.full((heads, rows), -torch.inf, dtype=torch.float64)
        log[:, taken] = lse.double()
        logs.append((log, taken, result.double()))
        parts.append(Part(result.to(route.device), lse.to(route.device) if weighted else None, some))
    whole = torch.stack([log for log, _, _ in logs]).logsumexp(0)
    for log, taken, result in logs:
        share = (log - whole).exp().nan_to_num(0.0).T[taken, :, None] if weighted else 1.0
        expected[taken] += share * result
    with _library.implementation(route.implementation):
        for wanted in (dtype, torch.float32):
            result, lse = merge_parts(parts, places.to(route.device), wanted)
            assert result.dtype == wanted
            assert_close(result, expected, dtype=wanted)
            assert (lse is None) is not weighted
            if lse is not None:
                torch.testing.assert_close(lse.cpu().double(), whole, rtol=1e-6, atol=1e-6)


def _ring(tensors: list[Tensor], plans: list[Plan], ranks: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return the outputs of all ranks, the gradients of their queries, and those of all keys and values."""
    queries, keys, values, gradients = (tensor.chunk(ranks) for tensor in tensors)
    outputs, dqueries, dkeys = [], [], [torch.zeros_like(tensor, dtype=torch.float64) for tensor in tensors[1:3]]
    for plan in plans:
        merged, dquery = Merged(plan.places), Merged(plan.places)
        sources = [(plan.rank - number) % ranks for number in range(ranks)]
        for number, source in enumerate(sources):
            plan.attend(number, queries[plan.rank], (keys[source], values[source]), merged)
        whole: Any = merged.results(tensors[0].dtype)
        outputs.append(whole[0])
        for number, source in enumerate(sources):
            given = (gradients[plan.rank], queries[plan.rank], (keys[source], values[source]), whole, dquery)
            found, rows = plan.differentiate(number, *given)
            for total, part in zip(dkeys, found, strict=True):
                add_rows(total.chunk(ranks)[source], rows, part)
        dqueries.append(dquery.results(tensors[0].dtype)[0])
    return outputs, dqueries, dkeys


def _parts_and_whole(
    sequences: int, length: int, ranks: int, heads: tuple[int, int], size: int, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Return query, key, value and the output's gradient, and right results, with rows in the order of the ranks."""
    rows = sequences * length
    tensors = [_random(rows, count, size, dtype=dtype) for count in (*heads, heads[1], heads[0])]
    leaves = [tensor.double().clone().requires_grad_() for tensor in tensors[:3]]
    edges = list(range(0, rows + 1, length))
    output, _ = reference.varlen_attention(*leaves, (edges, edges), size**-0.5, right=0)
    right = [output.detach(), *torch.autograd.grad(output, leaves, tensors[3].double())]
    numbers = torch.arange(rows).view(sequences, 2 * ranks, -1)
    order = torch.cat([numbers[:, [rank, 2 * ranks - 1 - rank]].flatten() for rank in range(ranks)])
    return [tensor[order] for tensor in tensors], [tensor[order] for tensor in right]


def _plans(bounds: Tensor, length: int, ranks: int, size: int, sequences: int) -> list[Plan]:
    total = (len(bounds) - 1) * length
    return [Plan(bounds, total, length, size**-0.5, True, ranks, rank, sequences) for rank in range(ranks)]


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize(("sequences", "known"), [(1, True), (1, False), (2, True)])
def test_rings_of_more_ranks_than_are_merged_at_once(route: Route, sequences: int, known: bool) -> None:
    ranks, length, dtype = 5, 20, torch.float32
    tensors, right = _parts_and_whole(sequences, length, ranks, (2, 1), 16, dtype)
    bounds = torch.arange(sequences + 1, device=route.device) * length
    with _library.implementation(route.implementation):
        plans = _plans(bounds, length, ranks, 16, sequences if known else 0)
        outputs, dqueries, dkeys = _ring([tensor.to(route.device) for tensor in tensors], plans, ranks)
    for found, expected in zip((torch.cat(outputs), torch.cat(dqueries), *dkeys), right, strict=True):
        assert_close(found, expected, dtype=dtype)


@pytest.mark.skipif(torch.__version__ < "2.7", reason="PyTorch 2.6's attention for CPUs writes past grouped heads")
@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize("sequences", [1, 2])
def test_batches_in_the_layout_of_cudnn(monkeypatch: pytest.MonkeyPatch, sequences: int, columns: bool) -> None:
    """PyTorch's attention for the CPU takes the place of cuDNN's, which wants every tensor without gaps."""
    aten = torch.ops.aten

    def forward(query, key, value, bias, with_lse, dropout, causal, *, scale):  # type: ignore[no-untyped-def]
        assert all(tensor.transpose(1, 2).is_contiguous() for tensor in (query, key, value))
        output, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
        lse = lse.contiguous()
        return output, lse[..., None] if columns else lse, None, None, 0, 0, None, None, None

    def backward(dout, query, key, value, output, lse, *others, scale):  # type: ignore[no-untyped-def]
        *_, longest, longest_k, _, causal = others
        assert lse.dim() == 3 + columns
        assert lse.is_contiguous()
        assert (longest, longest_k) == (query.shape[2], key.shape[2])
        assert all(tensor.transpose(1, 2).is_contiguous() for tensor in (dout, query, key, value, output))
        # The CPU's backward pass reads logs [Z, length, H].
        lse = lse.view(lse.shape[:3]).transpose(1, 2).contiguous().transpose(1, 2)
        given = (dout, query, key, value, output, lse, 0.0, causal)
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, scale=scale)

    fakes = {"": forward, "_backward": backward}
    for name, fake in fakes.items():
        monkeypatch.setattr(aten, f"_scaled_dot_product_cudnn_attention{name}", SimpleNamespace(default=fake))
    monkeypatch.setattr(op_blocks, "_logs_of_cudnn_have_columns", lambda: columns)
    monkeypatch.setattr(Block, "_suits_cudnn", lambda *given: True)
    ranks, length = 4, 32
    tensors, right = _parts_and_whole(sequences, length, ranks, (4, 2), 16, torch.float64)
    plans = _plans(torch.arange(sequences + 1) * length, length, ranks, 16, sequences)
    outputs, dqueries, dkeys = _ring(tensors, plans, ranks)
    for found, expected in zip((torch.cat(outputs), torch.cat(dqueries), *dkeys), right, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_logs_of_cudnn_have_the_shape_of_this_version() -> None:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert op_blocks._logs_of_cudnn_have_columns() == (version >= (2, 9))


@pytest.mark.gpu
@pytest.mark.skipif(not _ON_HOPPER, reason="cuDNN computes blocks on Hopper GPUs")
@pytest.mark.parametrize("sequences", [1, 2])
def test_cudnn_computes_the_blocks_of_a_ring(monkeypatch: pytest.MonkeyPatch, sequences: int) -> None:
    ranks, length, heads, size, dtype = 3, 6144 // sequences, (16, 4), 128, torch.bfloat16
    monkeypatch.setattr(op_blocks.config, "CUDNN_FEWEST_ELEMENTS", 0)
    calls = []
    for way in ("_cudnn_forward", "_cudnn_backward"):
        run = getattr(Block, way)
        monkeypatch.setattr(Block, way, lambda *given, run=run, way=way: calls.append(way) or run(*given))
    tensors, right = _parts_and_whole(sequences, length, ranks, heads, size, dtype)
    bounds = torch.arange(sequences + 1, device="cuda") * length
    plans = _plans(bounds, length, ranks, size, sequences)
    outputs, dqueries, dkeys = _ring([tensor.cuda() for tensor in tensors], plans, ranks)
    for found, expected in zip((torch.cat(outputs), torch.cat(dqueries), *dkeys), right, strict=True):
        assert_close(found, expected, dtype=dtype)
    assert calls.count("_cudnn_forward") == ranks**2
    assert calls.count("_cudnn_backward") == ranks**2
