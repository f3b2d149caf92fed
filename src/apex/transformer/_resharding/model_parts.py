"""Names of the parts of a model that do not depend on how it is cut into stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from .gathered import of_all_stages, pipeline_group
from .place import tensor_parallel

# Marks of parameters that several pipeline stages hold copies of.
_TIED = ("shared_embedding", "shared_position_embedding")


class Part(NamedTuple):
    """A parameter or buffer: its name in the whole model, itself, and its value, as its chunk's state dict has it.

    Of all copies, on ranks and stages, only those with `writes` are saved.
    """

    name: str
    variable: Tensor
    value: Tensor
    writes: bool


class _Held(NamedTuple):
    """What stages tell each other of a variable; `tie` is its mark, `group` that of the optimizer's groups it is in."""

    name: str
    chunk: int
    is_parameter: bool
    tie: str | None
    group: int | None


# Options of an optimizer's parameter group, and the model's parameters in it.
Group = tuple[dict[str, Any], list[Tensor]]


class WholeModel:
    """A model of which `chunks` are here; `groups` are those of its optimizer.

    `join`, called in all ranks of a pipeline, finds out what the other stages hold.
    """

    def __init__(self, chunks: Sequence[nn.Module], groups: Sequence[Group]) -> None:
        # The parts that are here, the names of all parts with the optimizer's group of each, and the groups' options.
        self.parts: list[Part] = []
        self.group_of: dict[str, int | None] = {}
        self.options: list[dict[str, Any]] = []
        # What modules share is one tensor in the chunks' state dicts, too.
        self.dicts = [chunk.state_dict() for chunk in chunks]
        self._groups = groups
        self._found: dict[int, tuple[_Held, Tensor, Tensor]] = {}
        group_of = {id(param): number for number, (_, params) in enumerate(groups) for param in params}
        for number, (chunk, values) in enumerate(zip(chunks, self.dicts, strict=True)):
            variables: dict[str, Tensor] = dict(chunk.named_parameters(remove_duplicate=False))
            variables.update(chunk.named_buffers(remove_duplicate=False))
            paths = _numbered_paths(chunk)
            for key, value in values.items():
                if key not in variables:
                    raise TypeError(f"{key} in the model's state dict is neither a parameter nor a buffer")
                variable = variables[key]
                if not getattr(variable, "allreduce", True):
                    raise ValueError(f"{key} is one of the experts that are divided among ranks: these cannot be saved")
                owner, _, leaf = key.rpartition(".")
                name = f"{paths[owner]}.{leaf}" if owner else leaf
                tie = next((mark for mark in _TIED if getattr(variable, mark, False)), None)
                held = _Held(name, number, isinstance(variable, nn.Parameter), tie, group_of.get(id(variable)))
                if variable.numel():
                    values[key] = self._found.setdefault(id(variable), (held, variable, value))[2]
        strange = sum(id(param) not in self._found and param.numel() > 0 for _, params in groups for param in params)
        if strange:
            raise ValueError(f"the optimizer has {strange} parameters that the model has not")

    def join(self) -> None:
        """Gives parts their names, and checks that stages do not hold different parameters under one name.

        A copy that is marked as such (`shared_embedding`) has the name that the first stage has for it.
        """
        counts = [(options, len(params)) for options, params in self._groups]
        everywhere = of_all_stages(([held for held, *_ in self._found.values()], counts))
        rank = dist.get_rank(pipeline_group()) if pipeline_group() is not None else 0
        stages = [held for held, _ in everywhere]
        names = {held.tie: held.name for stage in reversed(stages) for held in reversed(stage) if held.tie}
        first: dict[str, tuple[int, _Held]] = {}
        for number, stage in enumerate(stages):
            for held in stage:
                name = names.get(held.tie, held.name)
                other, before = first.setdefault(name, (number, held))
                is_copy = held.tie and held.tie == before.tie and (other, before.chunk) != (number, held.chunk)
                if before is not held and held.is_parameter and not is_copy:
                    raise ValueError(
                        f"chunk {before.chunk} of pipeline rank {other} and chunk {held.chunk} of rank {number} both "
                        f"hold {name}. Give each layer of a list its number in the whole model as `layer_number` "
                        "(from 1), or keep layers in a ModuleDict by their number; mark one embedding of a chunk, and "
                        "its copies, with `shared_embedding`"
                    )
                self.group_of.setdefault(name, held.group)
        for held, variable, value in self._found.values():
            name = names.get(held.tie, held.name)
            is_own = getattr(variable, "tensor_model_parallel", False) or tensor_parallel()[1] == 0
            self.parts.append(Part(name, variable, value, is_own and first[name] == (rank, held)))
        self.options = _options([counts for _, counts in everywhere])


def _options(stages: list[list[tuple[dict[str, Any], int]]]) -> list[dict[str, Any]]:
    """The options of each group, of the first stage that has parameters in it: only there steps are counted."""
    if len({len(groups) for groups in stages}) != 1:
        raise ValueError(f"the optimizers of the stages have {list(map(len, stages))} parameter groups: make as many")
    return [max(same, key=lambda group: group[1] > 0)[0] for same in zip(*stages, strict=True)]


def _numbered_paths(chunk: nn.Module) -> dict[str, str]:
    """The names of modules, with layers of lists numbered as in the whole model: by `layer_number`, from 1 on."""
    found, modules = {"": ""}, {"": chunk}
    for path, module in chunk.named_modules(remove_duplicate=False):
        if path:
            modules[path] = module
            owner, _, name = path.rpartition(".")
            number = getattr(module, "layer_number", None)
            if isinstance(number, int) and isinstance(modules[owner], (nn.ModuleList, nn.Sequential)):
                name = str(number - 1)
            found[path] = f"{found[owner]}.{name}" if owner else name
    return found
