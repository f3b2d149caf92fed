"""State dicts of DistributedFusedLAMB: what this process holds, in the original's layout of four flat tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._zero.state import PARAM, ArenaState

# The original's names, and those of the flat shards that they stand for.
NAMES = {"fp32_p": PARAM, "fp32_m": "exp_avg", "fp32_v": "exp_avg_sq"}


def layout_of(shards: Sequence[ArenaState]) -> list[int]:
    """What a flat shard depends on: processes, then buckets and sizes of the parameters of each dtype."""
    found = [shards[0].arena.groups.ranks]
    for each in shards:
        found.extend((len(each.arena.layout.bucket_sizes), *each.arena.layout.sizes))
    return found


def saved(step: Tensor, shards: Sequence[ArenaState], param_groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state dict, of copies, which later steps do not change."""
    found: dict[str, Any] = {"step": step.clone()}
    for name, own in NAMES.items():
        found[name] = torch.cat([each.read(own) for each in shards])
    found["param_groups"] = [
        {name: value for name, value in group.items() if name != "params"} for group in param_groups
    ]
    found["layout"] = layout_of(shards)
    return found


@torch.no_grad()
def load(
    state: dict[str, Any], step: Tensor, shards: Sequence[ArenaState], param_groups: Sequence[dict[str, Any]]
) -> None:
    """Loads what `saved` returned, on as many processes and with the same options; all or nothing.

    The original's has no groups and no layout.
    """
    missing = [name for name in ("step", *NAMES) if name not in state]
    if missing:
        raise KeyError(f"the state dict has no {', '.join(missing)}; it has {', '.join(map(str, state))}")
    layout = layout_of(shards)
    if state.get("layout", layout) != layout:
        raise ValueError(
            f"the state was saved with [processes that divide it, buckets, sizes of parameters] = {state['layout']}; "
            f"here they are {layout}. The number of processes and the dwu_* arguments must be the same: use "
            "torch.distributed.checkpoint to change them"
        )
    for name in NAMES:
        expected = sum(each.arena.layout.shard_size for each in shards)
        if state[name].shape != (expected,):
            raise ValueError(f"{name} has shape {tuple(state[name].shape)}; ({expected},) is expected")
    groups = state.get("param_groups")
    if groups is not None and len(groups) != len(param_groups):
        raise ValueError(f"the state has {len(groups)} parameter groups, the optimizer {len(param_groups)}")
    for name, own in NAMES.items():
        parts = state[name].split([each.arena.layout.shard_size for each in shards])
        for each, part in zip(shards, parts, strict=True):
            each.write(own, part)
    step.copy_(torch.as_tensor(state["step"], dtype=step.dtype, device=step.device).reshape(step.shape))
    for group, values in zip(param_groups, groups or (), strict=groups is not None):
        group.update(values)
