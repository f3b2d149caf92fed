"""For the `Trainer` of Hugging Face transformers: fused modules and optimizers, and steps captured in CUDA graphs."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .._fuse import Report, fuse
from ..graphs import CapturedStep
from ..ops._graph import CudaGraphs

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError("apex.integrations.transformers needs transformers: pip install transformers") from error

__all__ = ["CapturedStepMixin", "FuseCallback"]


class FuseCallback(TrainerCallback):
    """A callback that calls `apex.fuse` on the model and the optimizer of a `Trainer`, or of a trainer of TRL.

        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[FuseCallback()])

    The model is fused when the `Trainer` has been made, before it is compiled or wrapped. The optimizer is fused when
    the training begins, unless `optimizer` is False. `report` and `optimizer_report` are the reports of `apex.fuse`.
    A causal language model then returns no logits in training; evaluation is not changed.
    """

    def __init__(self, optimizer: bool = True, verbose: bool = False) -> None:
        self._fuses_optimizer, self._verbose = optimizer, verbose
        self.report: Report | None = None
        self.optimizer_report: Report | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Fuse the model."""
        if model is not None:
            self.report = fuse(model, verbose=self._verbose)

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Fuse the optimizer, inside of the wrapper that accelerate has put around it."""
        inner = getattr(optimizer, "optimizer", optimizer)
        if self._fuses_optimizer and isinstance(inner, torch.optim.Optimizer):
            self.optimizer_report = fuse(inner, verbose=self._verbose)


class CapturedStepMixin:
    """A base class, before `Trainer`, that captures the forward and backward pass of each batch in a CUDA graph.

        class CapturedTrainer(CapturedStepMixin, Trainer):
            pass

    The first batches of each shape run as they are, later ones are replays (`apex.graphs.capture`). Clipping, the
    optimizer and the scheduler stay outside. `captured_step` is the captured function: its `report()` counts graphs and
    replays, and its `reason` says why a step cannot be captured. Python code of `compute_loss` does not run in a
    replay. With several processes or GPUs, batches run as they are.
    """

    graphs: ClassVar[Any] = CudaGraphs  # makes the backend of captures; tests replace it
    captured_step: CapturedStep | None = None
    _captured_model: nn.Module | None = None

    def training_step(self: Any, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Return the loss of a batch, and add to the gradients."""
        if self.args.world_size > 1 or self.args.n_gpu > 1:
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        if self.captured_step is None or self._captured_model is not model:
            self._captured_model, self.captured_step = model, self._capture(model)
        model.train()  # no replay does it
        device_inputs = dict(self._prepare_inputs(inputs))
        if isinstance(num_items_in_batch, int):  # a number would be frozen in the graph
            num_items_in_batch = torch.tensor(num_items_in_batch, dtype=torch.int64, device=self.args.device)
        parts = getattr(self, "current_gradient_accumulation_steps", None)
        return self.captured_step(device_inputs, num_items_in_batch, parts).clone()

    def _capture(self, model: nn.Module) -> CapturedStep:
        plain_step = super().training_step  # type: ignore[misc]

        def training_step(inputs: Any, num_items_in_batch: Any, parts: int | None) -> Tensor:
            # The loss may be divided by the number of accumulated batches, so each number gets a graph of its own.
            return plain_step(model, inputs, num_items_in_batch)

        return CapturedStep(training_step, backend=self.graphs())
