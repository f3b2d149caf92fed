"""State dicts of whole tensors: gathered in the writing process for saving, and divided among all for loading.

Parameters may be sharded, divided among tensor-parallel ranks, in another pipeline stage, or in half precision with
float32 masters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._failures import explained
from ..amp._amp_state import HALF
from ..checkpoint._ranks import is_first, refusing_together
from ..optimizers._base import EncodingOptimizer
from ..optimizers._formats import decoded_values
from ..transformer import parallel_state
from ..transformer._resharding.gathered import (
    full_shape,
    full_tensor,
    gather_from_stages,
    is_divided,
    local_part,
    pipeline_group,
)
from ._optimizer_checks import algorithm_of, check_optimizer
from ._zero import divided_state, load_plain_state
from .wrappers import OptimizerWrapper, masters_of, unwrapped


def chunks_of(model: Any) -> list[nn.Module]:
    """Return the user's modules inside of a boosted model: the model, or the chunks of a pipeline stage."""
    return [unwrapped(chunk) for chunk in getattr(model, "chunks", [model])]


def names_in(chunks: list[nn.Module], has_stages: bool) -> list[dict[str, str]]:
    """Return, for each chunk, the whole model's name of each entry of the chunk's state dict.

    If other processes have other pipeline stages (`has_stages`), all of them must call it.
    """
    if not has_stages and len(chunks) == 1:
        return [{key: key for key in chunks[0].state_dict()}]
    from ..transformer._resharding.model_parts import WholeModel

    described = WholeModel(chunks, ())
    described.join()
    names = {id(part.variable): part.name for part in described.parts}
    whole_names = []
    for chunk in chunks:
        tensors = {**dict(chunk.named_parameters(remove_duplicate=False)), **dict(chunk.named_buffers())}
        whole_names.append({key: names.get(id(tensors.get(key)), key) for key in chunk.state_dict()})
    return whole_names


def _has_stages(boosted: Any) -> bool:
    """Return whether other processes have other pipeline stages of a boosted model or optimizer.

    Process groups cannot answer this: a model without stages may be trained after one with stages.
    """
    return bool(getattr(boosted, "has_stages", False))


def _of_all_stages(boosted: Any, value: Any) -> list[Any]:
    """Gather `value` from all pipeline stages, in their order; return only this process's if there are no stages."""
    return gather_from_stages(value) if _has_stages(boosted) else [value]


def _entries(model: Any) -> Iterator[tuple[nn.Module, str, str, Any, Any]]:
    """Yield every entry of a model's state dicts: chunk, key, name in the whole model, value, parameter.

    The parameter is None for a buffer.
    """
    chunks = chunks_of(model)
    for chunk, names in zip(chunks, names_in(chunks, _has_stages(model)), strict=True):
        params = dict(chunk.named_parameters(remove_duplicate=False))
        for key, value in chunk.state_dict().items():
            yield chunk, key, names[key], value, params.get(key)


class Parts:
    """The entries of a whole state dict, divided into parts for files, which `gather` collects one after the other.

    - `keys`: the keys of each part; at least one part;
    - `total`: the size of all tensors in bytes;
    - `rest`: everything that is not divided: groups and the loss scale of an optimizer.
    """

    def __init__(
        self,
        sizes: dict[Any, int],
        size: int | None,
        collect: Callable[[list[Any]], dict[Any, Any]],
        rest: dict[str, Any] | None = None,
    ) -> None:
        """Divide entries of these `sizes` in bytes into parts of at most `size` MB; into one part if it is None."""
        self.total = sum(sizes.values())
        self.rest = rest or {}
        self.keys: list[list[Any]] = [[]]
        self._collect = collect
        filled = 0
        for key, entry in sizes.items():
            if size is not None and self.keys[-1] and filled + entry > size * 1024**2:
                self.keys.append([])
                filled = 0
            self.keys[-1].append(key)
            filled += entry

    def gather(self) -> Iterator[dict[Any, Any]]:
        """Yield the parts; processes that receive no tensors get empty dicts. All must iterate to the end."""
        for keys in self.keys:
            yield self._collect(keys)


class _Receivers:
    """The processes that receive whole tensors: all of them, or the first one, which writes checkpoints.

    - `keeps`: whether this process keeps tensors that are gathered from its tensor-parallel ranks. The first process
      does, and so do the processes with the other pipeline stages of the same replica;
    - `feeds`: whether this process's part is needed for the gathered tensors.
    """

    def __init__(self, boosted: Any, everywhere: bool) -> None:
        self._has_stages, self._everywhere = _has_stages(boosted), everywhere
        self._group = pipeline_group() if self._has_stages else None
        self._sends = self._group is not None and 0 in dist.get_process_group_ranks(self._group)
        self.keeps = everywhere or is_first() or self._sends
        replica = 0 if parallel_state.is_unitialized() else parallel_state.get_data_parallel_rank(True)
        self.feeds = self.keeps or (not parallel_state.is_unitialized() and replica == 0)

    def gather(self, value: Tensor, param: Any, copies: bool) -> Tensor | None:
        """Return the whole tensor of this process's part, or None if the process does not keep it."""
        if not self.keeps and not is_divided(value, param):
            return None
        whole = full_tensor(value, param, copies)
        return whole if self.keeps else None

    def join(self, state: dict[Any, Any]) -> dict[Any, Any]:
        """Return the entries of all pipeline stages; an empty dict in processes that do not receive them."""
        if not self._has_stages or self._everywhere:
            stages = gather_from_stages(state) if self._has_stages else [state]
        elif self._sends:
            stages = [{}] * dist.get_world_size(self._group)
            with explained("sending a pipeline stage to the process that writes a checkpoint"):
                dist.gather_object(state, stages if is_first() else None, 0, self._group)
        else:
            stages = []
        return {key: value for stage in stages for key, value in stage.items()}


def model_parts(
    model: Any, size: int | None = None, *, unique: bool = False, copies: bool = False, everywhere: bool = False
) -> Parts:
    """Return the state dict of the whole model in parts, with the values of float32 masters.

    All processes must call it. Tensors are gathered in the first process, or in all if `everywhere` is set. If `unique`
    is set, a tensor with several names gets only the first name. If `copies` is set, no tensor shares memory with the
    model.
    """
    receivers, masters = _Receivers(model, everywhere), masters_of(model)
    local = masters.read() if masters is not None and masters.is_local else {}
    own: dict[str, tuple[Any, Any]] = {}
    sizes: dict[str, int] = {}
    seen: set[Any] = set()
    for _, _, name, value, param in _entries(model):
        shape = full_shape(value, param) if isinstance(value, Tensor) else torch.Size([0])
        if unique and shape.numel() and _identity(value, param) in seen:
            continue
        seen.add(_identity(value, param))
        own[name] = value, param
        is_exact = masters is not None and not masters.is_local and param is not None and param.dtype in HALF
        width = 4 if is_exact else getattr(local.get(param, value), "itemsize", 0)
        sizes[name] = shape.numel() * width
    stages = _of_all_stages(model, sizes)
    this_stage = dist.get_rank(pipeline_group()) if len(stages) > 1 else 0
    stage_of = {name: number for number, stage in enumerate(stages) for name in stage}  # the last one, if several

    def collect(names: list[str]) -> dict[str, Any]:
        mine = [name for name in names if stage_of[name] == this_stage]
        exact = local
        if masters is not None and not masters.is_local:
            exact = masters.read([own[name][1] for name in mine], receivers.feeds)
        state: dict[str, Any] = {}
        gathered: dict[Tensor, Tensor | None] = {}  # a parameter with several names is gathered once
        for name in mine:
            value, param = own[name]
            if param in gathered:
                value = gathered[param]
            elif isinstance(value, Tensor):
                value = receivers.gather(exact.get(param, value), param, copies)
                if param is not None:
                    gathered[param] = value
            if receivers.keeps:
                state[name] = value
        return receivers.join(state)

    return Parts({name: size for stage in stages for name, size in stage.items()}, size, collect)


def whole_model(model: Any, copies: bool = False) -> dict[str, Tensor]:
    """Return the state dict of `model_parts` in all processes, in one part; all processes must call it."""
    return next(model_parts(model, copies=copies, everywhere=True).gather())


def _identity(value: Any, param: Any) -> Any:
    """Return a key that is equal for state dict entries of one tensor: the parameter, or a buffer's memory."""
    if param is not None:
        return param
    local = getattr(value, "_local_tensor", value)  # a DTensor's own address is 0
    address = local.data_ptr() if isinstance(local, Tensor) else 0
    return (address, local.dtype, local.shape, local.stride()) if address else id(value)


def check_tensors(model: Any, shapes: dict[Any, torch.Size | None], strict: bool) -> None:
    """Raise unless tensors of these names and shapes fit a model; all processes must call it.

    If `strict` is set, the model must have exactly these tensors.
    """
    own_shapes: dict[str, torch.Size] = {}
    aliases: dict[Any, set[str]] = {}
    for _, _, name, value, param in _entries(model):
        aliases.setdefault(_identity(value, param), set()).add(name)
        if isinstance(value, Tensor):
            own_shapes[name] = full_shape(value, param)
    # A tensor with several names in the model may have been saved under one of them.
    missing = sorted(name for names in aliases.values() if not names & set(shapes) for name in names)
    known = set().union(*aliases.values())
    unexpected = sorted(str(name) for name in shapes if name not in known)
    if strict and (missing or (unexpected and not _has_stages(model))):
        raise RuntimeError(
            f"the checkpoint does not fit the model: missing {missing[:5]}, unexpected "
            f"{unexpected[:5]}; strict=False loads what fits"
        )
    for name, shape in shapes.items():
        if name in own_shapes and shape != own_shapes[name]:
            saved = "no tensor" if shape is None else f"shape {tuple(shape)}"
            raise RuntimeError(
                f"the checkpoint does not fit the model: {name} has {saved} in it, and shape "
                f"{tuple(own_shapes[name])} in the model"
            )


@torch.no_grad()
def load_tensors(model: Any, parts: Iterable[dict[str, Tensor]]) -> None:
    """Load whole tensors, one dict after the other, after `check_tensors`; all processes must call it."""
    masters = masters_of(model)
    own: dict[str, list[tuple[nn.Module, str, Any, Any]]] = {}
    for chunk, key, name, value, param in _entries(model):
        own.setdefault(name, []).append((chunk, key, value, param))
    exact: dict[Any, Tensor] = {}
    for state in parts:
        local: dict[nn.Module, dict[str, Any]] = {}
        for name, whole_value in state.items():
            for chunk, key, like, param in own.get(name, ()):
                value = whole_value
                if isinstance(value, Tensor):
                    value = local_part(value, like, param)
                    exact[param] = value
                local.setdefault(chunk, {})[key] = value
        for chunk, filled in local.items():
            chunk.load_state_dict(filled, strict=False)
        if masters is not None:
            masters.write({param: value for param, value in exact.items() if param is not None})
            exact.clear()


def optimizer_parts(
    optimizer: OptimizerWrapper, size: int | None = None, *, copies: bool = False, everywhere: bool = False
) -> Parts:
    """Return an optimizer's state dict of whole tensors, with the loss scale, in parts and in PyTorch's format.

    All processes must call it; the arguments mean the same as in `model_parts`. A group has the names of its parameters
    (`param_names`) if all of them are known.
    """
    receivers, params = _Receivers(optimizer, everywhere), optimizer.parameters
    names = optimizer.names or [None] * len(params)
    if optimizer._is_zero:
        groups, read, sizes = divided_state(optimizer.optim, receivers.feeds)
    else:
        saved = optimizer.optim.state_dict()
        groups = saved["param_groups"]
        used = {key: state for key, state in saved["state"].items() if any(v is not None for v in state.values())}
        sizes = {key: _state_bytes(state, params[key]) for key, state in used.items()}

        def read(keys: list[int]) -> dict[int, dict[str, Any]]:
            return {key: saved["state"].get(key, {}) for key in keys}

    named = [{**group, "params": [(names[key], key) for key in group["params"]]} for group in groups]
    stages = _of_all_stages(optimizer, named)
    stage_sizes = _of_all_stages(optimizer, sizes)
    this_stage = dist.get_rank(pipeline_group()) if len(stages) > 1 else 0
    rest: dict[str, Any] = {"param_groups": [], "scaler": optimizer.scaler_state()}
    rest["algorithm"] = algorithm_of(optimizer)
    owners: list[tuple[int, int]] = []  # the stage of each parameter of the whole model, and its key there
    for stage_groups in zip(*stages, strict=True):
        members = [(stage, *member) for stage, group in enumerate(stage_groups) for member in group["params"]]
        options = {**stage_groups[0], "params": list(range(len(owners), len(owners) + len(members)))}
        if all(name is not None for _, name, _ in members):
            options["param_names"] = [name for _, name, _ in members]
        rest["param_groups"].append(options)
        owners += [(stage, key) for stage, _, key in members]

    def collect(keys: list[int]) -> dict[int, Any]:
        mine = {key: owners[key][1] for key in keys if owners[key][0] == this_stage}
        own, state = read(list(mine.values())), {}
        for key, own_key in mine.items():
            entries = {}
            for name, value in own.get(own_key, {}).items():
                if isinstance(value, Tensor):
                    param = params[own_key]
                    value = receivers.gather(value, param if value.shape == param.shape else None, copies)
                if value is not None:
                    entries[name] = value
            if entries and receivers.keeps:
                state[key] = entries
        return receivers.join(state)

    whole_sizes = {i: stage_sizes[stage][key] for i, (stage, key) in enumerate(owners) if key in stage_sizes[stage]}
    return Parts(whole_sizes, size, collect, rest)


def _state_bytes(state: dict[str, Any], param: Tensor) -> int:
    """Return the size in bytes of the whole tensors of a parameter's state; an estimate, to divide state into files."""
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    like = [param if tensor.shape == param.shape else None for tensor in tensors]
    return sum(full_shape(tensor, p).numel() * tensor.itemsize for tensor, p in zip(tensors, like, strict=True))


def whole_optimizer(optimizer: OptimizerWrapper, copies: bool = False) -> dict[str, Any]:
    """Return the state dict of `optimizer_parts` in all processes, in one part; all processes must call it."""
    parts = optimizer_parts(optimizer, copies=copies, everywhere=True)
    return {"state": next(parts.gather()), **parts.rest}


@torch.no_grad()
def load_optimizer_state(optimizer: OptimizerWrapper, saved: dict[str, Any]) -> None:
    """Load a state dict of `whole_optimizer` or of a PyTorch optimizer; all processes must call it.

    Parameters are matched by name if both sides have names, else by position. A state that does not fit raises an
    error in all processes and changes nothing.
    """
    with refusing_together():
        keys = check_optimizer(optimizer, saved)
    state: dict[Any, Any] = {}
    for index, (param, key) in enumerate(zip(optimizer.parameters, keys, strict=True)):
        values = saved["state"].get(key, {})
        if values:
            if not isinstance(optimizer.unwrap(), EncodingOptimizer):
                values = decoded_values(values)
            state[index] = {
                name: local_part(value, param, param) if isinstance(value, Tensor) and value.dim() else value
                for name, value in values.items()
            }
    groups, first = [], 0
    for group, options in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        loaded = {name: value for name, value in options.items() if name not in ("params", "param_names")}
        last = first + len(group["params"])
        names = {"param_names": group["param_names"]} if "param_names" in group else {}
        groups.append({**loaded, **names, "params": list(range(first, last))})
        first = last
    state_dict = {"state": state, "param_groups": groups}
    # Load the loss scale first: it can be restored, the state of the optimizer cannot.
    before = optimizer.scaler_state()
    try:
        with refusing_together():
            optimizer.load_scaler_state(saved.get("scaler") or {})
        if optimizer._is_zero:
            load_plain_state(optimizer.optim, state_dict)
        else:
            optimizer.load_state_dict(state_dict)
    except BaseException:
        optimizer.load_scaler_state(before)
        raise
