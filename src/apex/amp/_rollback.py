"""Everything that `initialize` may change, noted before it does, so that a call that fails leaves no trace.

The `_snapshot` functions note a state and return a function that restores it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ._amp_state import _amp_state
from ._master_params import innermost, takes_gradients


@contextlib.contextmanager
def unchanged_on_failure(models: list[nn.Module], optimizers: list[Any]) -> Iterator[None]:
    """Gives models, optimizers and the session their former state back if what is inside raises.

    Tensors keep their old memory until the end, so that a float32 weight comes back with all of its digits.
    """
    # Optimizers of the session as well: they are released if they have masters for one of the models.
    optimizers = [*optimizers, *(known for known in _amp_state.optimizers if known not in optimizers)]
    restore = [
        _snapshot_session(),
        *(_snapshot_module(module) for model in models for module in model.modules()),
        *(_snapshot_optimizer(optimizer) for optimizer in optimizers),
        *(_snapshot_tensor(tensor) for tensor in _tensors(models, optimizers)),
    ]
    try:
        yield
    except BaseException:
        for each in restore:
            each()
        for optimizer in filter(takes_gradients, optimizers):
            innermost(optimizer)._params_were_cast()
        raise


def _snapshot_session() -> Callable[[], None]:
    attributes = dict(vars(_amp_state))
    undo = list(_amp_state.undo)
    models, masters, optimizers = dict(_amp_state.models), dict(_amp_state.masters), list(_amp_state.optimizers)
    records = [(record, list(record.undo)) for record in models.values()]
    casts = [(record.forward, record.forward.casts) for record, _ in records if record.forward is not None]

    def restore() -> None:
        vars(_amp_state).clear()
        vars(_amp_state).update(attributes)
        _amp_state.undo[:] = undo
        for mapping, items in ((_amp_state.models, models), (_amp_state.masters, masters)):
            mapping.clear()
            mapping.update(items)
        _amp_state.optimizers.clear()
        _amp_state.optimizers.update(optimizers)
        for record, steps in records:
            record.undo[:] = steps
        for forward, before in casts:
            forward.casts = before

    return restore


def _snapshot_module(module: nn.Module) -> Callable[[], None]:
    attributes = dict(vars(module))
    # Whoever registered a hook refers to the dict that has it, so its items are noted and the dict is kept.
    # A model may have something else of such a name: transformers with gradient checkpointing has a list.
    hooks = [(v, dict(v)) for name, v in attributes.items() if name.endswith("_hooks") and isinstance(v, dict)]

    def restore() -> None:
        vars(module).clear()
        vars(module).update(attributes)
        for mapping, items in hooks:
            mapping.clear()
            mapping.update(items)

    return restore


def _snapshot_optimizer(optimizer: Any) -> Callable[[], None]:
    inner = innermost(optimizer)
    attributes = [(each, dict(vars(each))) for each in (inner, optimizer)]
    params = [(group["params"], list(group["params"])) for group in optimizer.param_groups]
    state = dict(optimizer.state)

    def restore() -> None:
        for each, items in attributes:
            vars(each).clear()
            vars(each).update(items)
        for listed, before in params:
            listed[:] = before
        optimizer.state.clear()
        optimizer.state.update(state)

    return restore


def _tensors(models: list[nn.Module], optimizers: list[Any]) -> list[Tensor]:
    found = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    for optimizer in optimizers:
        found.extend(param for group in optimizer.param_groups for param in group["params"])
        if hasattr(optimizer, "_amp_stash"):
            found.extend(optimizer._amp_stash.all_fp16_params)
    return list({id(tensor): tensor for tensor in found}.values())


def _snapshot_tensor(tensor: Tensor) -> Callable[[], None]:
    data, grad = tensor.data, tensor.grad

    def restore() -> None:
        tensor.grad = None
        tensor.data = data
        tensor.grad = grad

    return restore
