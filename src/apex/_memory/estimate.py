"""The memory of a training step: estimated with fake tensors, measured on a GPU, and the largest batch that fits."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .._arguments import Count, checked
from ..transformer import parallel_state
from ..transformer.tensor_parallel import model_parallel_cuda_manual_seed
from .tasks import find_task, parse_shape, task_of
from .training import Settings, Task, trained

MIB = 1 << 20
# cuBLAS keeps a workspace for each thread that multiplies matrices, and a training step has two such threads: 32 MiB on
# compute capability 9, else 8.125 MiB each; cuBLASLt has one of 1 MiB. Measured on an H200 with PyTorch 2.11.
_WORKSPACE, _WORKSPACE_OF_HOPPER = 17 * MIB + 256 * 1024, 65 * MIB
# Memory beyond tensors: the driver's context and kernels (767 MiB on an H200), and the allocator's gaps:
# 1 to 22% of the peak in benchmarks/results/nvidia_h200-memory.json, with a median of 10%.
CONTEXT, GAPS = 768 * MIB, 0.1


@dataclasses.dataclass(frozen=True)
class Memory:
    """The bytes that one training step needs.

    `fixed` is the memory in use when the optimizer begins its step: parameters, buffers, gradients, masters and their
    gradients, optimizer state, and `buckets` for all other tensors, such as the flat buffers of DistributedDataParallel
    and ZeRO. `activations` are the tensors that the forward pass saves for the backward pass. `peak` is the most at any
    time of a step: `fixed`, activations and temporaries. All of these are tensors; `workspace` is cuBLAS's memory
    besides. `margin` is a guess of the driver's context and the allocator's gaps.
    """

    parameters: int
    buffers: int
    gradients: int
    masters: int
    state: int
    buckets: int
    fixed: int
    activations: int
    peak: int
    workspace: int

    @property
    def margin(self) -> int:
        """Return the bytes that a GPU needs beyond `peak` and `workspace`."""
        return CONTEXT + int(GAPS * self.peak)

    @property
    def total(self) -> int:
        """Return the bytes that a GPU must have."""
        return self.peak + self.workspace + self.margin


@dataclasses.dataclass(frozen=True)
class Measured:
    """The bytes that a real step took on a GPU, including workspaces: fields as in `Memory`, and `reserved` memory."""

    fixed: int
    activations: int
    peak: int
    reserved: int


@checked
def estimate_memory(
    factory: Callable[[], Any] | str,
    input_shapes: Sequence[str] = (),
    *,
    opt_level: str = "O0",
    optimizer: str = "FusedAdam",
    batch: Count = 1,
    zero: bool = False,
    world: Count = 1,
    tensor_parallel: Count = 1,
    pipeline_parallel: Count = 1,
    checkpointing: bool = False,
) -> Memory:
    """Estimate the GPU memory that one process of a training run needs; computes nothing and needs no GPU.

    - `factory`: a function that returns a model, or a model and its loss, a function of model, batch size and device;
      or a name in the format of `apex memory`.
    - `input_shapes`: the model's inputs if the factory returns no loss, without the batch: "3x224x224", "1024:int64".
    - `opt_level`, `optimizer`: "O0" to "O5"; a class of `apex.optimizers`, or MODULE:CLASS, and options:
      "FusedSGD,momentum=0.9".
    - `batch`: rows of a (micro-)batch of this process.
    - `zero`: `DistributedFusedAdam` shards the state of FusedAdam over `world` processes.
    - `tensor_parallel`, `pipeline_parallel`: the sizes that `apex.transformer.parallel_state` has when the factory is
      called, on the first of `world` ranks; the remaining factor of `world` is data parallel. The first stage of a
      pipeline keeps the activations of as many micro-batches as there are stages.
    - `checkpointing`: the backward pass recomputes the model's blocks.
    """
    inputs = [parse_shape(shape) for shape in input_shapes]
    task = find_task(factory, inputs) if isinstance(factory, str) else task_of(factory, inputs)
    settings = Settings(opt_level, optimizer, batch, zero, world, tensor_parallel, pipeline_parallel, checkpointing)
    return estimate(task, settings)


def estimate(task: Task, settings: Settings) -> Memory:
    """Return the memory of a step with these settings."""
    with _world(settings), trained(task, settings) as training:
        storages = training.storages
        assert storages is not None
        training.step()  # creates the optimizer's state
        storages.peak = before = storages.live
        seen: dict[str, Any] = {}
        training.step(
            lambda: seen.update(activations=storages.live - before),
            lambda: seen.update(training.owners(), fixed=storages.live),
        )
        buckets = seen["fixed"] - seen.pop("rounded")
        return Memory(**seen, buckets=buckets, peak=storages.peak, workspace=_workspace())


def measure(task: Task, settings: Settings, device: torch.device) -> Measured:
    """Measure the memory of a training step on a GPU; the first two steps are not measured."""
    if settings.world > 1 or settings.zero:
        raise ValueError("one process is measured, without ZeRO and with a world of 1")
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # workspaces of an earlier run would be counted as memory of others
    others = torch.cuda.memory_allocated(device)
    with trained(task, settings, device) as training:
        for _ in range(2):
            training.step()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        seen: dict[str, int] = {}
        training.step(
            lambda: seen.update(activations=torch.cuda.memory_allocated(device) - before),
            lambda: seen.update(fixed=torch.cuda.memory_allocated(device) - others),
        )
        peak = torch.cuda.max_memory_allocated(device) - others
        return Measured(**seen, peak=peak, reserved=torch.cuda.max_memory_reserved(device))


def largest_batch(task: Task, settings: Settings, limit: int) -> int | None:
    """Return the largest batch whose step fits into `limit` bytes, to within 1%; 0 if none does, None if all do."""

    def needed(batch: int) -> int:
        return estimate(task, dataclasses.replace(settings, batch=batch)).total

    first = settings.batch
    known = {batch: needed(batch) for batch in (first, 2 * first)}
    slope = max(1.0, (known[2 * first] - known[first]) / first)
    while True:
        fits = max((batch for batch, total in known.items() if total <= limit), default=0)
        above = min((batch for batch, total in known.items() if total > limit), default=0)
        if fits > first and fits >= first + limit - known[first]:
            return None  # the batch has as many rows as bytes were left: the loss does not depend on the batch size
        step = max(1, fits // 100)
        if above and above - fits <= step:
            return fits
        # Memory is linear in the batch size, so that the next guess is mostly right.
        guess = max(fits + step, first + int((limit - known[first]) / slope))
        guess = guess if not above or guess < above else (fits + above) // 2
        known[guess] = needed(guess)


def _workspace() -> int:
    hopper = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] == 9
    return _WORKSPACE_OF_HOPPER if hopper else _WORKSPACE


@contextlib.contextmanager
def _world(settings: Settings) -> Iterator[None]:
    """Initialize a fake process group of `settings.world` processes; its collectives do nothing."""
    sizes = (settings.tensor_parallel, settings.pipeline_parallel)
    if settings.world == 1 and not settings.zero:
        yield
        return
    if dist.is_initialized():
        raise RuntimeError("a process group exists in this process; memory of several is estimated without one")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=settings.world, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(*sizes)
        model_parallel_cuda_manual_seed(0)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
