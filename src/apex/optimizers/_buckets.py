"""Buckets: the parameters of a group, sorted so that one pass updates each bucket, and kept from step to step.

Between two steps gradients may be freed and allocated again, parameters may get other memory (`model.to`,
`p.data = ...`), and state may be loaded or moved to another device. So every step compares every address, through `map`
over built-in methods, which takes a few tenths of a microsecond per parameter. Tables are uploaded and buckets made
again only if something moved.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._distributed.shards import (
    all_shard_groups,
    is_sharded,
    like_parameter,
    local,
    place_of,
    reduce_over,
    shard_groups,
)
from ..ops.multi_tensor import Lists, scale
from ..ops.multi_tensor.codecs import STOCHASTIC, Encoded, Encodings, NoisePlace
from ..ops.multi_tensor.dispatch import DTYPES, kernel_fits, looks_like
from ..ops.multi_tensor.flat import laid_out_alike, overlapping, with_strides_of
from ..ops.multi_tensor.rows import RowLists, row_count
from ..ops.multi_tensor.rule import SLOTS
from ..ops.multi_tensor.tables import lie_at, upload
from ..ops.multi_tensor.torch_lists import TorchLists
from ..ops.multi_tensor.triton_lists import TritonLists

MASTER = "master_param"

# A parameter group of an optimizer: its parameters and hyperparameters, by name.
Group = dict[str, Any]

# The codec of a slot, and the name of the state that holds its companions, by slot.
SlotCodecs = dict[int, tuple[str, str | None]]

_grad_of = operator.attrgetter("grad")
_shape = operator.attrgetter("shape")
_dtype = operator.attrgetter("dtype")
# Shard and placements of a DTensor; `map` over them is quicker than calls of `local`.
_shard_of = operator.attrgetter("_local_tensor")
_spec_of = operator.attrgetter("_spec")
_data_ptr = Tensor.data_ptr


class UpdateBucket:
    """Parameters that one pass updates: one device, one dtype, one implementation.

    Slot 0 of `lists` is the parameter, or its float32 master if it has one; then `lists.copy` is the parameter.
    If the parameters are themselves masters (of apex.amp), `models` are the model's parameters that receive the copy.
    With `of_models` the gradients of `models` are used.
    """

    def __init__(
        self,
        params: list[Tensor],
        states: list[dict[str, Any]],
        names: Sequence[str],
        make: Callable[..., Lists],
        kind: Any,
        models: list[Tensor] | None,
        of_models: bool,
        codecs: SlotCodecs,
    ) -> None:
        self.params = params
        self._codecs = codecs
        self.needs_seed = any(codec in STOCHASTIC for codec, _ in codecs.values())
        self._models = models
        # Tensors whose addresses must still equal the addresses that the lists were made with.
        self._located = params if models is None else params + models
        self._sources = models if models and of_models else params
        self.kind = kind
        # Values that an optimizer stores here until the bucket is made again.
        self.cache: dict[str, Any] = {}
        self.states = states
        self.names = names
        self.has_masters = bool(states) and MASTER in states[0]
        self._distributed = any(local(param) is not param for param in params)
        # Every process group that a parameter is cut over; equal for all parameters if the update measures them.
        self.shard_groups = all_shard_groups(params) if self._distributed else []
        self._state_lists = [[state[name] for state in states] for name in self._keys]
        self._contiguous = all(map(Tensor.is_contiguous, (*params, *(models or ()))))
        self._strides = list(map(Tensor.stride, self._sources))
        self._shapes = list(map(_shape, self._sources))
        self._current_gradients = self._gradients()
        self._gradient_dtypes = set(map(_dtype, self._current_gradients))
        # `_looks_right` checks that gradients have the first gradients' dtypes, sizes and strides.
        unconverted = all(map(operator.is_, self._current_gradients, map(_grad_of, self._sources)))
        # How the gradients are distributed, if all tensors are, and no gradient needs to be converted.
        self._specs: list[Any] = []
        if self._distributed and unconverted and all(map(is_sharded, (*self._located, *self._current_gradients))):
            self._specs = list(map(_spec_of, self._current_gradients))
        checkable = unconverted and bool(self._specs) == self._distributed
        first = list(map(local, self._current_gradients))
        self._looks_right: Callable[..., bool] = looks_like(first) if checkable else lambda *_: False
        self.lists = make(*self._slots(self._current_gradients))
        self.device = self.lists.device
        self._addresses = list(map(_data_ptr, self._local_tensors()))
        self._state_checks: list[tuple[Callable[[dict[str, Any]], Any], list[Tensor]]] = []
        for key in self._keys:
            self.watch(key)

    @property
    def _keys(self) -> tuple[str, ...]:
        companions = (key for _, key in self._codecs.values() if key is not None)
        return (*self.names, *companions, MASTER) if self.has_masters else (*self.names, *companions)

    def gradients(self) -> list[Tensor]:
        """Return the gradients in their own layout; this process's shard if they are distributed."""
        return [local(source.grad) for source in self._sources if source.grad is not None]

    def unscale(self, scaling: Any) -> None:
        """Remove the loss scale from the gradients after a step, which unscaled them only in its own arithmetic."""
        gradients = self.gradients()
        noop, _, factor = scaling.on(gradients[0].device)
        # PyTorch's operator for this takes no bfloat16 on a GPU.
        scale(gradients, gradients, factor, noop=noop)

    def _gradients(self) -> list[Tensor]:
        """Return the gradients, laid out and distributed like their parameters."""
        gradients = map(_grad_of, self._sources)
        if self._distributed:
            gradients = map(like_parameter, self._sources, gradients)
        return list(map(with_strides_of, self._sources, gradients))

    def _slots(self, gradients: list[Tensor]) -> tuple[Any, ...]:
        """Return the lists for each slot of a rule and the list for copies; and encodings, if slots have codecs."""
        lists = [self.params, gradients, *self._state_lists]
        params, grads, *state = (
            ([local(tensor) for tensor in tensors] for tensors in lists) if self._distributed else lists
        )
        copy = self._models
        if self.has_masters:
            params, copy = state[-1], params
        count = len(self.names)
        slots = [params, grads, *state[:count], *(None for _ in range(SLOTS - 2 - count))]
        if not self._codecs:
            return slots, copy
        companions: dict[str | None, Any] = {None: None, **dict(zip(self._keys[count:], state[count:], strict=True))}
        return slots, copy, {slot: Encoded(codec, companions[key]) for slot, (codec, key) in self._codecs.items()}

    def current_slots(self) -> tuple[list[list[Tensor] | None], list[Tensor] | None, Encodings]:
        """Return the lists for each slot of a rule, with this step's gradients, the list for copies, and encodings."""
        slots, copy, *encodings = self._slots(self._current_gradients)
        return slots, copy, encodings[0] if encodings else {}

    def _local_tensors(self) -> list[Tensor]:
        return list(map(_shard_of if self._specs else local, self._located)) if self._distributed else self._located

    def _own_parts(self, gradients: list[Tensor]) -> list[Tensor]:
        """Return this process's shards if all gradients are distributed as at first, else the gradients unchanged."""
        if self._specs and all(map(operator.is_, map(_spec_of, gradients), self._specs)):
            return list(map(_shard_of, gradients))
        return gradients

    def watch(self, name: str) -> None:
        """Make `refresh` return False if a parameter's state of this name is replaced by another tensor."""
        self._state_checks.append((operator.itemgetter(name), [state[name] for state in self.states]))

    def refresh(self) -> bool:
        """Update the addresses in the lists; return False if the bucket must be made again."""
        if not self._has_state():
            return False
        lists, gradients = self.lists, list(map(_grad_of, self._sources))
        try:
            gradients = self._own_parts(gradients)
            alike = self._looks_right(*gradients)
            if not (alike or self._fit(gradients)) or not lie_at(self._local_tensors(), self._addresses):
                return False
        except (AttributeError, TypeError, RuntimeError):  # a gradient is None or sparse, or a tensor has no memory
            return False
        if not lists.usable():
            return False
        in_place = alike or (not self._distributed and self._laid_out_alike(gradients))
        self._current_gradients = gradients if in_place else self._gradients()
        if not (in_place and isinstance(lists, TritonLists)):
            lists.point_to(*self._slots(self._current_gradients))
        elif not lists.table.has_gradients(gradients):
            lists.table.update_moving(list(map(_data_ptr, gradients)))
        return True

    def _has_state(self) -> bool:
        try:
            return all(all(map(operator.is_, map(get, self.states), tensors)) for get, tensors in self._state_checks)
        except KeyError:
            return False

    def _fit(self, gradients: list[Tensor]) -> bool:
        """Return whether gradients are dense and have the lists' shapes and dtypes; an address may have been reused."""
        return (
            all(gradient is not None and gradient.layout == torch.strided for gradient in gradients)
            and list(map(_shape, gradients)) == self._shapes
            and set(map(_dtype, gradients)) == self._gradient_dtypes
        )

    def _laid_out_alike(self, gradients: list[Tensor]) -> bool:
        """Return whether gradients are laid out like their parameters."""
        is_plain = self._contiguous and all(map(Tensor.is_contiguous, gradients))
        return is_plain or list(map(Tensor.stride, gradients)) == self._strides

    def over_shards(self, values: Tensor, *, maximum: bool = False) -> Tensor:
        """Return measurements of this process's shards, added up (or maximised) over all shards of the parameters."""
        return reduce_over(values, self.shard_groups, maximum=maximum) if self.shard_groups else values

    def release(self) -> None:
        """Drop the references to the gradients, so that their owner can free them."""
        self._current_gradients = []
        if isinstance(self.lists, TorchLists):
            self.lists.slots = ()


class GroupBuckets:
    """All buckets of a parameter group."""

    def __init__(self, optimizer: Any, group: dict[str, Any], names: tuple[str, ...]) -> None:
        params, models, of_models = group["params"], optimizer._model_params, optimizer._takes_model_grads
        self._all = list(params)
        sources = [models.get(param, param) for param in params] if of_models else self._all
        present = [(index, source.grad.dtype) for index, source in enumerate(sources) if source.grad is not None]
        self._absent = [source for source in sources if source.grad is None]
        for index, source in enumerate(sources):
            check_parameter(source, index)
        self.names = names
        kinds: dict[Any, tuple[list[Tensor], list[dict[str, Any]], list[tuple[int, int]]]] = {}
        # Numbers of whole tensors, and of their rows, before each parameter; they do not depend on the sharding.
        counts: dict[Any, tuple[int, int]] = {}
        # Parameters that share memory must not be updated concurrently.
        shared = overlapping([local(params[index]) for index, _ in present])
        for position, (index, gradient_dtype) in enumerate(present):
            param = params[index]
            state, kind = optimizer._prepare(param, group, names)
            check_state(param, index, state, (*names, MASTER) if MASTER in state else names)
            copies = (models[param],) if param in models else ()
            tensors = [local(tensor) for tensor in (param, *(state[name] for name in names), *copies)]
            codecs: SlotCodecs = optimizer._slot_codecs(param, group)
            encoded = {0 if slot == 0 else slot - 1 for slot in codecs}  # indices in `tensors`, which lack the gradient
            plain = [tensor for number, tensor in enumerate(tensors) if number not in encoded] or [param.grad]
            key = (
                tuple(codecs.items()),
                kind,
                optimizer._bucket_type(param),
                tuple(map(id, shard_groups(param))) if optimizer._measures else (),
                position if position in shared else None,
                MASTER in state,
                gradient_dtype,
                kernel_fits(plain) and laid_out_alike(tensors),
                tensors[0].device,
                *(tensor.dtype for tensor in tensors),
            )
            members = kinds.setdefault(key, ([], [], []))
            members[0].append(param)
            members[1].append(state)
            family = (tuple(codecs.items()), MASTER in state, gradient_dtype, tensors[0].device, tensors[0].dtype)
            number, row = counts.setdefault(family, (0, 0))
            members[2].append((number, row))
            counts[family] = number + 1, row + row_count(param)
        self.buckets = []
        for (codecs, kind, make_bucket, *_), (params, states, numbers) in kinds.items():
            copied = [models[param] for param in params] if params[0] in models else None
            make = optimizer._make_lists
            bucket = make_bucket(params, states, names, make, kind, copied, of_models, dict(codecs))
            if bucket.shard_groups and (optimizer.stochastic_rounding or bucket.needs_seed):
                places = noise_places(params, numbers, by_row=isinstance(bucket.lists, RowLists))
                bucket.lists.noise_places = upload(places, torch.int64, bucket.device)
            self.buckets.append(bucket)

    def refresh(self, params: Sequence[Tensor]) -> bool:
        """Update the addresses in every bucket; return False if the buckets must be made again."""
        if len(params) != len(self._all) or not all(map(operator.is_, params, self._all)):
            return False
        if self._absent and any(param.grad is not None for param in self._absent):
            return False
        return all(bucket.refresh() for bucket in self.buckets)


def noise_places(
    params: Sequence[Tensor], numbers: Sequence[tuple[int, int]], *, by_row: bool
) -> list[tuple[int, int, int, int]]:
    """Return a `NoisePlace` for every shard, or for every row of every shard.

    `numbers` has the number of each parameter and of its first row.
    """
    places: list[tuple[int, int, int, int]] = []
    for param, (number, row) in zip(params, numbers, strict=True):
        start, run, stride, first = place_of(param)
        if not by_row:
            places.append(NoisePlace(number, start, run, stride))
            continue
        in_row = start - first[0] * math.prod(param.shape[1:]) if param.dim() > 1 else start
        top = first[0] if param.dim() > 1 else 0
        places += [NoisePlace(row + top + index, in_row, run, stride) for index in range(row_count(local(param)))]
    return places


def agreed(found_inf: Tensor | None, buckets: Sequence[UpdateBucket]) -> Tensor | None:
    """Return an overflow flag that is set if it is set in any process that holds shards of the buckets' parameters.

    torch.amp.GradScaler asks only the processes that share the first gradient.
    """
    groups = {id(group): group for bucket in buckets for group in bucket.shard_groups}
    if found_inf is None or not groups:
        return found_inf
    return reduce_over(found_inf.clone(), groups.values(), maximum=True)


def check_parameter(param: Tensor, index: int) -> None:
    """Raise an error if no fused optimizer can update a parameter or its gradient."""
    if param.dtype not in DTYPES:
        raise TypeError(f"parameter {index} is {param.dtype}; float16, bfloat16, float32 and float64 are accepted")
    gradient = param.grad
    if gradient is None:
        return
    if gradient.layout != torch.strided:
        raise RuntimeError(
            f"the gradient of parameter {index} (shape {tuple(param.shape)}) is sparse, which fused optimizers do not "
            "support; use torch.optim.SparseAdam for it, or sparse=False in the embedding"
        )
    if gradient.shape != param.shape:
        raise RuntimeError(
            f"the gradient of parameter {index} has shape {tuple(gradient.shape)}, the parameter {tuple(param.shape)}; "
            "clear gradients after param.data has been replaced by another shape"
        )


def check_state(param: Tensor, index: int, state: dict[str, Any], names: Sequence[str]) -> None:
    """Raise an error if state does not have the parameter's shape."""
    for name in names:
        if state[name].shape != param.shape:
            raise RuntimeError(
                f"state {name!r} of parameter {index} has shape {tuple(state[name].shape)}, the parameter "
                f"{tuple(param.shape)}: it was loaded, or made before param.data was replaced, for another model; "
                "delete optimizer.state[param], or load the right one"
            )
