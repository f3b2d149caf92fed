"""Models and training steps that run compiled inside of boosted steps, and the progress of compiling them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..checkpoint._ranks import is_first

# Functions without state that AOTAutograd refuses to cache: traced autograd Functions, as our batch norm's, whose
# passes are both in the graph and so in the cache's key, and, in PyTorch 2.12 to 2.14, autocast inside of the graph
# (https://github.com/pytorch/pytorch/issues/191106).
_CACHEABLE = (
    "torch.ops.higher_order.autograd_function_apply",
    "torch.amp.autocast_mode._enter_autocast",
    "torch.amp.autocast_mode._exit_autocast",
)


class CompiledModel:
    """A model with a compiled forward pass that `active` turns on.

    Outside of `active` the model runs as it is: evaluation with other shapes compiles nothing. The whole model is
    compiled, because the compiler also improves the layers around the repeated blocks: it pads the head of GPT-2
    (50257 columns) and fuses the loss. Compiling the blocks alone would take less time, but on an H200 a step of GPT-2
    took 63.9 ms with compiled blocks, and 34.9 ms under `torch.compile` of the whole model.
    """

    def __init__(self, model: nn.Module, options: dict[str, Any], dtype: torch.dtype | None = None) -> None:
        """Store the options. `dtype`, the precision's dtype, becomes part of the key of compiled code in caches."""
        self.name = type(model).__name__.removeprefix("Fused")
        self.output_bytes = 0  # of the largest outputs with gradients of a compiled call
        self._model, self._options, self._dtype = model, options, dtype
        self._compiled: Callable[..., Any] | None = None

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled forward pass and note the size of its outputs."""
        assert self._compiled is not None
        outputs = self._compiled(*args, **kwargs)
        tensors = (leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad)
        self.output_bytes = max(self.output_bytes, sum(tensor.nbytes for tensor in tensors))
        return outputs

    def compiled_step(self, function: Callable[..., Any], suppress_errors: bool) -> CompiledStep:
        """Return a training step that is compiled as a whole, with this model's options."""
        return CompiledStep(function, lambda: _cached(self._options, self._dtype), suppress_errors)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Use the compiled forward pass inside the block."""
        if self._compiled is None:
            self._compiled = torch.compile(_compilable(self._model), **_cached(self._options, self._dtype))
        attributes = vars(self._model)
        before = attributes.get("_compiled_call_impl")  # of `model.compile()`, or of a step that called this one
        attributes["_compiled_call_impl"] = self._call
        try:
            yield
        finally:
            attributes["_compiled_call_impl"] = before


class CompiledStep:
    """A training step that `active` compiles as a whole, so that models and the loss around them share kernels.

    Dynamo splits the step at `backward` and at the methods of a boosted optimizer, which run as they are. With
    `suppress_errors` parts that the compiler fails for run as they are, too; after an optimizer's step a caller could
    not run the step again.
    """

    def __init__(
        self, function: Callable[..., Any], options: Callable[[], dict[str, Any]], suppress_errors: bool
    ) -> None:
        functools.update_wrapper(self, function)
        self.name = getattr(function, "__name__", "step")
        self._function = self._call = function
        self._options, self._suppress_errors = options, suppress_errors
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Use compiled code inside the block."""
        if self._compiled is None:
            self._compiled = torch.compile(self._function, **self._options())
        self._call = self._compiled
        try:
            with torch._dynamo.config.patch(suppress_errors=self._suppress_errors):
                yield
        finally:
            self._call = self._function


def _compilable(model: nn.Module) -> Callable[..., Any]:
    """Return a call of the model that Dynamo compiles whole."""
    function = model._call_impl
    if not type(model).forward.__module__.startswith("torch.nn."):
        return function

    # Dynamo skips the frames of PyTorch's own modules, such as nn.Sequential. It would compile the layers inside one by
    # one, and none that is PyTorch's.
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


@functools.cache
def _digest() -> str:
    """Return a digest of this package's sources."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _cached(options: dict[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """Return options of torch.compile with which a second process finds the model in AOTAutograd's cache.

    Without its cache, AOTAutograd traces and splits the graph in every process before Inductor's cache is asked. The
    option's values are part of the cache's key. They have a digest of our sources, because the key holds the names of
    our operators and not their derivatives, which the cached graph contains. They have the dtype, because the key of
    PyTorch up to 2.11 says whether autocast is enabled and not for which dtype.
    """
    from torch._inductor import config  # here, because importing it takes seconds

    name = "unsafe_marked_cacheable_functions"
    marked = getattr(config, name, None)  # older releases of PyTorch have no such option
    if marked is None or "mode" in options or options.get("backend", "inductor") != "inductor":
        return options  # torch.compile takes a mode or options, not both, and other backends have other options
    given = options.get("options") or {}
    ours = dict.fromkeys(_CACHEABLE, f"apex {_digest()}, {dtype}")
    return {**options, "options": {**given, name: {**marked, **given.get(name, {}), **ours}}}


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Show on stderr that `what`, a long task, is under way and how long it took; in the first process only.

    A terminal gets one line that counts seconds, and a file gets a line at the beginning and one at the end.
    """
    if not is_first():
        yield
        return
    begin, ended, is_terminal = time.perf_counter(), threading.Event(), sys.stderr.isatty()

    def show(state: str, end: str) -> None:
        seconds = time.perf_counter() - begin
        sys.stderr.write(f"{chr(13) if is_terminal else ''}apex: {what}{state} {seconds:.0f} s{end}")
        sys.stderr.flush()

    def count() -> None:
        while not ended.wait(1.0):
            show(" ...", "")

    counter = threading.Thread(target=count, daemon=True)
    if is_terminal:
        counter.start()
    else:
        sys.stderr.write(f"apex: {what} ...\n")
    try:
        yield
    finally:
        ended.set()
        if is_terminal:
            counter.join()
        show(" took", "\n")
