"""Examples of calls: the arguments of each op, the sizes of its tensors, and the exact results.

Each family has a module `examples.py` with a list `EXAMPLES`. Nothing else lists calls or sizes of an op. The readers
are loops that know no family:

| reader | parts of an `Example` that it uses |
|---|---|
| `apex doctor` | `small` sizes in three dtypes, compared with `exact` in float64 |
| `apex build`, `apex tune` | `arguments` at the sizes that the user names; `extensions`; `asks` |
| `apex bench` | `listed` rows, `torch` as a peer, alone and compiled; `_bench/other_packages.py` adds other packages |
| `apex bench --sweep` | `draw` with a seed |
| tests | `small`, `draw`, on a GPU `large`, and for each of `public` the same arguments through the public function |

An example's `arguments(make, *sizes)` returns the arguments of its function by name, in the function's order. `make` is
a `Make`, which knows dtype, device, seed and memory layout; tensors that it makes with a gradient are the leaves.

    def _arguments(make, rows, columns):
        return {"input": make.normal(rows, columns), "bias": make.normal(columns), "activation": "silu"}

    EXAMPLES = [
        Example(
            "swiglu",
            bias_glu,
            _arguments,
            torch=lambda input, bias, activation: ...,  # PyTorch's own; in float64 the truth
            sizes="rows x columns",
            small=[(12, 200)],
            listed=[Row("cuda", torch.bfloat16, (16384, 22016))],
            draw=lambda random: (random.rows(4096), 4096),
            public=[Public("fused_bias_swiglu:fused_bias_swiglu", "input", "bias")],
        )
    ]
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import math
import pkgutil
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _library
from ._tolerance import TOLERANCES, excess

Sizes = tuple[int, ...]
Dtype = torch.dtype  # `Example` has a field that is called torch

CHECKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KNOWN_LENGTHS = (7000, 3000, 1160, 1544, 5120, 12288)  # row lengths that were slow once or that are common
LAYOUTS = ("sliced", "oddly sliced", "offset", "transposed")
FORWARD_AND_BACKWARD = ("fwd", "bwd")
USUAL_ELEMENTS = 1 << 26  # of a call, if the rule's arguments do not fix its heads or batches


class Row(NamedTuple):
    """A row of `apex bench` for each of `ways`: "fwd", "bwd", or another word for both passes in one call.

    A "step" is timed by the wall clock, as a training loop sees it, without compilers and other packages. All other
    ways are timed on the device. `device` is the type of the devices that get the row, "cuda" or "cpu". `note` tells
    readers of the results more than the name does.
    """

    device: str
    dtype: torch.dtype
    sizes: Sizes
    ways: Sequence[str] = FORWARD_AND_BACKWARD
    note: str | None = None


class Public:
    """A public function, or module class, that takes arguments of an example.

    `path` is its package below `apex`, a colon, and its name there. `takes` are its positional arguments: the names of
    the example's arguments, or constants. `module(*sizes)` returns the positional arguments of a module's constructor,
    `options` are its keyword arguments.
    """

    def __init__(self, path: str, *takes: Any, module: Callable[..., tuple] | None = None, **options: Any) -> None:
        self.path, self.takes, self._module, self._options = path, takes, module, options
        words = (f" {key}={value}" for key, value in options.items())
        self.name = path.partition(":")[2].removesuffix(".apply") + "".join(words)

    def make(self, *sizes: int) -> Callable[..., Any]:
        """Return the function, or a new module for these sizes."""
        found = pkgutil.resolve_name(f"apex.{self.path}")
        return found if self._module is None else found(*self._module(*sizes), **self._options)

    def arguments(self, arguments: Mapping[str, Any]) -> list[Any]:
        """Return the positional arguments, taken from an example's."""
        return [arguments[each] if isinstance(each, str) and each in arguments else each for each in self.takes]


@dataclass(frozen=True)
class Example:
    """A call of an op.

    - `name` is unique among all examples. `apex build` knows the call by it.
    - `function` is called by position with the values of `arguments(make, *sizes)`.
    - `torch` takes the same arguments and does the same with PyTorch's operators, as users would write it.
    - `exact` returns the right results for float64 arguments; default: `torch`.
    - `sizes` says in words what the numbers of a shape are.
    - `small` are sizes for checks and tests, `large` sizes of models for tests on a GPU, `listed` the rows of
      `apex bench`, and `draw(random)` returns random sizes.
    - `title` is a row's name in `apex bench` before its direction; it may contain {dtype}, {short} (bf16), {shape} and
      single sizes, such as {s[0]}. If it contains {way}, this is the direction, or nothing for a forward pass.
    - `bytes_moved(dtype, *sizes)` returns the bytes that a forward and a backward pass read and write; default: the
      arguments and outputs, and the arguments with all gradients.
    - `peers` are further implementations with PyTorch's operators, by their column in `apex bench`.
    - `compiles` is false if `torch.compile` of the peer takes too long.
    - `checked(*sizes)` returns smaller sizes at which `apex bench` compares results; default: the timed sizes.
    - `terms(*sizes)` says how many numbers an element of a result is the sum of, beyond the sums of gradients that are
      smaller than the largest tensor.
    - `cancels`: errors are measured against the largest element of a result, as single elements cancel to nothing, in
      the dtype of the arguments, because intermediate results are rounded to it.
    - `slack(dtype)` is an absolute error that is allowed in addition.
    - `kink(*arguments)` returns the values before a ReLU. Gradients near zero of these are not compared.
    - `strided`: sweeps draw the memory layout of the first tensor, too.
    - `differentiable_twice` is false if the op has a first derivative only.
    - `builds` is false if the call launches no kernel of ours, or one that depends on values, so that `apex build`
      does not know it.
    - `usual` are the sizes that `apex build` takes if the user names none; default: the first row for a GPU.
    - `extensions` are the names of upstream's compiled extensions with this op, for `APEX_BUILD_<NAME>=1`.
    - `asks` maps a launch rule that `apex tune` can vary to a function: for arguments of the rule it returns sizes of
      this example at which the call passes these arguments to the rule, or None.
    - `accepts_integers` names tensors that may hold integers although the example gives floats.
    """

    name: str
    function: Callable[..., Any]
    arguments: Callable[..., dict[str, Any]]
    torch: Callable[..., Any]
    sizes: str
    small: Sequence[Sizes]
    exact: Callable[..., Any] | None = None
    draw: Callable[[Random], Sizes] | None = None
    large: Sequence[Sizes] = ()
    listed: Sequence[Row] = ()
    title: str = "{name} {dtype} {shape}"
    bytes_moved: Callable[..., tuple[float, float]] | None = None
    peers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    compiles: bool = True
    checked: Callable[..., Sizes] | None = None
    terms: Callable[..., int] = lambda *sizes: 1
    cancels: bool = False
    slack: Callable[[Dtype], float] = lambda dtype: 0.0
    kink: Callable[..., Tensor] | None = None
    strided: bool = False
    differentiable_twice: bool = True
    public: Sequence[Public] = ()
    builds: bool = True
    usual: Sizes | None = None
    extensions: Sequence[str] = ()
    asks: Mapping[str, Callable[..., Sizes | None]] = field(default_factory=dict)
    accepts_integers: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.name

    @property
    def typical(self) -> Sizes:
        """Return the sizes of a real model."""
        rows = [row.sizes for row in self.listed if row.device == "cuda"]
        return (self.usual or (rows or self.small)[0])[: len(self.sizes.split(" x "))]


class Make:
    """A source of an example's tensors, the same for equal arguments.

    `layout` is the memory layout of the first tensor made by `normal`, one of `LAYOUTS`; "" is contiguous.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0, layout: str = "") -> None:
        self.dtype, self.device, self._layout = dtype, device, layout
        self._generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, grad: bool = True) -> Tensor:
        """Return normally distributed values; a leaf unless `grad` is false."""
        layout, self._layout = self._layout, ""
        values = self._laid_out(shape, layout) if layout else self._randn(shape)
        return values.to(dtype or self.dtype).requires_grad_(grad)

    def weight(self, *shape: int, dtype: torch.dtype | None = None, grad: bool = True) -> Tensor:
        """Return values around one, as a trained weight has."""
        return self._randn(shape).mul_(0.2).add_(1).to(dtype or self.dtype).requires_grad_(grad)

    def image(self, *shape: int, channels_last: bool = True) -> Tensor:
        """Return normally distributed values of an image batch, N x C x H x W."""
        layout = torch.channels_last if channels_last else torch.contiguous_format
        return self._randn(shape).to(self.dtype).contiguous(memory_format=layout).requires_grad_()

    def uniform(self, *shape: int) -> Tensor:
        """Return float32 values between 0 and 1 without a gradient."""
        return torch.rand(shape, generator=self._generator, dtype=torch.float32, device=self.device)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return integers from `low` to below `high`; zeros if no values are computed."""
        if self.device.type == "meta":
            return torch.zeros(shape, dtype=dtype, device=self.device)
        return torch.randint(low, high, shape, generator=self._generator, dtype=dtype, device=self.device)

    def tensor(self, values: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """Return a tensor of `values` on the example's device."""
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _randn(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=self._generator, dtype=torch.float32, device=self.device)

    def _laid_out(self, shape: Sequence[int], layout: str) -> Tensor:
        outer, last, first = list(shape[:-1]), shape[-1], int(layout == "offset")
        if layout == "transposed":
            outer[:2] = outer[1::-1]
        width = last + {"sliced": 64, "oddly sliced": 3}.get(layout, 0)
        # Rounded before the view is taken, because a change of dtype would make the view contiguous.
        values = self._randn((math.prod(outer) * width + first,)).to(self.dtype)
        values = values[first:].view(*outer, width)[..., :last]
        return values.transpose(0, 1) if layout == "transposed" and len(shape) > 2 else values


class Random(random.Random):
    """Random sizes of one call, which has at most about `most` elements."""

    def __new__(cls, *arguments: Any) -> Random:
        return super().__new__(cls)  # Random.__new__ takes at most one argument in Python 3.10

    def __init__(self, seed: str, most: int) -> None:
        super().__init__(seed)
        self.most = most

    def size(self, low: int, high: int, multiple: int = 1) -> int:
        """Draw a multiple of `multiple` with a uniformly distributed logarithm."""
        value = math.exp(self.uniform(math.log(low), math.log(max(low, high))))
        return max(1, round(value / multiple)) * multiple

    def length(self, low: int, high: int) -> int:
        """Draw the length of a row: mostly a multiple of a power of two, seldom odd."""
        high = min(high, self.most)
        known = min(self.choice(KNOWN_LENGTHS), high)
        drawn = self.size(low, high, self.choice((256, 128, 64, 8, 8, 8, 4, 1)))
        return known if self.random() < 0.1 else min(drawn, high)

    def rows(self, row_length: int) -> int:
        """Draw a number of rows such that a call has between 2^20 and `most` elements."""
        most = max(1, self.most // row_length)
        return self.size(max(1, min(most, (1 << 20) // row_length)), most)

    def image(self, multiple: int, most_channels: int) -> Sizes:
        """Draw images, channels, height and width; the number of channels is a multiple of `multiple`."""
        channels = self.size(max(8, multiple), min(most_channels, self.most // 64), multiple)
        side = self.choice((4, 7, 8, 14, 16, 28, 32, 40, 48, 56, 64, 96, 112, 128))
        side = max(2, min(side, math.isqrt(self.most // channels)))
        return self.size(1, min(128, self.most // (channels * side * side))), channels, side, side

    def dtype(self) -> torch.dtype:
        """Draw a dtype that kernels take."""
        return self.choice((torch.bfloat16, torch.float16, torch.float32))

    def layout(self) -> str:
        """Draw a memory layout, mostly contiguous."""
        return self.choice(LAYOUTS) if self.random() < 0.2 else ""


class Call:
    """An example with its tensors: runs its function, PyTorch's equivalent, and the exact formula in float64."""

    def __init__(self, example: Example, sizes: Sizes, make: Make) -> None:
        self.example, self.sizes = example, sizes
        self.arguments = example.arguments(make, *sizes)
        self.leaves = leaves_of(self.arguments)
        self._make, self._gradients = make, list[Tensor]()

    def gradients(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return gradients of the outputs, the same in every call; the first call decides their dtypes."""
        if not self._gradients:
            self._gradients = [self._make._randn(output.shape).to(output.dtype) for output in outputs]
            if self.example.kink is not None:
                before = self.example.kink(*_widened(self.arguments).values()).detach()
                # Rounding decides the sign of an element that is nearly zero.
                narrow = self._gradients[0].dtype != torch.float32
                self._gradients[0].masked_fill_(before.abs() < (0.05 if narrow else 1e-3), 0)
        return [gradient.to(output.dtype) for gradient, output in zip(self._gradients, outputs, strict=True)]

    def outputs(self, function: Callable[..., Any] | None = None) -> list[Tensor]:
        """Return the outputs of a function of these arguments, by default of the example's."""
        return outputs_of((function or self.example.function)(*self.arguments.values()))

    def results(self, function: Callable[..., Any] | None = None) -> list[Tensor]:
        """Return outputs and the leaves' gradients of a function, by default of the example's."""
        outputs = self.outputs(function)
        return differentiated(outputs, self.leaves, self.gradients(outputs))

    @functools.cached_property
    def exact(self) -> list[Tensor]:
        """Outputs and the leaves' gradients in float64."""
        wide = _widened(self.arguments)
        outputs = outputs_of((self.example.exact or self.example.torch)(*wide.values()))
        return differentiated(outputs, leaves_of(wide), self.gradients(outputs))

    def reductions(self) -> list[int]:
        """Return how many numbers an element of each result is the sum of."""
        largest = max(each.numel() for each in self.leaves or tensors_of(self.arguments))
        terms = self.example.terms(*self.sizes)
        return [terms * max(1, largest // max(1, each.numel())) for each in self.exact]

    def slacks(self, dtypes: Sequence[torch.dtype]) -> list[float]:
        """Return the absolute error that is allowed for each result beyond the tolerance of its dtype in `dtypes`."""
        slacks = [self.example.slack(dtype) for dtype in dtypes]
        if self.example.cancels:
            largest = [float(each.abs().max()) if each.numel() else 0.0 for each in self.exact]
            rounding = max(TOLERANCES[self._make.dtype])
            slacks = [s + max(rounding, *TOLERANCES[d]) * x for s, d, x in zip(slacks, dtypes, largest, strict=True)]
        return slacks

    def worst_excess(self, results: Sequence[Tensor]) -> float:
        """Return the largest error of results as a multiple of its tolerance; above 1 is wrong."""
        slacks = self.slacks([each.dtype for each in results])
        judged = zip(results, self.exact, self.reductions(), slacks, strict=True)
        return max(excess(one, exact, None, terms, slack) for one, exact, terms, slack in judged)


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return `value` with `function` applied to its tensors, also within lists and tuples."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)(map_tensors(each, function) for each in value)
    return value


def _widened(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with new float64 leaves for the floating-point tensors."""

    def wide(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor.detach().double().requires_grad_(tensor.requires_grad)

    return {name: map_tensors(value, wide) for name, value in arguments.items()}


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors in `values`, a mapping or nested lists, in order."""
    tensors: list[Tensor] = []
    map_tensors(list(values.values()) if isinstance(values, Mapping) else values, tensors.append)
    return tensors


def leaves_of(arguments: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that require gradients."""
    return [tensor for tensor in tensors_of(arguments) if tensor.requires_grad]


def outputs_of(returned: Any) -> list[Tensor]:
    """Return the floating-point tensors that a function returned."""
    return [tensor for tensor in tensors_of([returned]) if tensor.is_floating_point()]


def differentiated(outputs: Sequence[Tensor], leaves: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return outputs and the leaves' gradients; an output without a graph contributes nothing to the latter."""
    pairs = [(output, gradient) for output, gradient in zip(outputs, gradients, strict=True) if output.requires_grad]
    found: Sequence[Tensor] = ()
    if pairs and leaves:
        roots, given = zip(*pairs, strict=True)
        found = torch.autograd.grad(roots, leaves, given, materialize_grads=True)
    return [*(output.detach() for output in outputs), *found]


def all_examples() -> dict[str, list[Example]]:
    """Import the `examples.py` of every family and return their lists by the family's name."""
    found: dict[str, list[Example]] = {}
    for module in sorted(pkgutil.iter_modules(importlib.import_module(__package__).__path__), key=lambda m: m.name):
        name = f"{__package__}.{module.name}.examples"
        if module.ispkg and importlib.util.find_spec(name) is not None:
            found[module.name] = importlib.import_module(name).EXAMPLES
    return found


def by_name() -> Iterator[tuple[str, Example]]:
    """Yield the name of every example of all families, and the example."""
    for examples in all_examples().values():
        for example in examples:
            yield example.name, example


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Compute float32 convolutions in float32: by default cuDNN rounds their factors to TF32, which has 10 bits."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@without_tf32()
def self_check(family: _library.OpFamily, device: torch.device) -> float:
    """Return the largest error of a family's examples, as a multiple of its tolerance: above 1 is wrong.

    Checks all small sizes in float32 and the first of them in half precision. Where kernels run, they are checked even
    at sizes for which PyTorch's operators would be quicker. Where PyTorch's operators run in half precision, an error
    is a multiple of theirs if that is above the tolerance: on some CPUs convolutions of float16 add up in float16.
    """
    if family.self_check is not None:
        return family.self_check(device)
    worst = 0.0
    for dtype in (dtype for dtype in CHECKED_DTYPES if dtype in family.triton_dtypes):
        implementation = _library.explain(family, device, dtype).implementation
        with _library.implementation(implementation):  # type: ignore[arg-type]
            for example in all_examples()[family.name]:
                for sizes in example.small[:: 1 if dtype == torch.float32 else len(example.small)]:
                    call = Call(example, sizes, Make(dtype, device))
                    error = call.worst_excess(call.results())
                    if error > 1 and implementation == "torch" and dtype != torch.float32:
                        error /= max(1.0, call.worst_excess(call.results(example.torch)))
                    worst = max(worst, error)
    return worst
