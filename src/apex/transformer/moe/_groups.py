"""The process groups of a layer with experts."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, fields
from typing import Any

import torch.distributed as dist

from .. import parallel_state


@dataclass(frozen=True)
class ExpertGroups:
    """Process groups by Megatron's names; None is a group of one rank.

    `ep` splits experts over ranks, `expt_tp` each expert, `tp_ep` both. `tp` are tensor-parallel ranks, `tp_cp` all
    ranks with parts of the same sequences, `tp_dp_cp` all ranks of a pipeline stage.
    """

    tp: Any = None
    ep: Any = None
    expt_tp: Any = None
    tp_ep: Any = None
    tp_cp: Any = None
    tp_dp_cp: Any = None

    @classmethod
    def of(cls, pg_collection: Any = None) -> ExpertGroups:
        """Return the groups that an object has as attributes, by default the groups of `parallel_state`."""
        if isinstance(pg_collection, ExpertGroups):
            return pg_collection
        names = [field.name for field in fields(cls)]
        if pg_collection is not None:
            missing = [name for name in names if not hasattr(pg_collection, name)]
            if missing:
                raise TypeError(f"pg_collection must have the process groups {', '.join(names)}; it lacks {missing}")
            return cls(*(getattr(pg_collection, name) for name in names))
        if parallel_state.is_unitialized():
            return cls()
        return cls(
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_expert_model_parallel_group(),
            parallel_state.get_expert_tensor_parallel_group(),
            parallel_state.get_expert_tensor_and_model_parallel_group(),
            parallel_state.get_tensor_and_context_parallel_group(),
            parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertGroups:
        """Return this object: copies of a layer communicate in the same groups."""
        return self

    def __reduce__(self) -> Any:
        """Pickle the groups of `parallel_state` by name; a process that loads them takes its own."""
        if self != ExpertGroups.of():
            raise pickle.PicklingError(
                "a layer with experts has process groups of its own (pg_collection), which cannot be pickled: save its "
                "state_dict()"
            )
        return ExpertGroups.of, ()


def size_of(group: Any) -> int:
    """Return the number of ranks of a group."""
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: Any) -> int:
    """Return this process's rank in a group."""
    return 0 if group is None else dist.get_rank(group)
