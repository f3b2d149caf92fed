"""Random calls of the examples of all families of ops, for `test_properties.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from apex.ops._examples import LAYOUTS, Example, Make, Random, all_examples, outputs_of
from tests.support.drawn import st
from tests.support.properties import Trial, draw_case, layer_trial

Draw = Callable[[st.SearchStrategy[Any]], Any]


class Tiny(Random):
    """Sizes drawn by hypothesis: a few elements, and sometimes no rows at all."""

    def __init__(self, draw: Draw) -> None:
        super().__init__("", 1 << 10)
        self._draw = draw

    def size(self, low: int, high: int, multiple: int = 1) -> int:
        return multiple * self._draw(st.sampled_from([1, 2, 5]))

    def length(self, low: int, high: int) -> int:
        return self._draw(st.sampled_from([1, 2, 3, 16, 33]))

    def rows(self, row_length: int) -> int:
        return self._draw(st.sampled_from([0, 1, 2, 5]))

    def choice(self, seq: Any) -> Any:
        return self._draw(st.sampled_from(list(seq)))

    def random(self) -> float:
        return self._draw(st.integers(0, 9)) / 10

    def uniform(self, a: float, b: float) -> float:
        return a + (b - a) * self.random()


def trial(examples: Sequence[Example], draw: Draw) -> Trial:
    """Draw a call of one of the examples; one in six has a tensor that is longer than it should be."""
    case, example = draw_case(draw), draw(st.sampled_from(list(examples)))
    assert example.draw is not None
    sizes, layout = example.draw(Tiny(draw)), draw(st.sampled_from(["", "", *LAYOUTS]))
    # Values are made on the CPU, because meta tensors have none to compare.
    floats = case.dtype if case.dtype.is_floating_point else torch.float32
    arguments = example.arguments(Make(floats, torch.device("cpu"), case.seed, layout), *sizes)
    names = [name for name, value in arguments.items() if isinstance(value, Tensor) and value.requires_grad]
    inputs = [_moved(arguments[name], case) for name in names]
    wrong = draw(st.integers(0, 5)) == 0
    if wrong:
        place = draw(st.integers(0, len(inputs) - 1))
        inputs[place] = torch.cat((inputs[place], inputs[place]), -1) if inputs[place].numel() else inputs[place][None]

    def with_tensors(function: Callable[..., Any], move: Callable[[Tensor], Tensor], given: Sequence[Tensor]) -> Any:
        others = {n: move(v) if isinstance(v, Tensor) else v for n, v in arguments.items() if n not in names}
        outputs = outputs_of(function(*{**arguments, **others, **dict(zip(names, given, strict=True))}.values()))
        return outputs[0] if len(outputs) == 1 else torch.cat([output.reshape(-1) for output in outputs])

    return layer_trial(
        case,
        lambda *given: with_tensors(example.function, lambda tensor: tensor.to(case.device), given),
        lambda *given: with_tensors(example.exact or example.torch, _widened, given),
        inputs,
        valid=not wrong,
        slack=example.slack(floats),
    )


def _widened(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _moved(tensor: Tensor, case: Any) -> Tensor:
    """Return a tensor of the case's dtype on its device, with the same memory layout where there is one."""
    if case.dtype.is_floating_point and case.device == "cpu":
        return tensor.detach()
    return tensor.detach().to(case.device, case.dtype)


SUBJECTS = {
    name: functools.partial(trial, drawing)
    for name, examples in all_examples().items()
    if (drawing := [example for example in examples if example.draw is not None])
}
