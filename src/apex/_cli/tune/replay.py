"""Calls that ask a launch rule a given question again, with random tensors, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ops import _examples, _library
from ...ops._tolerance import excess
from ...ops._tuned import Question
from ..build.calls import Maker, Shape, known_ops

DTYPES = {2: torch.bfloat16, 4: torch.float32}


# From a rule's arguments to an op of `apex build` and a shape with which the rule is asked just that.
CALLS: dict[str, Callable[..., tuple[str, Shape]]] = {}


class _Tensors(Maker):
    """Makes the tensors of a call of random numbers; another run gets the same ones again."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.made: list[Tensor] = []
        self.next = 0
        self._generator = torch.Generator(device).manual_seed(0)

    def _again(self, make: Callable[[], Tensor]) -> Tensor:
        if self.next == len(self.made):
            self.made.append(make())
        self.next += 1
        return self.made[self.next - 1]

    def _random(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        if not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        return torch.randn(shape, generator=self._generator, dtype=torch.float32, device=self.device).to(dtype)

    def constant(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        return self._again(lambda: self._random(shape, dtype))


class Replay:
    """An op's call with a shape: its passes by kernels, and their results beside those of PyTorch in float64."""

    def __init__(self, name: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.name, self.shape, self.dtype, self.device = name, shape, dtype, device
        self.op = known_ops()[name]
        self.release()

    def release(self) -> None:
        """Lets the tensors go; the next pass makes them again."""
        self._tensors = _Tensors(self.dtype, self.device)
        self._output: Any = None
        self._gradient: Any = None
        self._expected: list[Tensor] = []

    def _run(self, tensors: _Tensors) -> tuple[Tensor, list[Tensor]]:
        """The output, and the tensors that have a gradient."""
        tensors.next = 0
        output = self.op.run(tensors, self.shape)
        return output, [tensor for tensor in tensors.made if tensor.requires_grad]

    def forward(self) -> None:
        self._output, self._leaves = self._run(self._tensors)
        if self._gradient is None:
            self._gradient = torch.randn_like(self._output)

    def backward(self) -> tuple[Tensor, ...]:
        """Gradients of the last forward pass."""
        if self._output is None:
            self.forward()
        return torch.autograd.grad(self._output, self._leaves, self._gradient, retain_graph=True)

    def results(self) -> list[Tensor]:
        """Output and gradients."""
        self.forward()
        return [self._output.detach(), *self.backward()]

    def _exact(self) -> list[Tensor]:
        """The results of PyTorch's operators in float64."""
        wide = _Tensors(torch.float64, self.device)
        for tensor in self._tensors.made:
            double = tensor.detach().double() if tensor.is_floating_point() else tensor
            wide.made.append(double.requires_grad_(tensor.requires_grad))
        with _library.implementation("torch"):
            output, leaves = self._run(wide)
            return [output.detach(), *torch.autograd.grad(output, leaves, self._gradient.double())]

    def worst_excess(self, results: list[Tensor]) -> float:
        """The largest error of results as a multiple of its tolerance; above 1 is wrong."""
        self._expected = self._expected or self._exact()
        largest, worst = max(each.numel() for each in self._expected), 0.0
        for one, exact in zip(results, self._expected, strict=True):
            terms = max(1, largest // max(1, exact.numel()))
            worst = max(worst, excess(one, exact, None, terms))
        return worst


class ExampleReplay:
    """A call of an example: its passes by kernels, and their results beside the exact ones."""

    def __init__(self, example: _examples.Example, sizes: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.example, self.shape, self.dtype, self.device = example, sizes, dtype, device
        self.name, self.op = example.name, known_ops()[example.name]
        self.release()

    def release(self) -> None:
        """Drop the tensors; the next pass makes them again."""
        self._call: _examples.Call | None = None
        self._outputs: list[Tensor] = []

    @property
    def call(self) -> _examples.Call:
        if self._call is None:
            self._call = _examples.Call(self.example, self.shape, _examples.Make(self.dtype, self.device))
        return self._call

    def forward(self) -> None:
        self._outputs = self.call.outputs()
        self.call.gradients(self._outputs)

    def backward(self) -> tuple[Tensor, ...]:
        """Return the gradients of the last forward pass."""
        if not self._outputs:
            self.forward()
        gradients = self.call.gradients(self._outputs)
        return torch.autograd.grad(self._outputs, self.call.leaves, gradients, retain_graph=True)

    def results(self) -> list[Tensor]:
        """Return outputs and gradients."""
        return self.call.results()

    def worst_excess(self, results: list[Tensor]) -> float:
        """Return the largest error of results as a multiple of its tolerance; above 1 is wrong."""
        return self.call.worst_excess(results)


def replay_of(question: Question, device: torch.device) -> Replay | ExampleReplay | None:
    """The call that asks `question`; None where no op of `apex build` does."""
    arguments = dict(question.arguments)
    dtype = DTYPES.get(arguments.pop("element_size"))
    for _, example in _examples.by_name():
        sizes = example.asks[question.op](**arguments) if question.op in example.asks else None
        if sizes is not None and dtype is not None and 0 not in sizes:
            return ExampleReplay(example, sizes, dtype, device)
    if question.op not in CALLS or dtype is None:
        return None
    name, shape = CALLS[question.op](**arguments)
    return Replay(name, shape, dtype, device) if math.prod(shape) else None
