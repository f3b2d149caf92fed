"""AdamP's decision between its two passes: which tensors are projected, and along what."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .rows import RowLists, TritonRowLists, row_count
from .tables import upload


def thresholds(params: Sequence[Tensor], device: torch.device) -> Tensor:
    """Cosines, over delta, below which a parameter is projected: by row and as a whole. 0 where it never is."""
    sizes = [
        (param.numel() // row_count(param), param.numel()) if param.ndim > 1 and param.numel() else (0, 0)
        for param in params
    ]
    roots = [[size**-0.5 if size else 0.0 for size in column] for column in zip(*sizes, strict=True)]
    return upload(roots, torch.float32, device)


def project(
    rows: RowLists,
    found: Tensor,
    limits: Tensor,
    *,
    eps: float,
    delta: float,
    decay: float | Tensor,
    ratio: float,
) -> Tensor:
    """For each row, how much of the parameter is taken out of the step, and by how much it shrinks: float32 [rows, 2].

    `found` has for each row the sums of p * g, g * g, p * p and p * step; `limits` are the `thresholds`. Rows shrink by
    `decay`, those of projected parameters by `ratio` times that.
    """
    if isinstance(rows, TritonRowLists):
        return rows.project(found, limits, eps, delta, decay, ratio)

    def cosine(sums: Tensor) -> Tensor:
        return sums[:, 0].abs() / ((sums[:, 1].sqrt() + eps) * (sums[:, 2].sqrt() + eps))

    def parallel(sums: Tensor) -> Tensor:
        return sums[:, 3] / (sums[:, 2].sqrt() + eps).square()

    totals = rows.of_tensors(found)
    limits = limits * delta
    by_row = rows.of_tensors(cosine(found).unsqueeze(1), maximum=True)[:, 0] < limits[0]
    at_once = (cosine(totals) < limits[1]) & ~by_row
    share = torch.where(at_once, parallel(totals), 0.0)
    shrinks = torch.where(by_row | at_once, decay * ratio, decay).to(share.dtype)
    of_rows = torch.where(by_row[rows.owner], parallel(found), share[rows.owner])
    return torch.stack((of_rows, shrinks[rows.owner]), 1)
