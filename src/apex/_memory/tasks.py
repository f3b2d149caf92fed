"""Tasks: a model, its batches and its loss, from the name of a factory or of a Hugging Face config."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from .training import Loss, Task

_LONGEST = 2048  # number of words in a row of a batch, unless an input shape gives it


class Shape(NamedTuple):
    """The shape of a model's input without its first dimension, the batch."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    def make(self, batch: int, device: torch.device) -> Tensor:
        """Make a batch: random numbers, or zeros, which are valid indices of any embedding."""
        if self.dtype.is_floating_point:
            return torch.randn(batch, *self.sizes, dtype=self.dtype, device=device)
        return torch.zeros(batch, *self.sizes, dtype=self.dtype, device=device)


def parse_shape(text: str) -> Shape:
    """Parse "3x224x224", "1024:int64" or "" (one number per row); without a dtype it is float32."""
    sizes, _, name = text.partition(":")
    dtype = getattr(torch, name or "float32", None)
    parts = sizes.split("x") if sizes else []
    if not isinstance(dtype, torch.dtype) or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"input shape {text!r}: write sizes without the batch, and a dtype: 3x224x224 or 1024:int64")
    return Shape(tuple(map(int, parts)), dtype)


def find_task(name: str, inputs: Sequence[Shape] = ()) -> Task:
    """Return the task named by MODULE:FACTORY, FILE.py:FACTORY, or the config of a transformers model.

    A factory takes no arguments and returns a model, which takes `inputs`, or a model and its loss, a function of
    model, batch size and device. Without a loss the model's own is used (a number, or the attribute `loss` of its
    result), else the mean of its outputs.
    """
    module, _, attribute = name.rpartition(":")
    if module:
        return task_of(_factory(name, module, attribute), inputs)
    path = Path(name)
    config = path / "config.json" if path.is_dir() else path
    if not config.exists() and config.suffix in (".json", ".py"):
        raise ValueError(f"there is no file {str(config)!r}")
    if config.suffix == ".py":
        raise ValueError(f"{name!r} lacks its factory, the function or class that makes the model: {name}:FACTORY")
    if config.suffix != ".json" or not config.is_file():
        raise ValueError(f"{name!r} is neither MODULE:FACTORY nor the config.json of a Hugging Face model")
    return _hugging_face(config, inputs)


def task_of(factory: Any, inputs: Sequence[Shape]) -> Task:
    """Return the task of a factory."""

    def make() -> tuple[nn.Module, Loss]:
        made = factory()
        model, loss = made if isinstance(made, tuple) else (made, None)
        if not isinstance(model, nn.Module):
            raise TypeError(f"the factory must return a torch.nn.Module, not {type(model).__name__}")
        if loss is not None and not callable(loss):
            raise TypeError(f"the loss that the factory returns must be a function, not {type(loss).__name__}")
        if loss is None and not inputs:
            raise ValueError("the factory returns no loss, so that --input-shape must say what the model's inputs are")
        return model, loss or (lambda model, batch, device: loss_of(model(*(i.make(batch, device) for i in inputs))))

    return make


def loss_of(output: Any) -> Tensor:
    """Return the loss that a model returned, or the mean of its outputs."""
    loss = output if isinstance(output, Tensor) and output.numel() == 1 else getattr(output, "loss", None)
    if loss is not None:
        return loss
    floats = [t for t in _pytree.tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
    if not floats:
        raise TypeError("the model returns no loss and no floating-point tensor; let the factory return a loss as well")
    return sum((t.float().mean() for t in floats), start=torch.zeros((), dtype=torch.float32, device=floats[0].device))


def _factory(name: str, module_name: str, attribute: str) -> Any:
    path = Path(module_name)
    folder = str(path.parent) if path.suffix == ".py" else ""  # the file's folder, or the working directory
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = _module_of(path) if path.suffix == ".py" else importlib.import_module(module_name)
    except (ModuleNotFoundError, OSError, SyntaxError) as error:
        raise ValueError(f"{name!r} cannot be imported: {error}") from error
    factory = getattr(module, attribute, None)
    if isinstance(factory, nn.Module):
        raise ValueError(f"{name!r} is a model, not a function or class that makes one")
    if not callable(factory):
        raise ValueError(f"{module_name} has no function or class {attribute!r}")
    return factory


def _module_of(path: Path) -> Any:
    """Import a file by its path, because another module may already have its name."""
    if b"\0" in path.read_bytes():  # Python before 3.12 raises a plain ValueError for these
        raise SyntaxError("source code cannot contain null bytes")
    spec = importlib.util.spec_from_file_location(str(path.resolve()), path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look the module up here
    spec.loader.exec_module(module)
    return module


def _hugging_face(config: Path, inputs: Sequence[Shape]) -> Task:
    try:
        import transformers
    except ModuleNotFoundError:
        raise ValueError(f"{config} needs the package transformers, which is not installed") from None
    try:
        settings = transformers.AutoConfig.from_pretrained(str(config))
    except OSError as error:
        raise ValueError(f"{config} cannot be read: {error}") from error
    words = inputs[0].sizes[0] if inputs else min(getattr(settings, "max_position_embeddings", _LONGEST), _LONGEST)
    name = next(iter(settings.architectures or ()), None)
    settings.use_cache = False

    def loss(model: nn.Module, batch: int, device: torch.device) -> Tensor:
        rows = torch.zeros(batch, words, dtype=torch.int64, device=device)
        return loss_of(model(input_ids=rows, labels=rows))

    def make() -> tuple[nn.Module, Loss]:
        if name is not None and hasattr(transformers, name):
            model = getattr(transformers, name)(settings)
        else:
            model = transformers.AutoModelForCausalLM.from_config(settings)
        if model.main_input_name != "input_ids":
            raise ValueError(f"{config}: {type(model).__name__} takes {model.main_input_name}, not input_ids")
        return model.float(), loss  # a config may name a dtype, but amp does the casts

    return make
