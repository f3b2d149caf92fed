"""A sequence of layers as pipeline stages, its training step in one process, and the same step in a pipeline.

Where there is a GPU all processes share it, and tensors go through the host's memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from apex.transformer import parallel_state
from apex.transformer._groups.device import parameter_device
from apex.transformer.pipeline_parallel import build_model, utils
from apex.transformer.pipeline_parallel._schedule import Placement
from apex.transformer.pipeline_parallel.schedules import (
    _forward_backward_pipelining_with_interleaving,
    forward_backward_no_pipelining,
    forward_backward_pipelining_without_interleaving,
    forward_backward_zero_bubble,
)
from tests.support.first_rank import from_first_rank

HIDDEN, SAMPLES, LENGTH = 6, 2, 3
STEPS: dict[str, Callable[..., list[Any]]] = {
    "1f1b": forward_backward_pipelining_without_interleaving,
    "interleaved": _forward_backward_pipelining_with_interleaving,
    "zb_h1": forward_backward_zero_bubble,
    "zb_v": forward_backward_zero_bubble,
}


class Layer(nn.Module):
    """The index-th layer of a model, with the same weights wherever it is made; some layers use a weight twice."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(100 + index)
        self.first, self.norm, self.second = nn.Linear(HIDDEN, 8), nn.LayerNorm(8), nn.Linear(8, HIDDEN)
        self.between = nn.Linear(8, 8)
        self.repeats = 2 if index % 4 == 0 else 1

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x))
        for _ in range(self.repeats):
            hidden = torch.tanh(self.between(hidden))
        return x + self.second(hidden)


class Part(nn.Module):
    """A chunk of consecutive layers."""

    def __init__(self, indices: range, pre_process: bool = True, post_process: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): Layer(index) for index in indices})
        self.ends = (pre_process, post_process)
        self.received: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        assert isinstance(tensors, list)
        assert (tensors[0] is None) == self.ends[0]
        self.received = tensors[0]

    def forward(self, x: Tensor | None) -> Tensor:
        x = x if self.received is None else self.received
        for layer in self.layers.values():
            x = layer(x)
        return x


def step_function(batch: list[Tensor], model: nn.Module) -> Any:
    def loss(output: Tensor) -> tuple[Tensor, Tensor]:
        value = (output.float() - batch[1].transpose(0, 1).float()).square().mean()
        return value, value.detach()

    return model(batch[0].transpose(0, 1).contiguous()), loss


def batch_of(microbatches: int, seed: int = 7) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (microbatches * SAMPLES, LENGTH, HIDDEN)
    return [torch.randn(shape, generator=generator).to(parameter_device()) for _ in range(2)]


def set_microbatches(microbatches: int, replicas: int = 1) -> None:
    utils._reconfigure_microbatch_calculator(1, None, microbatches * SAMPLES * replicas, SAMPLES, replicas)


class Whole(NamedTuple):
    """The parameters and the gradients of all layers, by name."""

    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor | None]

    @classmethod
    def of(cls, model: nn.Module) -> Whole:
        named = dict(model.named_parameters())
        return cls({name: param.detach() for name, param in named.items()}, {n: p.grad for n, p in named.items()})


def in_one_process(layers: int, microbatches: int, **options: Any) -> tuple[list[Tensor], Whole]:
    """Return the losses, parameters and gradients without a pipeline, which the first process computes for all."""
    set_microbatches(microbatches)

    def run() -> tuple[list[Tensor], Whole]:
        model = Part(range(layers)).to(parameter_device())
        losses = forward_backward_no_pipelining(
            step_function, batch_of(microbatches), model, **{"forward_only": False, **options}
        )
        return losses, Whole.of(model)

    return from_first_rank(run)


@contextlib.contextmanager
def pipeline(ranks: int, chunks: int | None, tensor: int = 1, **options: Any) -> Iterator[None]:
    parallel_state.initialize_model_parallel(tensor, ranks, chunks, **options)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def parts_of(name: str, chunks: int, layers_per_stage: int, wrap: bool = False) -> list[nn.Module]:
    """Return this rank's chunks of a model."""
    ranks = parallel_state.get_pipeline_model_parallel_world_size()
    placement = Placement(ranks, chunks, name == "zb_v")
    rank = parallel_state.get_pipeline_model_parallel_rank()
    made = iter(range(chunks))

    def provide(pre_process: bool, post_process: bool) -> Part:
        first = placement.stage(rank, next(made)) * layers_per_stage
        return Part(range(first, first + layers_per_stage), pre_process, post_process)

    virtual = None if chunks == 1 else chunks
    return build_model(provide, wrap, virtual, placement="v" if name == "zb_v" else "loop")


def assert_same_gradients(model: list[nn.Module], whole: Whole) -> None:
    """Assert that the gradients of all parameters of this rank are bitwise equal."""
    seen = 0
    for part in utils.unwrap_model(model):
        for name, param in part.named_parameters():
            assert torch.equal(param, whole.parameters[name]), name
            assert param.grad is not None, name
            expected = whole.gradients[name]
            assert expected is not None, name
            assert torch.equal(param.grad, expected), (name, param.grad - expected)
            seen += 1
    assert seen or not model


SHAPE = (LENGTH, SAMPLES, HIDDEN)
