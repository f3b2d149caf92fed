"""A quick numeric check of rotary position embeddings on one device, for `apex doctor`."""

from __future__ import annotations

import torch

from .._tolerance import excess
from . import reference
from .spec import RopeSpec


def self_check(device: torch.device) -> float:
    """Largest error, as a multiple of its tolerance, of every layout, there and back, in three dtypes."""
    from .op import rotate_now

    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(48, 1, 1, 40, generator=generator) * 100
    images = [torch.rand(1, positions, 1, 24, generator=generator) * 100 for positions in (6, 8)]
    by_image = tuple(table for angle in images for table in (angle.cos(), angle.sin()))
    edges = torch.tensor([0, 7, 30, 48], dtype=torch.int32)
    cases = (
        (RopeSpec("sbhd"), (48, 2, 6, 48), (angles,), None),
        (RopeSpec("bshd"), (2, 48, 6, 48), (angles.cos(), angles.sin()), None),
        (RopeSpec("thd"), (48, 6, 48), (angles,), edges),
        (RopeSpec("image", width=8), (2, 48, 6, 48), by_image, None),
    )
    worst = 0.0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for spec, shape, tables, cu_seqlens in cases:
            t = torch.randn(shape, generator=generator).to(dtype)
            for inverse in (False, True):
                asked = spec._replace(inverse=inverse)
                there = [table.to(device) for table in tables]
                where = None if cu_seqlens is None else cu_seqlens.to(device)
                actual = rotate_now(t.to(device), there, asked, where)
                exact = [table.double() for table in tables]
                worst = max(worst, excess(actual.cpu(), reference.rotate(t.double(), exact, asked, cu_seqlens), dtype))
    return worst
