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

    `model` may be a list of a stage's chunks. `others`, saved from rank 0, are objects with a `state_dict`, such as a
    scaler or a scheduler, or plain values, such as a step number. Random number states of every rank are saved.
    `apex.checkpoint.save_sharded` describes `use_async`, `staging` and `if_busy`.
    """
    state = state_of(model, optimizer, **others)
    save_sharded(state, path, use_async=use_async, staging=staging, if_busy=if_busy)  # type: ignore[arg-type]


@checked
def state_of(model: Model, optimizer: Any = None, **others: Any) -> dict[str, Any]:
    """Return the state that `save` writes, for `apex.checkpoint.Series(..., sharded=True)`.

    Tensors are views of the model and the optimizer, so save them before the next step.
    """
    model, described = _describe(model, optimizer, "the state of a split model could not be collected")
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
        if optimizer is not None:
            values["optimizer"] = {
                "type": type(optimizer).__name__,
                "groups": described.options,
                "group_of": described.group_of,
                "step": add_state(entries, optimizer, described.parts),
            }
        # PyTorch saves a tuple as one value.
        entries.state[random.key()] = (states,)
        if is_first():
            entries.state["values"] = (plain_state("an option of the optimizer", values),)
    return entries.state


@checked
def load(path: str | os.PathLike[str], model: Model, optimizer: Any = None, **others: Any) -> dict[str, Any]:
    """Load a checkpoint of `save` into any layout of processes; all processes call it.

    `others` are objects with `load_state_dict`, by the names they were saved under. Other saved values are returned by
    name. If the layout is the same, random number streams continue; otherwise they are seeded anew, always with the
    same seed, and a warning is logged. Raises `FileNotFoundError` and `DamagedCheckpoint` as
    `apex.checkpoint.load_sharded` does. Raises a RuntimeError in all processes if names, shapes or dtypes differ from
    the model's, or if one of `others` refuses its state. An error leaves everything unchanged.
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
    model, described = _describe(model, optimizer, failed)
    entries, layout = Entries(saved), random.layout(len(model))
    with raising_everywhere(failed):
        _check(values, saved, described, optimizer, others)
        for part in described.parts:
            entries.add(f"model.{part.name}", part.value, shard_locations(part.variable))
        load_optimizer = request_state(entries, optimizer, described.parts, values["optimizer"])
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
    load_optimizer()
    if values["layout"] == layout:
        random.restore(entries.state[random.key()][0])
    else:
        random.seed_anew(values["seed"], values["layout"], layout)
    return values["others"]


def _describe(model: Model, optimizer: Any, failed: str) -> tuple[list[nn.Module], WholeModel]:
    """Return the chunks without wrappers, and their description as parts of the whole model."""
    with raising_everywhere(failed):
        chunks = unwrap_model(listify_model(model))
        described = WholeModel(chunks, parameter_groups(optimizer))
    with raising_everywhere(failed):
        described.join()
    return chunks, described


def _check(values: Any, saved: Any, described: WholeModel, optimizer: Any, others: dict[str, Any]) -> None:
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
    if optimizer is None:
        return
    if values["optimizer"] is None:
        raise ValueError("it was saved without an optimizer")
    kind, groups = values["optimizer"]["type"], values["optimizer"]["groups"]
    if kind != type(optimizer).__name__:
        raise ValueError(f"its optimizer is {kind}, not {type(optimizer).__name__}")
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(f"its optimizer has {len(groups)} parameter groups, not {len(optimizer.param_groups)}")
    for part in described.parts:
        saved_group, group = values["optimizer"]["group_of"][part.name], described.group_of[part.name]
        if saved_group != group:
            raise ValueError(f"{part.name} was in the optimizer's group {saved_group}, and is in group {group}")
