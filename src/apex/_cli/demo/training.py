"""Training of one model at one opt level, or by `apex.boost`."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from ... import amp, graphs
from ..._memory.storages import LiveStorages
from ...amp.frontend import opt_levels
from ...booster import boost
from .tasks import Task, loss_of

BOOST = "boost"
LEVELS = (BOOST, *sorted(opt_levels))

# Steps of a rehearsal, which creates the optimizer's state and compiles kernels before anything is measured. On a GPU
# the fourth step of a session is captured in a CUDA graph, which the later steps replay.
_REHEARSED = 2


@dataclass
class Run:
    """A training run, with the loss, the loss scale and the duration in seconds of every step."""

    model: str
    level: str
    parameters: int = 0
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    skipped: int = 0
    peak_memory: int = 0  # bytes
    report: str = ""  # of `apex.boost`: what each stage did

    @property
    def final_loss(self) -> float:
        """The mean of the last fifth of the run, ten steps at most, because a single batch is noisy."""
        return fmean(self.losses[-max(1, min(10, len(self.losses) // 5)) :])

    @property
    def seconds_per_step(self) -> float:
        return median(self.seconds)

    @property
    def finite(self) -> bool:
        return all(math.isfinite(loss) for loss in self.losses)


class _Session:
    """A model and its optimizer after `amp.initialize` or `apex.boost`."""

    def __init__(self, task: Task, level: str) -> None:
        steps = len(task.batches)
        model = task.new_model()
        optimizer = task.make_optimizer(model.parameters())
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_learning_rate_factor, steps))
        self._boost = None
        self.model: Any
        self.optimizer: Any
        if level == BOOST:
            self.model, self.optimizer, self._boost = boost(model, optimizer, device=task.batches[0][0].device)
            self._captured = self._boost(self._boosted_step)
        else:
            self.model, self.optimizer = amp.initialize(
                model, optimizer, opt_level=level, verbosity=0, scale_window=scale_window(steps)
            )
            self._captured = graphs.capture(self._train_step)

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        loss = self._captured(inputs, targets)
        self.schedule.step()
        return loss.item()  # waits for the device

    def _train_step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(self.model(inputs), targets)
        self.optimizer.zero_grad()
        with amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
        self.optimizer.step()
        return loss

    def _boosted_step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(self.model(inputs), targets)
        self.optimizer.zero_grad()
        self.optimizer.backward(loss)
        self.optimizer.step()
        return loss

    @property
    def report(self) -> str:
        return "" if self._boost is None else str(self._boost.report())

    @property
    def scale(self) -> float:
        if self._boost is not None:
            return 1.0
        return amp.state_dict()["loss_scaler0"]["loss_scale"]


def scale_window(steps: int) -> int:
    """Return the number of steps without overflow after which a dynamic loss scale doubles.

    It is below amp's 2000, so that a short run shows a doubling, and not lower still, because a scale that grows too
    far costs a skipped step, which would make float16 look worse than it is in a run this short.
    """
    return max(1, steps // 3)


def _learning_rate_factor(steps: int, step: int) -> float:
    """Return the factor of the learning rate: linear warm-up over the first fifth of the run, then a cosine decay."""
    progress = (step + 1) / (steps + 1)
    return min(progress / 0.2, 0.5 * (1 + math.cos(math.pi * progress)))


def train(task: Task, level: str, on_step: Callable[[float], None] = lambda loss: None) -> Run:
    """Train a new model at an opt level and call `on_step` with every loss. Shut amp down before and after.

    On a CPU it uses one thread. So small a model gains nothing from more, and threads that wait for each other would
    cause most of the difference between two runs.
    """
    device = task.batches[0][0].device
    run = Run(task.name, level)
    if device.type == "cuda":
        _rehearse(task, level)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        _train(task, run, on_step)
        run.peak_memory = torch.cuda.max_memory_allocated(device) - before
    else:
        with _one_thread():
            with LiveStorages(lambda tensor: True) as storages:  # counting takes time: not in the timed steps
                _rehearse(task, level)
            run.peak_memory = storages.peak
            _train(task, run, on_step)
    return run


def memory_in_words(device: torch.device) -> str:
    """Return a description of the memory that is measured as a run's peak on `device`."""
    if device.type == "cuda":
        return "the most that PyTorch had allocated on the GPU at once, beyond the data"
    return "all tensors alive at once, counted; without the scratch space of operators"


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _rehearse(task: Task, level: str) -> None:
    amp.shutdown()
    session = _Session(task, level)
    try:
        for inputs, targets in task.batches[:_REHEARSED]:
            session.step(inputs, targets)
    finally:
        amp.shutdown()


def _train(task: Task, run: Run, on_step: Callable[[float], None]) -> None:
    session = _Session(task, run.level)
    run.parameters = session.parameters
    try:
        for inputs, targets in task.batches:
            scale = session.scale
            start = time.perf_counter()
            loss = session.step(inputs, targets)
            run.seconds.append(time.perf_counter() - start)
            run.losses.append(loss)
            run.scales.append(scale)
            run.skipped += session.scale < scale
            on_step(loss)
        run.report = session.report
    finally:
        amp.shutdown()
