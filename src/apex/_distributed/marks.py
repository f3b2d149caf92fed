"""Marks of parameters: attributes that tell how processes share them, such as `tensor_model_parallel`, `allreduce`."""

from __future__ import annotations

from torch import Tensor


def copy_marks(source: Tensor, target: Tensor) -> None:
    """Set the marks of `source` on `target`: its attributes that are flags, numbers and strings.

    Tensors among the attributes, such as `main_grad`, belong to `source` alone.
    """
    marks = {name: value for name, value in vars(source).items() if isinstance(value, bool | int | float | str)}
    vars(target).update(marks)
