"""Optimizers that `torch.optim` lacks, in plain PyTorch, parameter by parameter.

They are what a user without fused optimizers would run, and, given float64 parameters, what results are checked with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class EagerOptimizer:
    """A loop over parameters; a subclass has `update`, which takes one step of one of them."""

    def __init__(
        self, params: Sequence[Tensor], lr: float, betas: tuple[float, float], eps: float, decay: float
    ) -> None:
        self.params = list(params)
        self.states: list[dict[str, Any]] = [{} for _ in self.params]
        self.lr, self.betas, self.eps, self.decay = lr, betas, eps, decay
        self.count = 0

    @torch.no_grad()
    def step(self) -> None:
        self.count += 1
        self.prepare()
        for param, state in zip(self.params, self.states, strict=True):
            assert param.grad is not None
            self.update(param, param.grad, state)

    def prepare(self) -> None:
        """What is done once per step."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def _moment(self, state: dict[str, Any], name: str, like: Tensor) -> Tensor:
        if name not in state:
            state[name] = torch.zeros_like(like)
        return state[name]

    def _adam_direction(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        """Adam's corrected step, the learning rate left out."""
        beta1, beta2 = self.betas
        first, second = self._moment(state, "m", param), self._moment(state, "v", param)
        first.lerp_(grad, 1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        deviation = (second.sqrt() / math.sqrt(1 - beta2**self.count)).add_(self.eps)
        return (first / (1 - beta1**self.count)).div_(deviation)


class EagerLamb(EagerOptimizer):
    """LAMB (https://arxiv.org/abs/1904.00962): gradients clipped to a joint norm of 1, decay, a trust ratio each."""

    def prepare(self) -> None:
        grads = [param.grad for param in self.params if param.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
        self.clip = 1 / norm.clamp(min=1.0)

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        update = self._adam_direction(param, grad * self.clip, state).add_(param, alpha=self.decay)
        length, reach = torch.linalg.vector_norm(param), torch.linalg.vector_norm(update)
        ratio = torch.where((length > 0) & (reach > 0), length / reach, 1.0)
        param.sub_(update.mul_(self.lr * ratio))


class EagerNovoGrad(EagerOptimizer):
    """NovoGrad (https://arxiv.org/abs/1905.11286): momentum of gradients over an average of their norm."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        beta1, beta2 = self.betas
        square = grad.square().sum()
        average = state["v"] = beta2 * state.get("v", square) + (1 - beta2) * square
        first = self._moment(state, "m", param)
        first.lerp_(grad, 1 - beta1)
        deviation = average.sqrt() / math.sqrt(1 - beta2**self.count) + self.eps
        update = (first / deviation).div_(1 - beta1**self.count)
        param.mul_(1 - self.lr * self.decay).sub_(update, alpha=self.lr)


class EagerAdamP(EagerOptimizer):
    """AdamP (https://arxiv.org/abs/2006.08217): Adam without the part of its step that only lengthens a weight."""

    delta, decay_ratio = 0.1, 0.1

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        direction = self._adam_direction(param, grad, state)
        ratio = 1.0
        if param.ndim > 1:
            ratio = self._project(param, grad, direction)
        param.mul_(1 - self.lr * self.decay * ratio).sub_(direction, alpha=self.lr)

    def _project(self, param: Tensor, grad: Tensor, direction: Tensor) -> float:
        """Projects every row, or the whole, if the gradient is nearly orthogonal to it; returns the share of decay."""
        for rows in (param.shape[0], 1):
            weights, slopes = param.view(rows, -1), grad.view(rows, -1)
            cosine = torch.nn.functional.cosine_similarity(weights, slopes, dim=1, eps=self.eps).abs()
            if cosine.max() < self.delta / math.sqrt(weights.shape[1]):
                units = weights / (torch.linalg.vector_norm(weights, dim=1, keepdim=True) + self.eps)
                steps = direction.view(rows, -1)
                steps.sub_(units * (units * steps).sum(1, keepdim=True))
                return self.decay_ratio
        return 1.0
