"""Calls with random tensors that make a launch rule answer a recorded question again, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops import _examples
from ...ops._tuned import Question
from ..build.calls import Shape, known_ops

DTYPES = {2: torch.bfloat16, 4: torch.float32}


class Replay:
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


def replay_of(question: Question, device: torch.device) -> Replay | None:
    """Return the call of an example that asks `question`, or None if no example does."""
    arguments = dict(question.arguments)
    dtype = DTYPES.get(arguments.pop("element_size"))
    for _, example in _examples.by_name():
        sizes = example.asks[question.op](**arguments) if question.op in example.asks else None
        if sizes is not None and dtype is not None and 0 not in sizes:
            return Replay(example, sizes, dtype, device)
    return None
