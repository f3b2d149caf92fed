"""GPT in two processes that share one GPU: pipelines and split layers compared with one process."""

from __future__ import annotations

import functools

from .gpt import Layout
from .grid_checks import check

CHECKS = {
    str(layout): functools.partial(check, layout)
    for layout in (
        Layout(1, 2, "1f1b"),
        Layout(1, 2, "zb_h1"),
        Layout(1, 2, "zb_v", 2),
        Layout(1, 2, "interleaved", 2),
        Layout(2, sequence=True),
    )
}
