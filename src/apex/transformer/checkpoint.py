"""Checkpoints of a split model that load into any other split: other tensor, pipeline, chunk and data-parallel sizes.

`torch.distributed.checkpoint` saves tensors as parts of whole tensors, named as in the whole model. A folder is written
completely or not at all, as by `apex.checkpoint`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch import nn

from .._arguments import checked
from ..checkpoint import Series
from ..checkpoint._files import plain_state
from ..checkpoint._ranks import is_first, restoring
from ..checkpoint._sharded import fill, open_checked, raising_everywhere, save_sharded
from ._resharding import random
from ._resharding.model_parts import WholeModel
from ._resharding.optimizer import add_state, parameter_groups, request_state
from ._resharding.shards import PADDING, Entries, shard_locations
from .pipeline_parallel.utils import listify_model, unwrap_model

if TYPE_CHECKING:
    from ..checkpoint._reading import Reader

Model = nn.Module | list[nn.Module]
_FORMAT = 1


@checked
def save(
    path: str | os.PathLike[str],
    model: Model,
    optimizer: Any = None,
    *,
    use_async: bool = False,
    staging: str = "host",
    if_busy: str = "wait",
    **others: Any,
) -> None:
    """Write a model, its optimizer and other state to a folder; all processes call it.

    `model` may be a list of a stage's chunks, and `optimizer` a list of optimizers with different parameters, such as a
    ZeRO optimizer of dense parameters and one of experts. `others`, saved from rank 0, are objects with a
    `state_dict`, such as a scaler or a scheduler, or plain values, such as a step number. Random number states of every
    rank are saved.
    `apex.checkpoint.save_sharded` describes `use_async`, `staging` and `if_busy`.
    """
    state = state_of(model, optimizer, **others)
    save_sharded(state, path, use_async=use_async, staging=staging, if_busy=if_busy)  # type: ignore[arg-type]


@checked
def state_of(model: Model, optimizer: Any = None, **others: Any) -> dict[str, Any]:
    """Return the state that `save` writes, for `apex.checkpoint.Series(..., sharded=True)`.

    Tensors are views of the model and the optimizer, so save them before the next step.
    """
    optimizers = _listed(optimizer)
    model, described = _describe(model, optimizers, "the state of a split model could not be collected")
    entries, states = Entries(), random.states()
    with raising_everywhere("the state of a split model could not be collected"):
        for part in described.parts:
            if part.writes:
                entries.add(f"model.{part.name}", part.value, shard_locations(part.variable))
        values = {
            "format": _FORMAT,
            "layout": random.layout(len(model)),
            "seed": random.seed_from(states),
            "optimizer": None,
            "others": {name: plain_state(name, value) for name, value in others.items()},
        }
        of_each = _values_of_each(optimizers, described)
        for own, each in zip(of_each, optimizers, strict=True):
            own["step"] = add_state(entries, each, described.parts)
        if of_each:
            values["optimizer"] = of_each[0] if len(of_each) == 1 else of_each
        # PyTorch saves a tuple as one value.
        entries.state[random.key()] = (states,)
        if is_first():
            entries.state["values"] = (plain_state("an option of the optimizer", values),)
    return entries.state


@checked
def load(path: str | os.PathLike[str], model: Model, optimizer: Any = None, **others: Any) -> dict[str, Any]:
    """Load a checkpoint of `save` into any layout of processes; all processes call it.

    `others` are objects with `load_state_dict`, by the names they were saved under. Other saved values are returned
    by name. Several optimizers must be in the order of `save`. If the layout is the same, random number
    streams continue; otherwise they are seeded anew, always with the same seed, and a warning is logged. Raises
    `FileNotFoundError` and `DamagedCheckpoint` as `apex.checkpoint.load_sharded` does. Raises a RuntimeError in all
    processes if names, shapes or dtypes differ from the model's, or if one of `others` refuses its state. An error
    leaves everything unchanged.
    """
    with open_checked(path) as reader:
        return _load(reader, model, optimizer, others)


@checked
def resume_latest(series: Series, model: Model, optimizer: Any = None, **others: Any) -> tuple[int, dict[str, Any]]:
    """Load the newest intact checkpoint of a sharded series of `state_of`; all processes call it.

    Returns the number of the checkpoint's step and the saved values that `load` returns, or (0, {}) if the series has
    no checkpoint. `model`, `optimizer` and `others` mean the same as in `load`.
    """
    if not series.sharded:
        raise ValueError("resume_latest needs a sharded series: Series(folder, sharded=True)")
    path = series.latest()
    return (0, {}) if path is None else (series.step_of(path), load(path, model, optimizer, **others))


def _load(reader: Reader, model: Model, optimizer: Any, others: dict[str, Any]) -> dict[str, Any]:
    saved = reader.contents.state_dict_metadata
    if "values" not in saved:
        raise ValueError(f"{reader.path} was not written by apex.transformer.checkpoint: it has no entry 'values'")
    state: dict[str, Any] = {"values": None}
    fill(state, reader)
    values = state["values"][0]
    failed = f"the checkpoint {reader.path} does not fit"
    optimizers = _listed(optimizer)
    model, described = _describe(model, optimizers, failed)
    entries, layout = Entries(saved), random.layout(len(model))
    with raising_everywhere(failed):
        _check(values, saved, described, others)
        of_each = _check_optimizers(values["optimizer"], optimizers, described)
        for part in described.parts:
            entries.add(f"model.{part.name}", part.value, shard_locations(part.variable))
        load_optimizers = [
            request_state(entries, each, described.parts, own) for each, own in zip(optimizers, of_each, strict=True)
        ]
        if values["layout"] == layout:
            entries.state[random.key()] = None
    with restoring(others.values()):
        # Before the model is changed, because an object may refuse its state.
        with raising_everywhere(failed):
            for name, value in others.items():
                value.load_state_dict(values["others"].pop(name))
        fill(entries.state, reader)
    for view in entries.unsaved:
        view.zero_()
    for chunk, state_dict in zip(model, described.dicts, strict=True):
        chunk.load_state_dict(state_dict)
    for load_optimizer in load_optimizers:
        load_optimizer()
    if values["layout"] == layout:
        random.restore(entries.state[random.key()][0])
    else:
        random.seed_anew(values["seed"], values["layout"], layout)
    return values["others"]


def _listed(optimizer: Any) -> list[Any]:
    return list(optimizer) if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]


def _describe(model: Model, optimizers: list[Any], failed: str) -> tuple[list[nn.Module], WholeModel]:
    """Return the chunks without wrappers, and their description as parts of the whole model."""
    with raising_everywhere(failed):
        chunks = unwrap_model(listify_model(model))
        described = WholeModel(chunks, [group for each in optimizers for group in parameter_groups(each)])
    with raising_everywhere(failed):
        described.join()
    return chunks, described


def _values_of_each(optimizers: list[Any], described: WholeModel) -> list[dict[str, Any]]:
    """Return the type of each optimizer, the options of its groups, and each parameter's group in it or None."""
    found, first = [], 0
    for optimizer in optimizers:
        groups = described.options[first : first + len(optimizer.param_groups)]
        numbers: dict[int | None, int] = {first + number: number for number in range(len(groups))}
        group_of = {name: numbers.get(group) for name, group in described.group_of.items()}
        found.append({"type": type(optimizer).__name__, "groups": groups, "group_of": group_of})
        first += len(groups)
    return found


def _check(values: Any, saved: Any, described: WholeModel, others: dict[str, Any]) -> None:
    """Raise if the checkpoint lacks entries, has entries that no stage has, or has entries of another kind."""
    if values["format"] != _FORMAT:
        raise ValueError(f"it has format {values['format']}; this version reads format {_FORMAT}")
    own_names = set(described.group_of)
    saved_names = {key.removeprefix("model.").removesuffix(PADDING) for key in saved if key.startswith("model.")}
    for which, names in (("lacks", own_names - saved_names), ("has, and the model not,", saved_names - own_names)):
        if names:
            raise ValueError(f"it {which} {len(names)} parameters or buffers: {', '.join(sorted(names)[:3])}, ...")
    for name, value in others.items():
        if name not in values["others"]:
            raise ValueError(
                f"it has no {name}; it has {', '.join(sorted(values['others'])) or 'nothing'} beside the model"
            )
        if not hasattr(value, "load_state_dict"):
            raise TypeError(f"{name} must have load_state_dict, got {type(value).__name__}; plain values are returned")


def _check_optimizers(saved: Any, optimizers: list[Any], described: WholeModel) -> list[Any]:
    """Return the saved values of each optimizer; raise if there are other optimizers, or other groups in them."""
    if not optimizers:
        return []
    if saved is None:
        raise ValueError("it was saved without an optimizer")
    saved = saved if isinstance(saved, list) else [saved]
    if len(saved) != len(optimizers):
        raise ValueError(f"it was saved with {len(saved)} optimizers, and is loaded with {len(optimizers)}")
    for number, (old, new) in enumerate(zip(saved, _values_of_each(optimizers, described), strict=True)):
        optimizer = f"optimizer {number}" if len(saved) > 1 else "optimizer"
        if old["type"] != new["type"]:
            raise ValueError(f"its {optimizer} is {old['type']}, not {new['type']}")
        if len(old["groups"]) != len(new["groups"]):
            raise ValueError(f"its {optimizer} has {len(old['groups'])} parameter groups, not {len(new['groups'])}")
        for part in described.parts:
            groups = old["group_of"][part.name], new["group_of"][part.name]
            if groups[0] != groups[1]:
                raise ValueError(f"{part.name} was in the {optimizer}'s group {groups[0]}, and is in group {groups[1]}")
    return saved
