"""A record of everything that `initialize` may change, so that a call that fails changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ._amp_state import _amp_state
from ._master_params import innermost, takes_gradients


@contextlib.contextmanager
def unchanged_on_failure(models: list[nn.Module], optimizers: list[Any]) -> Iterator[None]:
    """Restore models, optimizers and the session if the body of the context raises.

    Tensors keep their old memory until the end, so that float32 weights are restored exactly.
    """
    # The session's other optimizers too: they are released if they have masters for one of the models.
    optimizers = [*optimizers, *(known for known in _amp_state.optimizers if known not in optimizers)]
    snapshots = [_snapshot(container) for container in _containers(models, optimizers)]
    snapshots += [_snapshot_tensor(tensor) for tensor in _tensors(models, optimizers)]
    try:
        yield
    except BaseException:
        for restore in snapshots:
            restore()
        for optimizer in filter(takes_gradients, optimizers):
            innermost(optimizer)._params_were_cast()
        raise


def _containers(models: list[nn.Module], optimizers: list[Any]) -> Iterator[Any]:
    """Yield the dicts, lists and sets whose contents may change; an object's attributes before their contents."""
    yield from (vars(_amp_state), _amp_state.undo, _amp_state.models, _amp_state.masters, _amp_state.optimizers)
    for record in _amp_state.models.values():
        yield record.undo
        if record.forward is not None:
            yield vars(record.forward)
    for module in (module for model in models for module in model.modules()):
        yield vars(module)
        # A hook's handle refers to the dict that holds the hook, so the dict must be kept. Other attributes may have
        # such a name: transformers with gradient checkpointing has a list.
        for name, value in vars(module).items():
            if name.endswith("_hooks") and isinstance(value, dict):
                yield value
    for optimizer in optimizers:
        yield from (vars(innermost(optimizer)), vars(optimizer), optimizer.state)
        yield from (group["params"] for group in optimizer.param_groups)


def _snapshot(container: Any) -> Callable[[], None]:
    """Return a function that restores the current contents of a dict, list or set."""
    contents = list(container.items() if hasattr(container, "items") else container)

    def restore() -> None:
        container.clear()
        (container.extend if isinstance(container, list) else container.update)(contents)

    return restore


def _tensors(models: list[nn.Module], optimizers: list[Any]) -> list[Tensor]:
    tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    for optimizer in optimizers:
        tensors.extend(param for group in optimizer.param_groups for param in group["params"])
        if hasattr(optimizer, "_amp_stash"):
            tensors.extend(optimizer._amp_stash.all_fp16_params)
    return list({id(tensor): tensor for tensor in tensors}.values())


def _snapshot_tensor(tensor: Tensor) -> Callable[[], None]:
    data, grad = tensor.data, tensor.grad

    def restore() -> None:
        tensor.grad = None
        tensor.data = data
        tensor.grad = grad

    return restore
