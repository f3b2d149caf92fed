"""Images divided by rows among processes, against the undivided ones: for two and for four processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import nccl_p2p_cuda
import peer_memory_cuda
from apex.contrib.bottleneck import HaloExchangerNoComm, HaloExchangerSendRecv
from apex.contrib.bottleneck.halo_exchangers import HaloPadder
from apex.contrib.peer_memory import PeerHaloExchanger1d, PeerMemoryPool
from tests.contrib.spatial.problem import block, cases, exchangers, images, rows_of, trained
from tests.parallel.processes import everywhere


def equal_to_the_undivided_block(rank: int) -> None:
    size = dist.get_world_size()
    ways = list(exchangers(rank, size).values())
    for number, case in enumerate(cases() if size == 2 else [case for case in cases() if case.stride == 2]):
        rows = 6 * size  # a multiple of every stride, on every rank
        x = images(case, rows)
        whole = trained(block(case), x)
        factor = torch.arange(whole[0].numel(), dtype=torch.float64).sin().to(case.dtype).view(whole[0].shape)
        spatial = (size, rank, None, ways[number % len(ways)], case.method, False)
        part = trained(block(case, spatial), rows_of(x, case, rank, size), rows_of(factor, case, rank, size))
        tolerance = {"rtol": 0.0, "atol": 40 * torch.finfo(case.dtype).eps}
        for actual, expected in zip(part[:2], whole[:2], strict=True):
            torch.testing.assert_close(actual, rows_of(expected, case, rank, size), **tolerance, msg=str)
        for actual, expected in zip(part[2:], whole[2:], strict=True):  # the caller sums over ranks
            total = torch.stack(everywhere(actual)).sum(0, dtype=torch.float64)
            scale = float(expected.abs().max())
            assert float((total - expected).abs().max()) <= tolerance["atol"] * scale, case


def ranks_with_few_and_different_rows(rank: int) -> None:
    """A single row, and a last rank whose rows are no multiple of the stride."""
    size = dist.get_world_size()
    exchanger = HaloExchangerSendRecv(list(range(size)), rank)
    for case in [each for each in cases() if each.dtype == torch.float64 and not each.explicit_nhwc]:
        heights = [case.stride] * (size - 1) + [case.stride + 1]
        x = images(case, sum(heights))
        whole = trained(block(case), x)
        spatial = (size, rank, None, exchanger, case.method, False)
        part = block(case, spatial)(x.split(heights, 2)[rank])
        expected = whole[0].split([1] * (size - 1) + [whole[0].shape[2] - size + 1], 2)[rank]
        torch.testing.assert_close(part, expected, rtol=0.0, atol=1e-14)
    if rank < size - 1 and case.stride > 1:
        with pytest.raises(ValueError, match="multiple of the stride"):
            block(case, spatial)(x[:, :, : case.stride + 1])


def derivative_over_ranks(rank: int) -> None:
    """Central differences of the loss of all ranks, for single numbers of x and of the 3x3 weight, in float64."""
    size = dist.get_world_size()
    case = next(iter(cases()))._replace(stride=2, out_channels=6)
    module = block(case, (size, rank, None, HaloExchangerSendRecv(list(range(size)), rank), 1, False))
    x = rows_of(images(case, 4 * size), case, rank, size)
    _, dx, _, dweight, *_ = trained(module, x)

    def loss(x: Tensor) -> Tensor:
        y = module(x).detach()
        mine = (y * torch.arange(y.numel(), dtype=torch.float64).sin().view(y.shape)).sum()
        return torch.stack(everywhere(mine.reshape(1))).sum()

    step = 1e-6
    for source, row in ((0, -2), (size - 1, 0)):  # next to another rank
        up, down = (x + (sign * step if rank == source else 0) * _one_at(x, (1, 2, row, 2)) for sign in (1, -1))
        expected = (loss(up) - loss(down)) / (2 * step)
        if rank == source:
            torch.testing.assert_close(dx[1, 2, row, 2], expected, rtol=1e-6, atol=1e-8)
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            module.conv2.weight += sign * step * _one_at(module.conv2.weight, (1, 0, 0, 1))
            losses.append(loss(x))
            module.conv2.weight -= sign * step * _one_at(module.conv2.weight, (1, 0, 0, 1))
    total = torch.stack(everywhere(dweight[1, 0, 0, 1].reshape(1))).sum()
    torch.testing.assert_close(total, (losses[0] - losses[1]) / (2 * step), rtol=1e-6, atol=1e-8)


def _one_at(like: Tensor, place: tuple[int, ...]) -> Tensor:
    one = torch.zeros_like(like)
    one[place] = 1.0
    return one


def exchangers_agree(rank: int) -> None:
    """With results returned and filled in, in every dtype, for halos that are no contiguous memory."""
    size = dist.get_world_size()
    ways = exchangers(rank, size).values()
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int32):
        rows = torch.arange(size * 24).view(size, 2, 4, 3).to(dtype)
        left, right = rows[rank, :, :2], rows[rank, :, 2:]
        above = rows[rank - 1, :, 2:] if rank else torch.zeros_like(left)
        below = rows[rank + 1, :, :2] if rank < size - 1 else torch.zeros_like(left)
        for way in ways:
            for found, expected in zip(way.left_right_halo_exchange(left, right), (above, below), strict=True):
                assert torch.equal(found, expected)
            frame = torch.full((2, 9, 3), 7).to(dtype)
            assert way.left_right_halo_exchange(left, right, frame[:, 1:3], frame[:, 4:6]) is None
            assert torch.equal(frame[:, 1:3], above)
            assert torch.equal(frame[:, 4:6], below)
            assert bool((frame[:, [0, 3, 6, 7, 8]] == 7).all())
    places = way.wrap_around_left_rank_in_group, way.wrap_around_right_rank_in_group
    assert places == ((rank - 1) % size, (rank + 1) % size)
    assert (way.left_rank, way.right_rank) == (rank - 1, rank + 1 if rank < size - 1 else -1)
    assert (way.left_zero, way.right_zero) == (rank == 0, rank == size - 1)
    with pytest.raises(ValueError, match=f"is not this rank, {rank}"):
        HaloExchangerSendRecv(list(range(size)), (rank + 1) % size)
    with pytest.raises(ValueError, match="both be given"):
        way.left_right_halo_exchange(left, right, left)
    swapped = HaloExchangerNoComm(list(range(size)), rank).left_right_halo_exchange(left, right)
    assert swapped is not None
    assert torch.equal(swapped[0], right)
    assert torch.equal(swapped[1], left)
    way = HaloExchangerSendRecv(list(range(size)), rank)
    with pytest.raises(ValueError, match="same dtype and shape"):
        way.left_right_halo_exchange(*[torch.zeros(rank + 1)] * 2)


def padder(rank: int) -> None:
    size = dist.get_world_size()
    for way in exchangers(rank, size).values():
        for split_dim, explicit_nhwc, h_split in (
            (2, False, True),
            (3, False, False),
            (1, True, True),
            (2, True, False),
        ):
            whole = torch.randn(2, 8, 8, 8, generator=torch.Generator().manual_seed(0))
            padding = [0, 0] * (3 - split_dim) + [2, 2]
            edges = torch.nn.functional.pad(whole, padding)
            width = 8 // size
            pad = HaloPadder(way)
            padded = pad(whole.narrow(split_dim, rank * width, width), 2, explicit_nhwc, h_split)
            pad.wait()
            assert torch.equal(padded, edges.narrow(split_dim, rank * width, width + 4))


def peer_margins_for_many_steps(rank: int) -> None:
    """In place, against all ranks' tensors; three layouts, divided by rows and by columns."""
    size = dist.get_world_size()
    pool = PeerMemoryPool(256, 1 << 16, list(range(size)))
    exchanger = PeerHaloExchanger1d(list(range(size)), rank, pool, 2)
    layouts = ((False, torch.contiguous_format), (False, torch.channels_last), (True, torch.contiguous_format))
    for step in range(100 if size == 2 else 12):
        nhwc, layout = layouts[step % 3]
        h_split = step % 2 == 0
        generator = torch.Generator().manual_seed(100 * step + rank)
        y = torch.randn(2, 6, 8, 7, generator=generator).to(memory_format=layout)
        dim = (1 if h_split else 2) if nhwc else (2 if h_split else 3)
        ranks, length = everywhere(y), y.shape[dim]
        expected = y.clone()
        low = ranks[rank - 1].narrow(dim, length - 4, 2) if rank else 0.0
        high = ranks[rank + 1].narrow(dim, 2, 2) if rank < size - 1 else 0.0
        expected.narrow(dim, 0, 2).copy_(torch.as_tensor(low))
        expected.narrow(dim, length - 2, 2).copy_(torch.as_tensor(high))
        exchanger(y, h_split, nhwc)
        assert torch.equal(y, expected), step
    assert pool.dynamic_offset == 0


def pool_gives_each_peer_a_view(rank: int) -> None:
    size = dist.get_world_size()
    pool = PeerMemoryPool(1000, 2000, list(range(size)))
    assert (pool.static_size, pool.dynamic_size) == (1024, 2048)
    for dtype in (torch.float16, torch.float32, torch.int32, torch.bfloat16, torch.float64):
        for channels_last in (False, True):
            views = pool.allocate_peer_tensors((1, 2, 3, 4), dtype, channels_last, True)
            assert views[0].is_contiguous(memory_format=torch.channels_last) == channels_last
            views[(rank + 1) % size].fill_(rank + 1)  # in the memory of another process
            pool.memory.meet([other for other in range(size) if other != rank])
            assert bool((views[rank] == (rank - 1) % size + 1).all())
            pool.memory.meet([other for other in range(size) if other != rank])
        pool.reset()
    pool.allocate_peer_tensors((256,), torch.float32, False, False)
    with pytest.raises(RuntimeError, match="static bytes 0 are left"):
        pool.allocate_peer_tensors((1,), torch.float32, False, False)
    with pytest.raises(RuntimeError, match=r"call reset\(\)"):
        pool.allocate_peer_tensors((513,), torch.float32, False, True)


def compiled_push_and_pull(rank: int) -> None:
    """A batch of two, which the original refuses, and both edges at zero in a group of one."""
    size = dist.get_world_size()
    pool = PeerMemoryPool(1 << 12, 0)
    low, high = (pool.allocate_peer_tensors((2, 3, 1, 4), torch.float32, True, False) for _ in range(2))
    left, right = (torch.full((2, 3, 1, 4), 10.0 * rank + side) for side in (1, 2))
    found = torch.full((2, 2, 3, 1, 4), 7.0)
    above, below = (rank - 1) % size, (rank + 1) % size
    edges = rank == 0, rank == size - 1
    sides = [(left, low[rank], high[above], found[0]), (right, high[rank], low[below], found[1])]
    for _ in range(3):
        peer_memory_cuda.push_pull_halos_1d(False, False, 0, rank, edges[0], *sides[0], edges[1], *sides[1])
        assert bool((found[0] == (0 if edges[0] else 10 * (rank - 1) + 2)).all())
        assert bool((found[1] == (0 if edges[1] else 10 * (rank + 1) + 1)).all())
    peer_memory_cuda.push_pull_halos_1d(False, False, 0, rank, True, *sides[0], True, *sides[1])
    assert not found.any()
    with pytest.raises(ValueError, match="not of PeerMemoryPool"):
        peer_memory_cuda.push_pull_halos_1d(False, False, 0, rank, True, *[left] * 4, True, *[left] * 4)


def compiled_raw_memory(rank: int) -> None:
    size = dist.get_world_size()
    raw = peer_memory_cuda.allocate_raw(1024)
    addresses = torch.stack(everywhere(peer_memory_cuda.get_raw_ipc_address(raw)))
    peers = peer_memory_cuda.get_raw_peers(addresses, rank, raw)
    assert peers[rank] == raw
    views = (peer_memory_cuda.blob_view_half, peer_memory_cuda.blob_view_float, peer_memory_cuda.blob_view_int)
    for view, dtype in zip(views, (torch.float16, torch.float32, torch.int32), strict=True):
        mine, other = (view(handle, (1, 2, 3, 4), True) for handle in (raw, peers[(rank + 1) % size]))
        assert mine.dtype == dtype
        other.fill_(rank + 5)
        dist.barrier()
        assert bool((mine == (rank - 1) % size + 5).all())
        dist.barrier()
    peer_memory_cuda.zero(raw, 1024)
    assert not mine.any()
    peer_memory_cuda.free_raw(raw)
    with pytest.raises(ValueError, match="was freed"):
        peer_memory_cuda.zero(raw, 1)


def compiled_messages(rank: int) -> None:
    size = dist.get_world_size()
    identifier = nccl_p2p_cuda.get_unique_nccl_id(2)
    assert (identifier.dtype, tuple(identifier.shape)) == (torch.uint8, (2, 128))
    handle = nccl_p2p_cuda.init_nccl_comm(identifier[0], rank, size)
    ranks = rank - 1, rank + 1 if rank < size - 1 else -1
    left, right = torch.full((2,), 10.0 * rank + 1), torch.full((2,), 10.0 * rank + 2)
    found = nccl_p2p_cuda.left_right_halo_exchange(handle, *ranks, left, right)
    expected = [0.0 if rank == 0 else 10.0 * (rank - 1) + 2, 0.0 if rank == size - 1 else 10.0 * (rank + 1) + 1]
    assert [each.tolist() for each in found] == [[each] * 2 for each in expected]
    places = [torch.empty(2), torch.empty(2)]
    nccl_p2p_cuda.left_right_halo_exchange_inplace(handle, *ranks, left, right, *places)
    assert [each.tolist() for each in places] == [[each] * 2 for each in expected]
    nccl_p2p_cuda.add_delay(1000)
    with pytest.raises(ValueError, match=f"this is rank {rank} of {size}"):
        nccl_p2p_cuda.init_nccl_comm(identifier[0], rank + 1, size)


CHECKS = {
    check.__name__: check
    for check in (
        equal_to_the_undivided_block,
        ranks_with_few_and_different_rows,
        derivative_over_ranks,
        exchangers_agree,
        padder,
        peer_margins_for_many_steps,
        pool_gives_each_peer_a_view,
        compiled_push_and_pull,
        compiled_raw_memory,
        compiled_messages,
    )
}
