"""Names of a model's parameters and buffers that do not depend on how it is cut into stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from .gathered import gather_from_stages, pipeline_group
from .shards import tensor_parallel

# Attributes of parameters that several pipeline stages hold copies of.
_TIED = ("shared_embedding", "shared_position_embedding")


class Part(NamedTuple):
    """A parameter or buffer: its name in the whole model, the variable, and its value in the chunk's state dict.

    Of all copies on ranks and stages, only the one with `writes` is saved.
    """

    name: str
    variable: Tensor
    value: Tensor
    writes: bool


class _Description(NamedTuple):
    """A variable as described to other stages; `tie` is its attribute of `_TIED`, `group` its optimizer group."""

    name: str
    chunk: int
    is_parameter: bool
    tie: str | None
    group: int | None


# The options of an optimizer's parameter group, and the model parameters in it.
Group = tuple[dict[str, Any], list[Tensor]]


class WholeModel:
    """A model that is split into stages; `chunks` are this process's part, `groups` its optimizer's parameter groups.

    `join`, called in all ranks of a pipeline, collects the parts of the other stages.
    """

    def __init__(self, chunks: Sequence[nn.Module], groups: Sequence[Group]) -> None:
        # This process's parts, the optimizer group of each part's name in the whole model, and the options of the
        # groups.
        self.parts: list[Part] = []
        self.group_of: dict[str, int | None] = {}
        self.options: list[dict[str, Any]] = []
        # A tensor that modules share is also one tensor in the chunks' state dicts.
        self.dicts = [chunk.state_dict() for chunk in chunks]
        self._groups = groups
        self._variables: dict[int, tuple[_Description, Tensor, Tensor]] = {}
        group_of = {id(param): number for number, (_, params) in enumerate(groups) for param in params}
        for number, (chunk, values) in enumerate(zip(chunks, self.dicts, strict=True)):
            variables: dict[str, Tensor] = dict(chunk.named_parameters(remove_duplicate=False))
            variables.update(chunk.named_buffers(remove_duplicate=False))
            paths = _numbered_paths(chunk)
            for key, value in values.items():
                if key not in variables:
                    raise TypeError(f"{key} in the model's state dict is neither a parameter nor a buffer")
                variable = variables[key]
                owner, _, leaf = key.rpartition(".")
                name = f"{paths[owner]}.{leaf}" if owner else leaf
                tie = next((mark for mark in _TIED if getattr(variable, mark, False)), None)
                info = _Description(name, number, isinstance(variable, nn.Parameter), tie, group_of.get(id(variable)))
                if variable.numel():
                    values[key] = self._variables.setdefault(id(variable), (info, variable, value))[2]
        extra = sum(id(param) not in self._variables and param.numel() > 0 for _, params in groups for param in params)
        if extra:
            raise ValueError(
                f"the optimizer has {extra} parameters that the model has not. If they are float32 masters of a "
                "boosted model, save by booster.save_training"
            )
        several = sum(len(params) for _, params in groups) - len(group_of)
        if several:
            raise ValueError(f"{several} parameters are in several optimizers, or in several groups of one")

    def join(self) -> None:
        """Name the parts, and raise if two stages hold different parameters under one name.

        A copy (marked with `shared_embedding`) gets the name that the parameter has on the first stage.
        """
        counts = [(options, len(params)) for options, params in self._groups]
        everywhere = gather_from_stages(([info for info, *_ in self._variables.values()], counts))
        rank = dist.get_rank(pipeline_group()) if pipeline_group() is not None else 0
        stages = [info for info, _ in everywhere]
        names = {info.tie: info.name for stage in reversed(stages) for info in reversed(stage) if info.tie}
        first: dict[str, tuple[int, _Description]] = {}
        for number, stage in enumerate(stages):
            for info in stage:
                name = names.get(info.tie, info.name)
                other, first_info = first.setdefault(name, (number, info))
                is_copy = info.tie and info.tie == first_info.tie and (other, first_info.chunk) != (number, info.chunk)
                if first_info is not info and info.is_parameter and not is_copy:
                    raise ValueError(
                        f"chunk {first_info.chunk} of pipeline rank {other} and chunk {info.chunk} of "
                        f"rank {number} both hold {name}. Give each layer of a list its number in the whole model as "
                        "`layer_number` (from 1), or keep layers in a ModuleDict by their number; mark one embedding "
                        "of a chunk, and its copies, with `shared_embedding`"
                    )
                self.group_of.setdefault(name, info.group)
        for info, variable, value in self._variables.values():
            name = names.get(info.tie, info.name)
            is_own = getattr(variable, "tensor_model_parallel", False) or tensor_parallel(variable)[1] == 0
            self.parts.append(Part(name, variable, value, is_own and first[name] == (rank, info)))
        self.options = _options([counts for _, counts in everywhere])


def _options(stages: list[list[tuple[dict[str, Any], int]]]) -> list[dict[str, Any]]:
    """Return each group's options from the stage with parameters that has counted most steps of it.

    A stage counts no steps of a group whose parameters it has frozen.
    """
    if len({len(groups) for groups in stages}) != 1:
        raise ValueError(f"the optimizers of the stages have {list(map(len, stages))} parameter groups: make as many")
    most = lambda group: (group[1] > 0, int(group[0].get("step", 0)))  # noqa: E731
    return [max(stage_groups, key=most)[0] for stage_groups in zip(*stages, strict=True)]


def _numbered_paths(chunk: nn.Module) -> dict[str, str]:
    """Return the names of modules; layers of lists are numbered as in the whole model, by `layer_number` (from 1)."""
    names, modules = {"": ""}, {"": chunk}
    for path, module in chunk.named_modules(remove_duplicate=False):
        if path:
            modules[path] = module
            owner, _, name = path.rpartition(".")
            number = getattr(module, "layer_number", None)
            if isinstance(number, int) and isinstance(modules[owner], (nn.ModuleList, nn.Sequential)):
                name = str(number - 1)
            names[path] = f"{names[owner]}.{name}" if owner else name
    return names
