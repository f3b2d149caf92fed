"""Which program works on what: every element belongs to exactly one."""

import torch

from apex.ops._device import DeviceFacts
from apex.ops.multi_tensor import config
from apex.ops.multi_tensor.flat import is_dense
from apex.ops.multi_tensor.tables import Layout, PointerTable
from tests.support.drawn import given, st

CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 300), max_size=12), st.sampled_from([16, 64]))
def test_a_layout_covers_every_element_once(sizes: list[int], block: int) -> None:
    layout = Layout(sizes, block, CPU)
    covered = [0] * len(sizes)
    assert (layout.programs is None) == all(0 < size <= block for size in sizes)
    programs = [[tensor, 0] for tensor in range(layout.count)] if layout.programs is None else layout.programs.tolist()
    for tensor, within in programs:
        assert within * block < sizes[tensor]
        covered[tensor] += min(block, sizes[tensor] - within * block)
    assert covered == sizes
    bounds = layout.bounds.tolist()
    assert bounds[-1] == layout.count == len(programs)
    for tensor in range(len(sizes)):
        assert all(row[0] == tensor for row in programs[bounds[tensor] : bounds[tensor + 1]])


def test_tensors_of_up_to_two_blocks_have_one_program_each() -> None:
    device = DeviceFacts("any", "cuda", multiprocessors=132, warp_size=32, shared_memory=227 << 10)
    for lists in (1, 2, 5):
        usual = config.block(device, lists)
        for largest in (0, 1, usual - 1, usual, usual + 1, 2 * usual, 2 * usual + 1, 10 * usual):
            chosen = config.block(device, lists, largest)
            assert chosen == (2 * usual if usual < largest <= 2 * usual else usual)
            assert (Layout([largest, 1], chosen, CPU).programs is None) == (0 < largest <= 2 * usual)


def test_only_what_moved_is_uploaded() -> None:
    table = PointerTable([4, 8], CPU)
    table.update_fixed([[16, 32]])
    table.update_moving([64, 128])
    fixed, moving = table.fixed, table.moving
    assert fixed.tolist() == [[4, 16], [8, 32]]
    assert table.aligned
    table.update_fixed([[16, 32]])
    table.update_moving([64, 130])
    assert table.fixed is fixed
    assert table.moving is not moving
    assert moving.tolist() == [64, 128], "a table in flight was overwritten"
    assert table.moving.tolist() == [64, 130]
    assert not table.aligned


def test_dense_tensors() -> None:
    images = torch.empty(2, 3, 4, 5)
    assert is_dense(images)
    assert is_dense(images.to(memory_format=torch.channels_last))
    assert is_dense(images.transpose(1, 3))
    assert is_dense(torch.empty(5, 1)[:, :1])
    assert is_dense(torch.empty(0, 4))
    assert not is_dense(images[:, ::2])
    assert not is_dense(torch.empty(3, 1).expand(3, 4))
