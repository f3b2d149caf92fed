"""Small models, and the functions that give them to a schedule."""

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
        """The layer's output."""
        return self.layer(x)


class _Stage(nn.Module):
    """A stage of a pipeline: its input is what `set_input_tensor` gave it, or the argument if that is None.

    `build_model` says with `add_encoder` and `add_decoder` which part of a model it wants; these have but one.
    """

    def __init__(
        self, pre_process: bool, post_process: bool, *, add_encoder: bool = False, add_decoder: bool = False
    ) -> None:
        super().__init__()
        self.pre_process = pre_process
        self.post_process = post_process
        self.input_tensor: Tensor | None = None

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor | None] | None) -> None:
        """What the stage before has sent, alone or as the first of a list."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def _input(self, x: Tensor | None) -> Tensor:
        given = x if self.input_tensor is None else self.input_tensor
        assert given is not None, "neither the stage before nor the caller has given an input"
        return given


class MyModel(_Stage):
    """A stage of one linear layer."""

    def __init__(self, hidden_size: int, pre_process: bool = False, post_process: bool = False, **parts: bool) -> None:
        super().__init__(pre_process, post_process, **parts)
        self.layer = MyLayer(hidden_size, pre_process, post_process)

    def forward(self, x: Tensor | None) -> Tensor:
        """The layer's output."""
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
        """[sequence, batch, hidden] to the same; of the sequence this rank's part, if it is split."""
        hidden, bias = self.dense_h_to_4h(self._input(x))
        return self.dense_4h_to_h(self.activation_func(hidden + bias))[0]


def model_provider_func(hidden_size: int, pre_process: bool, post_process: bool, **parts: bool) -> MyModel:
    """A MyModel, as schedules ask for a stage."""
    return MyModel(hidden_size, pre_process, post_process, **parts)


def mlp_provider_func(hidden_size: int, pre_process: bool, post_process: bool, **parts: bool) -> ToyParallelMLP:
    """A ToyParallelMLP, as schedules ask for a stage; `sequence_parallel_enabled` as there."""
    return ToyParallelMLP(hidden_size, pre_process, post_process, **parts)


def process_batch(batch: Any) -> Any:
    """The first of a list, or the batch itself."""
    return batch[0] if isinstance(batch, list) else batch


def _sum_of_outputs(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the small models, and its mean over the replicas."""
    loss = output.sum()
    return loss, {"avg": average_losses_across_data_parallel_group([loss])}


def fwd_step_func(batch: Any, model: nn.Module) -> tuple[Tensor, LossFunction]:
    """The model's output, and the function that makes a loss of it: the sum."""
    return model(process_batch(batch)), _sum_of_outputs


@dataclass(frozen=True)
class ToyParallelMLPFwdBwdStepFunc:
    """A forward step of a ToyParallelMLP with a batch [batch, sequence, hidden]; see `fwd_step_func`."""

    sequence_parallel_enabled: bool

    def __call__(self, batch: Any, model: nn.Module) -> tuple[Tensor, LossFunction]:
        """The model's output for [sequence, batch, hidden], of which it may take a part, and the loss function."""
        x = process_batch(batch)
        if isinstance(x, Tensor):
            x = x.transpose(0, 1).contiguous()
            if self.sequence_parallel_enabled:
                x = scatter_to_sequence_parallel_region(x)
        return model(x), _sum_of_outputs


class IdentityLayer(nn.Module):
    """A parameter of this size, whose values are the output."""

    def __init__(self, size: Any, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(scale * torch.randn(size, dtype=torch.float32, device=parameter_device()))

    def forward(self) -> Tensor:
        """The parameter."""
        return self.weight


def set_random_seed(seed: int) -> None:
    """Seeds Python's, NumPy's and PyTorch's random numbers, and those of the tensor-parallel ranks."""
    random.seed(seed)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def initialize_distributed(backend: str = "nccl") -> None:
    """Starts the default process group from the launcher's environment, and takes a GPU; gloo where there is none."""
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
    """Prints a line with the message in its middle, on the first rank."""
    if dist.get_rank() == 0:
        filler = "-" * ((78 - len(message)) // 2)
        print(f"\n{filler} {message} {filler}", flush=True)
