"""The memory of a training step: estimated with tensors that have none, measured on a GPU, and the batch that fits."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..transformer import parallel_state
from ..transformer.tensor_parallel import model_parallel_cuda_manual_seed
from .tasks import find_task, parse_shape, task_of
from .training import Settings, Task, trained

MIB = 1 << 20
# cuBLAS keeps a workspace for each thread that multiplies matrices, of which a training step has two: 32 MiB on compute
# capability 9, else 8.125 MiB; and cuBLASLt has one of 1 MiB. Found on an H200 with PyTorch 2.11.
_WORKSPACE, _WORKSPACE_OF_HOPPER = 17 * MIB + 256 * 1024, 65 * MIB
# Beside what tensors take: the driver's context and kernels (767 MiB on an H200), and what the allocator loses to gaps:
# 1 to 22% of the peak in benchmarks/results/nvidia_h200-memory.json, 10% in the middle.
CONTEXT, GAPS = 768 * MIB, 0.1


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one training step.

    `fixed` is all that is there when the optimizer begins its step: parameters, buffers, gradients, masters and their
    gradients, optimizer state, and in `buckets` what is none of these, such as the flat buffers of
    DistributedDataParallel and ZeRO. `activations` is what the forward pass keeps for the backward pass. `peak` is the
    most at any time of a step, of `fixed`, activations and temporaries. All of these are tensors; `workspace` is what
    cuBLAS allocates beside them. `margin` is for the driver's context and the allocator's gaps, and only a guess.
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
        """What a GPU needs beyond `peak` and `workspace`."""
        return CONTEXT + int(GAPS * self.peak)

    @property
    def total(self) -> int:
        """What a GPU must have."""
        return self.peak + self.workspace + self.margin


@dataclasses.dataclass(frozen=True)
class Measured:
    """Bytes that a real step took on a GPU, workspaces included: as `Memory`; and what the allocator had reserved."""

    fixed: int
    activations: int
    peak: int
    reserved: int


def estimate_memory(
    factory: Callable[[], Any] | str,
    input_shapes: Sequence[str] = (),
    *,
    opt_level: str = "O0",
    optimizer: str = "FusedAdam",
    batch: int = 1,
    zero: bool = False,
    world: int = 1,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    checkpointing: bool = False,
) -> Memory:
    """What one process of a training run needs of its GPU's memory; nothing is computed and no GPU is needed.

    - `factory`: a function that returns a model, or a model and its loss, a function of model, batch size and device;
      or a name as `apex memory` takes it.
    - `input_shapes`: the model's inputs where the factory returns no loss: "3x224x224", "1024:int64"; without the
      batch.
    - `opt_level`, `optimizer`: "O0" to "O5"; a class of `apex.optimizers`, or MODULE:CLASS, and options:
      "FusedSGD,momentum=0.9".
    - `batch`: rows of a (micro-)batch of this process.
    - `zero`: `DistributedFusedAdam` divides the state of FusedAdam among `world` processes.
    - `tensor_parallel`, `pipeline_parallel`: sizes that `apex.transformer.parallel_state` has when the factory is
      called, on the first of `world` ranks, which divide the rest of `world` among replicas. The first stage of a
      pipeline keeps the activations of as many micro-batches as there are stages.
    - `checkpointing`: the model's blocks are computed again in the backward pass.
    """
    inputs = [parse_shape(shape) for shape in input_shapes]
    task = find_task(factory, inputs) if isinstance(factory, str) else task_of(factory, inputs)
    settings = Settings(opt_level, optimizer, batch, zero, world, tensor_parallel, pipeline_parallel, checkpointing)
    return estimate(task, settings)


def estimate(task: Task, settings: Settings) -> Memory:
    """The memory of a step with these settings."""
    with _world(settings), trained(task, settings) as training:
        storages = training.storages
        assert storages is not None
        training.step()  # after which the optimizer has state
        storages.peak = before = storages.live
        seen: dict[str, Any] = {}
        training.step(
            lambda: seen.update(activations=storages.live - before),
            lambda: seen.update(training.owners(), fixed=storages.live),
        )
        buckets = seen["fixed"] - seen.pop("rounded")
        return Memory(**seen, buckets=buckets, peak=storages.peak, workspace=_workspace())


def measure(task: Task, settings: Settings, device: torch.device) -> Measured:
    """What the same step takes on a GPU, measured in the third one."""
    if settings.world > 1 or settings.zero:
        raise ValueError("one process is measured, without ZeRO and with a world of 1")
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # of an earlier run, which would count as another's
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
    """The largest batch whose step fits into `limit` bytes, to within 1%; 0 if no row does, None if any do."""

    def needed(batch: int) -> int:
        return estimate(task, dataclasses.replace(settings, batch=batch)).total

    first = settings.batch
    known = {batch: needed(batch) for batch in (first, 2 * first)}
    slope = max(1.0, (known[2 * first] - known[first]) / first)
    while True:
        fits = max((batch for batch, total in known.items() if total <= limit), default=0)
        above = min((batch for batch, total in known.items() if total > limit), default=0)
        if fits > first and fits >= first + limit - known[first]:
            return None  # as many rows as bytes were left, so that the loss does not look at the size of a batch
        step = max(1, fits // 100)
        if above and above - fits <= step:
            return fits
        # Memory grows with the batch along a line, so that the next guess is mostly right.
        guess = max(fits + step, first + int((limit - known[first]) / slope))
        guess = guess if not above or guess < above else (fits + above) // 2
        known[guess] = needed(guess)


def _workspace() -> int:
    hopper = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] == 9
    return _WORKSPACE_OF_HOPPER if hopper else _WORKSPACE


@contextlib.contextmanager
def _world(settings: Settings) -> Iterator[None]:
    """A process group of so many processes of which only this one exists; its collectives do nothing."""
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
