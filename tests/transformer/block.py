"""A language model of one GPT block, split over tensor-parallel ranks, and a training run with it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch._dynamo  # by the process that divides: optimizers import it, which takes seconds in each of eight
from torch import Tensor, nn

from apex.fused_bias_swiglu import fused_bias_swiglu
from apex.optimizers import FusedSGD
from apex.transformer import finalize_model_grads, parallel_state
from apex.transformer.functional import fused_apply_rotary_pos_emb, scaled_upper_triang_masked_softmax
from apex.transformer.layers import FusedLayerNorm
from apex.transformer.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    scatter_to_sequence_parallel_region,
    vocab_parallel_cross_entropy,
)
from apex.transformer.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from tests.support.grids import full_grids
from tests.support.harness import sum_error

WORDS, HIDDEN, HEADS, SEQUENCE, BATCH = 64, 32, 8, 16, 4
# The second step has other parameters and a momentum.
STEPS = 5 if full_grids() else 2
# The terms of all sums that a number of a forward pass goes through one after the other: projections, attention, norms,
# the loss. A backward pass has as many, and one more sum over all tokens for the gradient of a weight.
FORWARD_TERMS = sum(
    (
        3 * HIDDEN,  # three norms
        HIDDEN + HIDDEN // HEADS + SEQUENCE + HIDDEN,  # queries and keys, scores, values, projection
        HIDDEN + 4 * HIDDEN,  # up, down
        HIDDEN + WORDS,  # logits, loss
    )
)
TERMS = 2 * FORWARD_TERMS + SEQUENCE * BATCH


class Model(nn.Module):
    """Embedding, block and logits with the embedding's weights; [sequence, batch] words to a loss for each."""

    def __init__(self, sequence: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.sequence = sequence
        made = {"params_dtype": dtype, "use_cpu_initialization": True}
        split = {**made, "sequence_parallel_enabled": sequence}
        column = {**split, "gather_output": False, "no_async_tensor_model_parallel_allreduce": sequence}
        row = {**split, "input_is_parallel": True}
        self.embedding = VocabParallelEmbedding(WORDS, HIDDEN, functools.partial(nn.init.normal_, std=0.1), **made)
        self.first_norm = FusedLayerNorm(HIDDEN, sequence_parallel_enabled=sequence)
        self.queries_keys_values = ColumnParallelLinear(HIDDEN, 3 * HIDDEN, **column)
        self.projection = RowParallelLinear(HIDDEN, HIDDEN, **row)
        self.second_norm = FusedLayerNorm(HIDDEN, sequence_parallel_enabled=sequence)
        # With a stride of 2 each rank has the values that belong to its gates.
        self.up = ColumnParallelLinear(HIDDEN, 8 * HIDDEN, stride=2, skip_bias_add=True, **column)
        self.down = RowParallelLinear(4 * HIDDEN, HIDDEN, **row)
        self.last_norm = FusedLayerNorm(HIDDEN, sequence_parallel_enabled=sequence)
        self.to(dtype)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(words)
        if self.sequence:
            x = scatter_to_sequence_parallel_region(x)
        x = x + self.attention(self.first_norm(x))
        hidden, bias = self.up(self.second_norm(x))
        x = x + self.down(fused_bias_swiglu(hidden, bias))[0]
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        logits = linear_with_grad_accumulation_and_async_allreduce(
            self.last_norm(x), self.embedding.weight, None, False, ranks > 1 and not self.sequence, self.sequence
        )
        return vocab_parallel_cross_entropy(logits, targets, label_smoothing=0.1)

    def attention(self, x: Tensor) -> Tensor:
        mixed = self.queries_keys_values(x)[0]
        size = HIDDEN // HEADS
        positions = torch.arange(SEQUENCE, dtype=torch.float32, device=x.device)
        angles = positions[:, None] * 0.1 ** torch.arange(size // 2, device=x.device)
        angles = torch.cat([angles, angles], -1).view(SEQUENCE, 1, 1, size)
        queries, keys, values = mixed.view(*mixed.shape[:2], -1, 3 * size).chunk(3, -1)
        queries, keys = (fused_apply_rotary_pos_emb(each.contiguous(), angles) for each in (queries, keys))
        queries, keys, values = (each.permute(1, 2, 0, 3).flatten(0, 1) for each in (queries, keys, values))
        weights = scaled_upper_triang_masked_softmax(queries @ keys.transpose(1, 2), None, size**-0.5)
        mixed = (weights @ values).unflatten(0, (x.shape[1], -1)).permute(2, 0, 1, 3)
        return self.projection(mixed.flatten(2))[0]


class Trained(NamedTuple):
    """The results of a run: losses, and this rank's parts of parameters and gradients."""

    initial: list[Tensor]
    losses: list[Tensor]
    gradients: list[list[Tensor]]
    parameters: list[Tensor]
    splits: list[tuple[bool, int, int]]


def train(sequence: bool, dtype: torch.dtype, device: str = "cpu") -> Trained:
    """Train for `STEPS` steps on the existing groups; each data-parallel rank uses its part of the batch."""
    torch.manual_seed(4)
    model = Model(sequence, dtype).to(device)
    parameters = list(model.parameters())
    found = Trained([p.detach().clone() for p in parameters], [], [], parameters, list(map(split_of, parameters)))
    # Not Adam: it divides small gradients by their size, and with it what rounding has done to them.
    optimizer = FusedSGD(parameters, lr=0.01, momentum=0.9, weight_decay=0.01)
    numbers = torch.Generator().manual_seed(6)
    replicas, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    for _ in range(STEPS):
        words, targets = torch.randint(0, WORDS, (2, SEQUENCE, BATCH), generator=numbers).to(device)
        optimizer.zero_grad()
        losses = model(words.chunk(replicas, 1)[replica], targets.chunk(replicas, 1)[replica])
        losses.mean().backward()
        finalize_model_grads(model)
        found.losses.append(losses.detach().clone())
        found.gradients.append([p.grad.detach().clone() for p in parameters])
        optimizer.step()
    return found


def train_alone(dtype: torch.dtype, device: str = "cpu") -> Trained:
    """Train in this process only, on the whole batch, with every rank as a group of its own."""
    parallel_state.initialize_model_parallel()
    with_all_data = {"get_data_parallel_world_size": 1, "get_data_parallel_rank": 0}
    saved = {name: getattr(parallel_state, name) for name in with_all_data}
    try:
        for name, value in with_all_data.items():
            setattr(parallel_state, name, lambda value=value: value)
        return train(False, dtype, device)
    finally:
        for name, function in saved.items():
            setattr(parallel_state, name, function)
        parallel_state.destroy_model_parallel()


def split_of(parameter: Tensor) -> tuple[bool, int, int]:
    names = (("tensor_model_parallel", False), ("partition_dim", -1), ("partition_stride", 1))
    return tuple(getattr(parameter, name, default) for name, default in names)


def part_of(whole: Tensor, split: tuple[bool, int, int]) -> Tensor:
    """Return this rank's part of a parameter of the unsplit model."""
    parallel, dim, stride = split
    if not parallel:
        return whole
    ranks, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    return torch.cat(whole.chunk(ranks * stride, dim)[rank::ranks], dim)


def assert_equals_alone(found: Trained, alone: Trained, allowed: float | None = None) -> None:
    """Raise unless both runs start with equal bits and then differ by at most `allowed` of a tensor's largest number.

    The default allows for sums in another order.
    """
    allowed = sum_error(alone.initial[0].dtype, TERMS) if allowed is None else allowed
    replicas, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    for mine, whole, split in zip(found.initial, alone.initial, found.splits, strict=True):
        assert torch.equal(mine, part_of(whole, split))
    pairs = [(mine, whole.chunk(replicas, 1)[replica]) for mine, whole in zip(found.losses, alone.losses, strict=True)]
    for mine, whole in zip([*found.gradients, found.parameters], [*alone.gradients, alone.parameters], strict=True):
        parts = [part_of(each.detach(), split) for each, split in zip(whole, found.splits, strict=True)]
        pairs += zip([each.detach() for each in mine], parts, strict=True)
    for place, (mine, expected) in enumerate(pairs):
        error = float((mine - expected).abs().max() / expected.abs().max())
        assert error <= allowed, f"tensor {place}: off by {error:.2g} of its largest number"


def assert_bit_equal(one: Trained, other: Trained) -> None:
    for mine, others in zip(
        [one.losses, *one.gradients, one.parameters], [other.losses, *other.gradients, other.parameters], strict=True
    ):
        assert all(map(torch.equal, mine, others))
