"""Training steps of a tiny GPT, in one process and split over processes in any layout."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo  # by the process that divides: optimizers import it, which takes seconds in each of eight
import torch.distributed as dist
from torch import Tensor, nn

from apex._distributed import exchange
from apex._distributed.experts import is_expert
from apex.optimizers import FusedSGD
from apex.transformer import finalize_model_grads, parallel_state
from apex.transformer._groups.device import parameter_device
from apex.transformer.context_parallel import get_batch_on_this_cp_rank
from apex.transformer.enums import ModelType
from apex.transformer.pipeline_parallel import build_model, utils
from apex.transformer.pipeline_parallel.schedules import forward_backward_no_pipelining
from apex.transformer.testing.standalone_gpt import GPTModel, gpt_model_provider
from apex.transformer.testing.standalone_transformer_lm import TransformerConfig
from tests.support.first_rank import from_first_rank
from tests.support.grids import full_grids
from tests.transformer.block import split_of
from tests.transformer.pipeline_parallel.toy import STEPS

LENGTH, WORDS = 16, 64
# The second step has other parameters and a momentum.
TRAINING_STEPS = 5 if full_grids() else 2
# In the environment: of how many processes all layouts are run, with eight microbatches each.
WHOLE = "APEX_TEST_WHOLE_GRID"


class Layout(NamedTuple):
    """The split of a model: numbers of tensor-parallel ranks, stages and chunks.

    The remaining processes are replicas.
    """

    tensor: int = 1
    pipeline: int = 1
    schedule: str = "no_pipelining"
    chunks: int = 1
    sequence: bool = False
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None

    @property
    def layers(self) -> int:
        """Return the number of layers: at least four, and one for each stage."""
        return max(4, self.pipeline * self.chunks)

    def __str__(self) -> str:
        sequence = "-sequence" if self.sequence else ""
        context = f"-cp{self.context}" if self.context > 1 else ""
        experts = f"-ep{self.expert}-etp{self.expert_tensor}" if self.expert > 1 or self.expert_tensor else ""
        return f"tp{self.tensor}{sequence}-pp{self.pipeline}-{self.schedule}-vp{self.chunks}{context}{experts}"


class Trained(NamedTuple):
    """The losses of the microbatches and all gradients by name of each step, and the final parameters."""

    losses: list[list[Tensor]]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]


def microbatches() -> int:
    """Return the microbatches of a step, over all replicas."""
    return 8 if WHOLE in os.environ else min(4, dist.get_world_size())


def config_of(layers: int, **options: Any) -> TransformerConfig:
    defaults: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": 32,
        "num_attention_heads": 8,
        "vocab_size": WORDS,
        "max_position_embeddings": LENGTH,
        "init_method_std": 0.1,
    }
    return TransformerConfig(**{**defaults, **options})


def step_function(batch: list[Tensor], model: nn.Module) -> Any:
    def loss(output: Tensor) -> tuple[Tensor, Tensor]:
        return output.mean(), output.detach().mean()

    # A context-parallel rank has two chunks of the words, and of the labels, which are the words shifted by one.
    part = get_batch_on_this_cp_rank({"words": batch[0][:, :-1], "labels": batch[0][:, 1:]})
    return model(part["words"], labels=part["labels"]), loss


def train(
    model: list[nn.Module], schedule: Any, replica: int = 0, replicas: int = 1, data_parallel: bool | None = None
) -> Trained:
    """Run steps of `schedule` on this replica's microbatches."""
    total = microbatches()
    count = total // replicas
    utils._reconfigure_microbatch_calculator(1, None, total, 1, replicas)
    # Chunks of a process that are first and last stage have the embedding both.
    named = [pair for chunk in model for pair in chunk.named_parameters()]
    every = [parameter for _, parameter in named]
    parameters = dict(named)
    # Not Adam: it divides small gradients by their size, and with it what rounding has done to them.
    optimizer = FusedSGD(every, lr=0.01, momentum=0.9, weight_decay=0.01)
    numbers = torch.Generator().manual_seed(6)
    losses, gradients = [], []
    # In an odd number of steps updates of a router's bias cannot cancel out.
    for _ in range(TRAINING_STEPS | model[0].config.moe_router_enable_expert_bias):
        words = torch.randint(0, WORDS, (total, LENGTH + 1), generator=numbers).to(parameter_device())
        optimizer.zero_grad()
        mine = words[replica * count : (replica + 1) * count]
        losses.append(schedule(step_function, [mine], model, forward_only=False))
        finalize_model_grads(model, data_parallel=data_parallel)
        assert all(torch.equal(p.grad, parameters[name].grad) for name, p in named)
        gradients.append({name: p.grad.detach().clone() for name, p in parameters.items()})
        optimizer.step()
    biases = {name: buffer for chunk in model for name, buffer in chunk.named_buffers()}  # of routers
    return Trained(losses, gradients, {**parameters, **biases})


def train_alone(config: TransformerConfig) -> Trained:
    """Train in one process, with two copies of the embedding as in a pipeline; their gradients are summed.

    The other processes, which are replicas, may do nothing meanwhile: routers count the tokens of this one.
    """
    alone = parallel_state.get_tensor_model_parallel_group()
    assert dist.get_world_size(alone) == 1
    half = config.num_layers // 2
    model = [
        GPTModel(post_process=False, config=config, layers=range(half)),
        GPTModel(pre_process=False, config=config, layers=range(half, config.num_layers)),
    ]
    model = [each.to(parameter_device()) for each in model]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_state, "get_tensor_and_data_parallel_group", lambda **_: alone)
        return train(model, forward_backward_no_pipelining, data_parallel=False)


def train_in(layout: Layout, **options: Any) -> Trained:
    """Train on the existing groups, which must have the sizes of `layout`."""
    config = config_of(layout.layers, sequence_parallel=layout.sequence, **options)
    folded = layout.schedule == "zb_v"
    model = build_model(
        gpt_model_provider,
        False,
        None if layout.chunks == 1 else layout.chunks,
        ModelType.encoder_or_decoder,
        placement="v" if folded else "loop",
        config=config,
        folded=folded,
    )
    schedule = STEPS.get(layout.schedule, forward_backward_no_pipelining)
    return train(
        model, schedule, parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    )


@contextlib.contextmanager
def groups(layout: Layout) -> Iterator[None]:
    chunks = None if layout.chunks == 1 else layout.chunks
    parallel_state.initialize_model_parallel(
        layout.tensor,
        layout.pipeline,
        chunks,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


_alone: dict[Any, Trained] = {}


def reference(layers: int, **options: Any) -> Trained:
    """Return the results of one process, computed by rank 0, sent to all and cached."""
    key = (layers, *sorted(options.items()))
    if key not in _alone:
        with groups(Layout()):
            _alone[key] = from_first_rank(lambda: train_alone(config_of(layers, **options)))
    return _alone[key]


def part_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of a tensor of the unsplit model."""
    parallel, dim, stride = split_of(parameter)
    if is_expert(parameter):
        ranks, rank = (
            parallel_state.get_expert_model_parallel_world_size(),
            parallel_state.get_expert_model_parallel_rank(),
        )
        whole = whole.chunk(ranks)[rank]
        ranks, rank = (
            parallel_state.get_expert_tensor_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
        return torch.cat(whole.chunk(ranks * stride, dim)[rank::ranks], dim)
    ranks, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    return torch.cat(whole.chunk(ranks * stride, dim)[rank::ranks], dim) if parallel else whole


def worst_difference(found: Trained, alone: Trained) -> tuple[float, str]:
    """Return the largest difference, relative to its tensor's largest number, and the tensor's name."""
    replicas, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    count = microbatches() // replicas
    context = parallel_state.get_context_parallel_group()
    pairs: list[tuple[str, Tensor, Tensor]] = []
    for step, (mine, whole) in enumerate(zip(found.losses, alone.losses, strict=True)):
        expected = whole[replica * count : (replica + 1) * count]
        assert len(mine) in (0, count)
        # The loss of a context-parallel rank is the mean of its own words' losses.
        mine = [exchange.sum_over(one, context, "the losses") / dist.get_world_size(context) for one in mine]
        pairs += [(f"loss of step {step}", one, other) for one, other in zip(mine, expected, strict=False)]
    sets = [*zip(found.gradients, alone.gradients, strict=True), (found.parameters, alone.parameters)]
    for step, (mine, whole) in enumerate(sets):
        for name, tensor in mine.items():
            expected = part_of(whole[name], found.parameters[name])
            pairs.append((f"{name}, step {step}", tensor.detach(), expected.detach()))
    smallest = torch.finfo(torch.float32).tiny  # an expert may have seen no token
    return max(
        (float((one - other).abs().max() / other.abs().max().clamp(min=smallest)), name) for name, one, other in pairs
    )
