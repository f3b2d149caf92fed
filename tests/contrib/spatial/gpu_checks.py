"""Two processes that share one GPU: halos of its tensors by Gloo, through the host, and memory by CUDA's handles."""

from __future__ import annotations

import torch
import torch.distributed as dist

import peer_memory_cuda
from apex.contrib.bottleneck import HaloExchangerPeer, HaloExchangerSendRecv
from apex.contrib.peer_memory import PeerMemoryPool
from tests.contrib.spatial.problem import Case, block, images, rows_of, trained
from tests.parallel.processes import everywhere


def divided_block(rank: int) -> None:
    """The exchange is on a stream of its own, and every method waits for it where it must."""
    exchangers = (
        HaloExchangerSendRecv([0, 1], rank),
        HaloExchangerPeer([0, 1], rank, PeerMemoryPool(256, 1 << 20), False),
    )
    for step in range(12):
        case = Case(1 + step % 2, 6, step % 3 == 0, True, torch.float32, 1 + step % 3)
        x = images(case, 12)
        whole = trained(block(case), x)
        factor = torch.arange(whole[0].numel(), dtype=torch.float64).sin().float().view(whole[0].shape)
        module = block(case, (2, rank, None, exchangers[step % 2], case.method, False), "cuda")
        part = trained(module, rows_of(x, case, rank, 2).cuda(), rows_of(factor, case, rank, 2).cuda())
        for actual, expected in zip(part[:2], whole[:2], strict=True):
            torch.testing.assert_close(actual.cpu(), rows_of(expected, case, rank, 2), rtol=1e-2, atol=1e-2)
        for actual, expected in zip(part[2:], whole[2:], strict=True):
            total = torch.stack(everywhere(actual.cpu())).sum(0)
            torch.testing.assert_close(total, expected, rtol=1e-2, atol=1e-2)


def raw_memory(rank: int) -> None:
    raw = peer_memory_cuda.allocate_raw(1024)
    addresses = torch.stack(everywhere(peer_memory_cuda.get_raw_ipc_address(raw)))
    peers = peer_memory_cuda.get_raw_peers(addresses, rank, raw)
    mine, other = (peer_memory_cuda.blob_view_float(handle, (4, 4), False) for handle in (raw, peers[1 - rank]))
    assert mine.is_cuda
    other.fill_(rank + 5)
    torch.cuda.synchronize()
    dist.barrier()
    assert bool((mine == 6 - rank).all())
    dist.barrier()


CHECKS = {check.__name__: check for check in (divided_block, raw_memory)}
