"""Attention of sequences that are split over ranks, beside attention of the whole sequences in float64."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex.ops.attention import reference
from apex.transformer import finalize_model_grads, parallel_state
from apex.transformer.context_parallel import (
    context_attention,
    get_batch_on_this_cp_rank,
    get_pos_emb_on_this_cp_rank,
    get_thd_batch_on_this_cp_rank,
)
from apex.transformer.enums import ModelType
from apex.transformer.pipeline_parallel import build_model
from apex.transformer.pipeline_parallel._steps import forward_step

TOLERANCE = 1e-12


def _whole(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _attention(tensors: list[Tensor], edges: list[int], causal: bool, window: int | None) -> Tensor:
    masks = {"left": -1 if window is None else window, "right": 0 if causal else -1}
    return reference.varlen_attention(*tensors, (edges, edges), tensors[0].shape[-1] ** -0.5, **masks)[0]


def _compare(mine: list[Tensor], right: list[Tensor]) -> None:
    for one, other in zip(mine, right, strict=True):
        worst = float((one - other).abs().max())
        assert worst <= TOLERANCE * max(1.0, float(other.abs().max())), worst


def check_dense(comm: str, causal: bool, heads: int, key_heads: int, window: int | None, rank: int) -> None:
    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    try:
        length, batch = 4 * ranks, 2
        whole = [_whole(batch, length, n, 8) for n in (heads, key_heads, key_heads)] + [_whole(batch, length, heads, 8)]
        leaves = [tensor.clone().requires_grad_() for tensor in whole[:3]]
        expected = _attention([t.flatten(0, 1) for t in leaves], list(range(0, 3 * length, length)), causal, window)
        expected = expected.view(whole[3].shape)
        gradients = torch.autograd.grad(expected, leaves, whole[3])

        def part(tensor: Tensor) -> Tensor:
            return get_batch_on_this_cp_rank({"tensor": tensor})["tensor"]

        mine = [part(tensor).transpose(0, 1).contiguous().requires_grad_() for tensor in whole[:3]]
        output = context_attention(*mine, causal=causal, comm=comm, window=window)
        found = torch.autograd.grad(output, mine, part(whole[3]).transpose(0, 1))
        _compare(
            [tensor.transpose(0, 1) for tensor in (output, *found)], [part(t) for t in (expected.detach(), *gradients)]
        )
    finally:
        parallel_state.destroy_model_parallel()


def check_packed(comm: str, rank: int) -> None:
    """Documents of different lengths, one of them empty, with grouped queries."""
    ranks = dist.get_world_size()
    edges = [0, 2 * ranks, 2 * ranks, 8 * ranks, 10 * ranks]
    whole = [_whole(edges[-1], n, 8) for n in (8, 4, 4)] + [_whole(edges[-1], 8, 8)]
    leaves = [tensor.clone().requires_grad_() for tensor in whole[:3]]
    expected = _attention(leaves, edges, True, None)
    gradients = torch.autograd.grad(expected, leaves, whole[3])
    bounds = torch.tensor(edges, dtype=torch.int32)
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    try:

        def part(tensor: Tensor) -> Tensor:
            batch, _ = get_thd_batch_on_this_cp_rank({"tensor": tensor[None]}, bounds, None, 6 * ranks)
            return batch["tensor"][0]

        mine = [part(tensor).requires_grad_() for tensor in whole[:3]]
        output = context_attention(*mine, comm=comm, cu_seqlens=bounds, max_seqlen=6 * ranks)
        found = torch.autograd.grad(output, mine, part(whole[3]))
        _compare([output, *found], [part(tensor) for tensor in (expected.detach(), *gradients)])
    finally:
        parallel_state.destroy_model_parallel()


def check_gradients_that_some_ranks_need(comm: str, rank: int) -> None:
    """Ranks that need gradients of other tensors find them; ranks that need none beside some that do are refused."""
    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    try:
        tensors = [_whole(4, 1, 8, size)[..., :8] + rank for size in (8, 9, 10)]
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        expected = torch.autograd.grad(context_attention(*leaves, comm=comm).square().sum(), leaves)
        mine = [t.clone().requires_grad_(number == rank % 3) for number, t in enumerate(tensors)]
        context_attention(*mine, comm=comm).square().sum().backward()
        assert [t.grad is not None for t in mine] == [number == rank % 3 for number in range(3)]
        _compare([mine[rank % 3].grad], [expected[rank % 3]])  # type: ignore[list-item]
        assert not context_attention(*tensors, comm=comm).requires_grad
        _raises("all ranks must need gradients, or none", context_attention, *(mine if rank else tensors), comm=comm)
    finally:
        parallel_state.destroy_model_parallel()


def check_half_precision(rank: int) -> None:
    """The ring's root mean square error in bfloat16 is at most twice that of whole attention."""
    ranks = dist.get_world_size()
    length = 8 * ranks
    whole = [_whole(1, length, n, 16).bfloat16() for n in (4, 2, 2)]
    exact = _attention([t.double().flatten(0, 1) for t in whole], [0, length], True, None).view(1, length, 4, 16)
    rounded = _attention([t.flatten(0, 1) for t in whole], [0, length], True, None).view(1, length, 4, 16)
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    try:

        def part(tensor: Tensor) -> Tensor:
            return get_batch_on_this_cp_rank({"tensor": tensor})["tensor"]

        output = context_attention(*(part(tensor).transpose(0, 1) for tensor in whole)).transpose(0, 1)
        limit = 2 * float((rounded.double() - exact).square().mean().sqrt())
        assert float((output.double() - part(exact)).square().mean().sqrt()) <= limit
    finally:
        parallel_state.destroy_model_parallel()


def check_parts_of_a_batch(rank: int) -> None:
    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    try:
        length = 4 * ranks
        numbers = torch.arange(length)
        mine = [2 * rank, 2 * rank + 1, length - 2 * rank - 2, length - 2 * rank - 1]
        batch = {"tokens": numbers[None], "attention_mask": torch.ones(1, 1, length, length), "name": "x"}
        found = get_batch_on_this_cp_rank(batch)
        assert found["tokens"][0].tolist() == mine
        assert found["attention_mask"].shape == (1, 1, 4, length)
        assert found["name"] == "x"
        kept = get_batch_on_this_cp_rank({"attention_mask": numbers[None]})
        assert kept["attention_mask"][0].tolist() == mine
        group = parallel_state.get_context_parallel_group()
        assert get_pos_emb_on_this_cp_rank(numbers[:, None, None], 0, group).flatten().tolist() == mine
        _raises("cannot be cut into", get_batch_on_this_cp_rank, {"tokens": torch.zeros(1, length + 2)})
        rows, thd = {"words": numbers[None]}, get_thd_batch_on_this_cp_rank
        _raises("cannot be cut into", thd, {}, torch.tensor([0, ranks, 4 * ranks]), None, length)
        # Rows behind the last document were given to two ranks, or to none.
        _raises("must end with the", thd, rows, torch.tensor([0, 2 * ranks]), None, length)
        _raises("max_seqlen=4 is less", thd, rows, torch.tensor([0, length]), None, length // ranks)
        _raises("cu_seqlens_padded has 3", thd, rows, torch.tensor([0, 3]), torch.tensor([0, length, length]), length)
        _raises(f"cp_rank={ranks} must be less", thd, rows, torch.tensor([0, length]), None, length, ranks, ranks)
        query = torch.zeros(4, 1, 4, 8)
        _raises("comm='a2a\\+p2p'", context_attention, query, query, query, comm="a2a+p2p")
        _raises("window=4", context_attention, query, query, query, window=4)
        _raises("two chunks", context_attention, query[:3], query[:3], query[:3])
        if ranks > 1:
            _raises("as many heads", context_attention, *[query[:, :, :1]] * 3, comm="a2a")
    finally:
        parallel_state.destroy_model_parallel()


def check_refusals(comm: str, rank: int) -> None:
    """Arguments that do not fit together are errors by name before ranks exchange anything."""
    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    try:
        query, key = (_whole(4, 2, heads, 8) for heads in (8, 4))
        tensors: list[tuple[str, list[Tensor]]] = [
            ("value has shape", [query, key, key[:2]]),
            ("key has shape .*they may differ in heads only", [query, key.repeat(2, 1, 1, 1), key.repeat(2, 1, 1, 1)]),
            ("key has shape .*they may differ in heads only", [query, key[:, :1], key[:, :1]]),
            ("they must be equal", [query, key, query]),
            ("multiple of the key's", [query, key[:, :, :3], key[:, :, :3]]),
            ("key is torch.float32", [query, key.float(), key.float()]),
            ("all ranks must pass the same dtype and shape", [t[:, : 1 + rank % 2] for t in (query, key, key)]),
        ]
        for message, given in tensors:
            _raises(message, context_attention, *given, comm=comm)
        for scale in (0.0, -1.0, math.nan):
            _raises("scale=.* must be positive and finite", context_attention, query, key, key, comm=comm, scale=scale)
        query, key = query.flatten(0, 1), key.flatten(0, 1)
        total = 8 * ranks
        for message, edges, longest in (
            ("must end with the", [0, 2 * ranks], None),
            ("must grow from 0", [0, total, total - 2 * ranks, total], None),
            ("must grow from 0", [0, 2 * total], None),
            ("must be \\[sequences \\+ 1", [[0, total]], None),
            ("max_seqlen=4 is less than the longest", [0, total], 4),
        ):
            options = {"comm": comm, "cu_seqlens": torch.tensor(edges), "max_seqlen": longest}
            _raises(message, context_attention, query, key, key, **options)
        with torch.autocast("cpu", torch.bfloat16):
            words = [tensor.float() for tensor in (query, key, key)]
            assert context_attention(*words, comm=comm, cu_seqlens=torch.tensor([0, total])).dtype == torch.bfloat16
    finally:
        parallel_state.destroy_model_parallel()


def check_losses_of_uneven_parts(rank: int) -> None:
    """A sum with its number of tokens becomes the mean over the tokens of all ranks."""
    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    try:
        model = Weight()
        numbers = torch.arange(rank + 1, dtype=torch.float64)

        def step(batch: Tensor, model: nn.Module) -> Any:
            return model(batch), lambda losses: (losses.sum(), losses.numel(), "reported")

        reported: list[Any] = []
        forward_step(step, numbers, model, None, reported, None, num_microbatches=1).backward()
        finalize_model_grads(model)
        everyone = torch.cat([torch.arange(each + 1, dtype=torch.float64) for each in range(ranks)])
        torch.testing.assert_close(model.weight.grad, everyone.mean(), rtol=TOLERANCE, atol=0)
        assert reported == ["reported"]
        (wrapped,) = build_model(lambda **parts: Weight(), True)
        wrapped(numbers).mean().backward()
        finalize_model_grads(wrapped)
        means = torch.arange(ranks, dtype=torch.float64) / 2  # of 0 to the rank
        torch.testing.assert_close(wrapped.module.weight.grad, means.mean(), rtol=TOLERANCE, atol=0)
        _raises("an encoder-decoder cannot be split", build_model, print, False, None, ModelType.encoder_and_decoder)
    finally:
        parallel_state.destroy_model_parallel()


class Weight(nn.Module):
    """A number by which inputs are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def set_input_tensor(self, tensors: Any) -> None:
        """Ignore the input of earlier stages."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def _raises(message: str, call: Any, *arguments: Any, **options: Any) -> None:
    with pytest.raises(ValueError, match=message):
        call(*arguments, **options)


def _checks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for comm in ("p2p", "all_gather", "a2a"):
        found[f"{comm} causal"] = functools.partial(check_dense, comm, True, 8, 8, None)
        found[f"{comm} grouped"] = functools.partial(check_dense, comm, True, 8, 2, None)
        found[f"{comm} both directions"] = functools.partial(check_dense, comm, False, 8, 4, None)
        found[f"{comm} packed"] = functools.partial(check_packed, comm)
        found[f"{comm} needs"] = functools.partial(check_gradients_that_some_ranks_need, comm)
        found[f"{comm} refusals"] = functools.partial(check_refusals, comm)
        if comm != "p2p":
            found[f"{comm} window"] = functools.partial(check_dense, comm, True, 8, 4, 5)
    found["half precision"] = check_half_precision
    found["losses of uneven parts"] = check_losses_of_uneven_parts
    found["parts of a batch"] = check_parts_of_a_batch
    return found


CHECKS = _checks()
