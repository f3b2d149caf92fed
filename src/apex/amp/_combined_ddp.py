"""`combine_ddp`: flat gradient buffers that are summed over all processes as they are, in parts."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .._distributed.collectives import start
from .._distributed.comparison import common_device, gathered


class CombinedReduction:
    """The mean over all processes of flat buffers, each sent in `parts` messages that are under way together."""

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self._checked: list[object] = []

    def is_needed(self) -> bool:
        """Whether there are other processes. A script that runs alone needs no process group."""
        if dist.is_available() and dist.is_initialized():
            return True
        if dist.is_available() and dist.is_torchelastic_launched():
            raise RuntimeError(
                "amp.initialize was called with combine_ddp=True, and torchrun has started several processes, but they "
                "are not connected: call torch.distributed.init_process_group before the first backward pass"
            )
        return False

    @torch.no_grad()
    def reduce(self, buffers: Sequence[Tensor], present: Sequence[list[bool]]) -> list[list[bool]]:
        """Averages the buffers in place; `present` says for which parameters this process has gradients.

        Returns for which parameters any process has.
        """
        self._check(buffers, present)
        if not buffers:
            return []
        flags = [flag for each in present for flag in each]
        anywhere = torch.ones(len(flags), dtype=torch.uint8, device=buffers[0].device)
        for position in (position for position, flag in enumerate(flags) if not flag):
            anywhere[position] = 0
        what = "the reduction of combined gradients"
        works = [
            start(what, dist.all_reduce, part)
            for buffer in buffers
            for part in buffer.split(max(1, -(-buffer.numel() // self.parts)))
            if part.numel()
        ]
        works.append(start(what, dist.all_reduce, anywhere, op=dist.ReduceOp.MAX))
        for work in works:
            work.wait()
        for buffer in buffers:
            buffer.mul_(1 / dist.get_world_size())
        # Who has all gradients need not ask the device what others have.
        known = iter(flags if all(flags) else anywhere.bool().tolist())
        return [[next(known) for _ in each] for each in present]

    def _check(self, buffers: Sequence[Tensor], present: Sequence[list[bool]]) -> None:
        """Raises, in all processes, where buffers are not alike."""
        layout = [(str(buffer.dtype), buffer.numel(), len(each)) for buffer, each in zip(buffers, present, strict=True)]
        if layout == self._checked:
            return
        facts = [zlib.crc32(repr(layout).encode())]
        mine = torch.tensor(facts, dtype=torch.int64, device=common_device(buffers, None))
        everywhere = gathered(mine, "parameters", None)
        different = [rank for rank, other in enumerate(everywhere) if other != everywhere[0]]
        if different:
            raise RuntimeError(
                f"combine_ddp=True needs the same parameters in all processes, but those of rank 0 and rank "
                f"{different[0]} differ; rank {dist.get_rank()} has {layout} (dtype, elements, parameters). For an "
                "optimizer whose parameters are not shared set optimizer.combine_ddp = False"
            )
        self._checked = list(layout)
