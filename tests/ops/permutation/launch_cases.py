"""Launches of the kernel of the permutation search to compile for every GPU."""

from __future__ import annotations

import torch

from apex.ops.permutation import op


def record() -> None:
    """Plans and (under `record_launches`) collects a launch for many rows and for few."""
    for rows in (4608, 40):
        columns = torch.empty(64, rows, dtype=torch.float32, device="meta")
        op.launch(columns, torch.empty(120, 8, dtype=torch.int32, device="meta"))
