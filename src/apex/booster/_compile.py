"""Parts of a model that `torch.compile` compiles inside of a boosted step."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..checkpoint._ranks import is_first

# A model is compiled block by block if its repeated blocks have at most this many sets of shapes, because each set is
# compiled once, and at least this share of the parameters. Otherwise the whole model is compiled.
_MOST_SHAPES, _LEAST_SHARE = 4, 1 / 3


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that a model repeats, such as the layers of a transformer; empty if it has none.

    Blocks are modules with submodules of their own that are listed in an `nn.ModuleList` or `nn.Sequential`. A list
    counts if it has two blocks of the same class and with the same shapes.
    """
    blocks: dict[int, nn.Module] = {}
    inside: set[int] = set()
    for module in model.modules():  # the outermost first
        if not isinstance(module, nn.ModuleList | nn.Sequential) or id(module) in inside:
            continue
        children = [child for child in module if any(True for _ in child.children())]
        children = [child for child in children if not isinstance(child, nn.ModuleList | nn.Sequential)]
        kinds = [_kind(child) for child in children]
        classes = {kind[0] for kind in kinds if kinds.count(kind) > 1}
        for child in children:
            if type(child) in classes:
                blocks[id(child)] = child
                inside.update(map(id, child.modules()))
    chosen = list(blocks.values())
    size = sum(param.numel() for block in chosen for param in block.parameters())
    whole = sum(param.numel() for param in model.parameters())
    if len({_kind(block) for block in chosen}) > _MOST_SHAPES or size < _LEAST_SHARE * whole:
        return []
    return chosen


def _kind(module: nn.Module) -> tuple[Any, ...]:
    return type(module), tuple((name, tuple(param.shape)) for name, param in module.named_parameters())


class CompiledParts:
    """The repeated blocks of a model, or the whole model, with compiled forward passes that `active` turns on.

    Outside of `active` the model runs as it is: evaluation with other shapes compiles nothing.
    """

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        blocks = repeated_blocks(model)
        self.modules = blocks or [model]
        count = f"{len(blocks)} x " if blocks else ""
        self.text = count + type(self.modules[0]).__name__.removeprefix("Fused")
        self._options = options
        self._calls: list[Callable[..., Any]] = []

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Use the compiled forward passes inside the block."""
        if not self._calls:
            self._calls = [torch.compile(module._call_impl, **self._options) for module in self.modules]
        for module, call in zip(self.modules, self._calls, strict=True):
            vars(module)["_compiled_call_impl"] = call
        try:
            yield
        finally:
            for module in self.modules:
                vars(module).pop("_compiled_call_impl", None)


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Show on stderr that something long is under way, and how long it took; in the first process only.

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
