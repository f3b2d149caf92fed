"""A small model trained by one function, eagerly or captured, with everything that must come out equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from apex import amp
from apex.graphs import CapturedStep
from apex.optimizers import FusedAdam


def small_model(device: str, dropout: float = 0.2) -> nn.Sequential:
    """Return a model of linear layers, a batch norm and dropout."""
    torch.manual_seed(0)
    layers = (nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 4))
    return nn.Sequential(*layers).to(device)


def batches(device: str, count: int, size: int = 16) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        inputs = torch.randn(size, 8, generator=generator)
        yield inputs.to(device), (inputs[:, :4] - inputs[:, 4:]).to(device)


class Training:
    """A model, its optimizer, a schedule, and a step: `captured`, or a plain function where that is None."""

    def __init__(
        self,
        captured: Callable[[Callable[..., Any]], CapturedStep] | None,
        level: str | None = None,
        make: Callable[[Any], Any] = lambda params: FusedAdam(params, lr=0.01),
        device: str = "cuda",
        schedule: bool = True,
        clip: bool = True,
        dropout: float = 0.2,
        wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
        **options: Any,
    ) -> None:
        self.device = device
        self.model: Any = small_model(device, dropout)
        self.optimizer = make(self.model.parameters())
        if level is not None:
            self.model, self.optimizer = amp.initialize(
                self.model, self.optimizer, opt_level=level, verbosity=0, scale_window=9, **options
            )
        self.model = wrap(self.model)
        self.level, self.clip = level, clip
        self.schedule: Any = None
        if schedule:
            rate = lambda step: 0.1 + 0.9 * math.cos(step / 25) ** 2  # noqa: E731
            self.schedule = torch.optim.lr_scheduler.LambdaLR(getattr(self.optimizer, "optim", self.optimizer), rate)
        self.step: Any = self.train_step if captured is None else captured(self.train_step)
        self.losses: list[Tensor] = []
        torch.manual_seed(7)

    def train_step(self, inputs: Tensor, targets: Tensor, factor: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(inputs).float(), targets) * factor
        if self.level is None:
            loss.backward()
        else:
            with amp.scale_loss(loss, self.optimizer) as scaled_loss:
                scaled_loss.backward()
        if self.clip:
            nn.utils.clip_grad_norm_(amp.master_params(self.optimizer), 1.0)
        self.optimizer.step()
        return loss

    def run(self, steps: int, overflows: tuple[int, ...] = (), first: int = 0) -> Training:
        for index, (inputs, targets) in enumerate(batches(self.device, first + steps)):
            if index >= first:
                factor = torch.tensor(math.inf if index in overflows else 1.0, device=self.device)
                self.losses.append(self.step(inputs, targets, factor).detach().clone())
                if self.schedule is not None:
                    self.schedule.step()
        return self

    def outcome(self) -> list[Any]:
        """Return all numbers that the training has changed."""
        found: list[Any] = [*self.losses, *self.model.state_dict().values()]
        saved = self.optimizer.state_dict()
        for state in saved["state"].values():
            found += [value for _, value in sorted(state.items()) if value is not None]
        for group in saved["param_groups"]:
            found += [value for name, value in sorted(group.items()) if name in ("lr", "step")]
        found += [param.grad for param in amp.master_params(self.optimizer)]
        found.append(torch.rand(3, device=self.device))
        if self.level is not None:
            found.append(amp.state_dict())
            amp.shutdown()
        return found


def assert_equal_bits(first: list[Any], second: list[Any]) -> None:
    assert len(first) == len(second)
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            assert one.shape == other.shape, index
            same = torch.equal(torch.nan_to_num(one.float(), 1e30), torch.nan_to_num(other.float(), 1e30))
            assert same, (index, len(first), (one.float() - other.float()).abs().max())
        else:
            assert one == other, index
