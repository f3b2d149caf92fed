"""`FuseCallback` puts fused modules and a fused optimizer into the model of a Hugging Face `Trainer`."""

from __future__ import annotations

from typing import Any

import torch

from .._fuse import Report, fuse

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError("apex.integrations.transformers needs transformers: pip install transformers") from error

__all__ = ["FuseCallback"]


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
