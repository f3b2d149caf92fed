"""Small models and the step functions that run them in a pipeline schedule."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import _env
from .. import parallel_state
from .._groups.device import parameter_device
from ..pipeline_parallel.utils import average_losses_across_data_parallel_group
from ..tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    model_parallel_cuda_manual_seed,
    scatter_to_sequence_parallel_region,
)
from . import global_vars

TEST_SUCCESS_MESSAGE = ">> passed the test :-)"

LossFunction = Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]


class MyLayer(nn.Module):
    """A linear layer."""

    def __init__(self, hidden_size: int, pre_process: bool, post_process: bool) -> None:
        super().__init__()
        self.pre_process = pre_process
        self.post_process = post_process
        self.layer = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        return self.layer(x)


class _Stage(nn.Module):
    """A pipeline stage whose input is the tensor of `set_input_tensor`, or the argument if that is None.

    `build_model` passes `add_encoder` and `add_decoder` for encoder-decoders. These models have only one part, so both
    are ignored.
    """

    def __init__(
        self, pre_process: bool, post_process: bool, *, add_encoder: bool = False, add_decoder: bool = False
    ) -> None:
        super().__init__()
        self.pre_process = pre_process
        self.post_process = post_process
        self.input_tensor: Tensor | None = None

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor | None] | None) -> None:
        """Set the input from the previous stage: a tensor, or a list whose first element is used."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def _input(self, x: Tensor | None) -> Tensor:
        input_tensor = x if self.input_tensor is None else self.input_tensor
        assert input_tensor is not None, "neither the stage before nor the caller has given an input"
        return input_tensor


class MyModel(_Stage):
    """A stage of one linear layer."""

    def __init__(self, hidden_size: int, pre_process: bool = False, post_process: bool = False, **parts: bool) -> None:
        super().__init__(pre_process, post_process, **parts)
        self.layer = MyLayer(hidden_size, pre_process, post_process)

    def forward(self, x: Tensor | None) -> Tensor:
        """Return the layer's output."""
        return self.layer(self._input(x))


class ToyParallelMLP(_Stage):
    """A stage of two linear layers, four times as wide between them, split over tensor-parallel ranks."""

    def __init__(
        self,
        hidden_size: int,
        pre_process: bool = False,
        post_process: bool = False,
        *,
        sequence_parallel_enabled: bool = False,
        **parts: bool,
    ) -> None:
        super().__init__(pre_process, post_process, **parts)
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.dense_h_to_4h = ColumnParallelLinear(
            hidden_size,
            4 * hidden_size,
            gather_output=False,
            skip_bias_add=True,
            no_async_tensor_model_parallel_allreduce=True,
            sequence_parallel_enabled=sequence_parallel_enabled,
        )
        self.dense_4h_to_h = RowParallelLinear(
            4 * hidden_size, hidden_size, input_is_parallel=True, sequence_parallel_enabled=sequence_parallel_enabled
        )
        self.activation_func = nn.GELU()

    def forward(self, x: Tensor | None) -> Tensor:
        """Map [sequence, batch, hidden] to the same shape.

        With sequence parallelism both are this rank's part of the sequence.
        """
        hidden, bias = self.dense_h_to_4h(self._input(x))
        return self.dense_4h_to_h(self.activation_func(hidden + bias))[0]


def model_provider_func(hidden_size: int, pre_process: bool, post_process: bool, **parts: bool) -> MyModel:
    """Return a MyModel, as `build_model` calls for a stage."""
    return MyModel(hidden_size, pre_process, post_process, **parts)


def mlp_provider_func(hidden_size: int, pre_process: bool, post_process: bool, **parts: bool) -> ToyParallelMLP:
    """Return a ToyParallelMLP, as `build_model` calls for a stage; takes `sequence_parallel_enabled` too."""
    return ToyParallelMLP(hidden_size, pre_process, post_process, **parts)


def process_batch(batch: Any) -> Any:
    """Return the first element of a list, or the batch itself."""
    return batch[0] if isinstance(batch, list) else batch


def _sum_of_outputs(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of the small models, the sum of the output, and its mean over the replicas."""
    loss = output.sum()
    return loss, {"avg": average_losses_across_data_parallel_group([loss])}


def fwd_step_func(batch: Any, model: nn.Module) -> tuple[Tensor, LossFunction]:
    """Return the model's output and the loss function, which sums it."""
    return model(process_batch(batch)), _sum_of_outputs


@dataclass(frozen=True)
class ToyParallelMLPFwdBwdStepFunc:
    """A forward step of a ToyParallelMLP for a batch [batch, sequence, hidden]; see `fwd_step_func`."""

    sequence_parallel_enabled: bool

    def __call__(self, batch: Any, model: nn.Module) -> tuple[Tensor, LossFunction]:
        """Return the model's output for the transposed batch, and the loss function."""
        x = process_batch(batch)
        if isinstance(x, Tensor):
            x = x.transpose(0, 1).contiguous()
            if self.sequence_parallel_enabled:
                x = scatter_to_sequence_parallel_region(x)
        return model(x), _sum_of_outputs


class IdentityLayer(nn.Module):
    """A layer whose output is its parameter of the given size."""

    def __init__(self, size: Any, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(scale * torch.randn(size, dtype=torch.float32, device=parameter_device()))

    def forward(self) -> Tensor:
        """Return the parameter."""
        return self.weight


def set_random_seed(seed: int) -> None:
    """Seed Python's, NumPy's, PyTorch's and the tensor-parallel ranks' random numbers."""
    random.seed(seed)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def initialize_distributed(backend: str = "nccl") -> None:
    """Start the default process group from the launcher's environment and select a GPU.

    Without GPUs, gloo replaces nccl.
    """
    if backend == "ucc":
        parallel_state.check_torch_ucc_availability()
    rank, world_size = _env.rank_and_world_size()
    if torch.cuda.is_available():
        local_rank = global_vars.get_args().local_rank
        torch.cuda.set_device(rank % torch.cuda.device_count() if local_rank is None else local_rank)
    elif backend == "nccl":
        backend = "gloo"
    dist.init_process_group(
        backend,
        init_method=f"tcp://{_env.meeting_point()}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )


def print_separator(message: str) -> None:
    """Print a line with the message in its middle, on the first rank."""
    if dist.get_rank() == 0:
        filler = "-" * ((78 - len(message)) // 2)
        print(f"\n{filler} {message} {filler}", flush=True)
