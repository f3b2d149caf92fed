"""Checks of parallel_state that run in eight processes."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from apex.transformer import parallel_state as ps
from apex.transformer.tensor_parallel import ColumnParallelLinear
from tests.transformer.block_checks import replicated_block_equals_one_process


def every_size(rank: int) -> None:
    """Check ranks, sizes and first ranks for tensor x pipeline sizes, and a sum over each group."""
    for tensor in (1, 2, 8):
        for stages in (1, 2, 4):
            if tensor * stages > 8:
                continue
            ps.initialize_model_parallel(tensor, stages)
            data, slab = 8 // (tensor * stages), 8 // stages
            assert ps.model_parallel_is_initialized()
            assert not ps.is_unitialized()
            assert ps.get_tensor_model_parallel_world_size() == tensor
            assert ps.get_pipeline_model_parallel_world_size() == stages
            assert ps.get_data_parallel_world_size() == data
            assert ps.get_tensor_model_parallel_rank() == rank % tensor
            assert ps.get_pipeline_model_parallel_rank() == rank // slab
            assert ps.get_data_parallel_rank() == rank % slab // tensor
            assert ps.get_tensor_model_parallel_src_rank() == rank // tensor * tensor
            assert ps.get_data_parallel_src_rank() == rank // slab * slab + rank % tensor
            assert ps.get_rank_info() == (rank % slab // tensor, rank % tensor, rank // slab, None)
            assert ps.get_pipeline_model_parallel_first_rank() == rank % slab
            assert ps.get_pipeline_model_parallel_last_rank() == rank % slab + (stages - 1) * slab
            assert ps.get_pipeline_model_parallel_next_rank() == (rank + slab) % 8
            assert ps.get_pipeline_model_parallel_prev_rank() == (rank - slab) % 8
            assert ps.is_pipeline_first_stage() == (rank < slab)
            assert ps.is_pipeline_last_stage() == (rank >= 8 - slab)
            assert ps.is_rank_in_embedding_group() == (rank < slab or rank >= 8 - slab)
            assert total(rank, ps.get_tensor_model_parallel_group()) == sum(
                range(rank // tensor * tensor, rank // tensor * tensor + tensor)
            )
            assert total(1, ps.get_model_parallel_group()) == tensor * stages
            assert total(rank // slab, ps.get_data_parallel_group()) == rank // slab * data
            ps.destroy_model_parallel()
            assert ps.is_unitialized()


def total(number: int, group: object) -> int:
    tensor = torch.tensor(number)
    dist.all_reduce(tensor, group=group)
    return int(tensor)


def nothing_before_and_after(rank: int) -> None:
    for _ in range(2):
        assert ps.is_unitialized()
        assert not ps.model_parallel_is_initialized()
        assert ps.get_rank_info() == (0, 0, 0, 0)
        assert ps.get_pipeline_model_parallel_split_rank() is None
        assert ps.get_virtual_pipeline_model_parallel_rank() is None
        assert not ps.is_rank_in_embedding_group()
        assert not ps.is_rank_in_position_embedding_group()
        for get in (ps.get_tensor_model_parallel_group, ps.get_data_parallel_rank, ps.get_amax_reduction_group):
            with pytest.raises(AssertionError, match=r"is not initialized: call .*initialize_model_parallel before"):
                get()
        with pytest.raises(AssertionError, match=r"call .*initialize_model_parallel before"):
            ColumnParallelLinear(4, 4)
        ps.initialize_model_parallel(2, 4, 2, 2)
        group = ps.get_tensor_model_parallel_group()
        with pytest.raises(AssertionError, match="exist already"):
            ps.initialize_model_parallel()
        ps.destroy_model_parallel()
        assert group not in dist.distributed_c10d._world.pg_map  # destroyed, not only forgotten
    ps.initialize_model_parallel(1, 4)
    with pytest.raises(AssertionError, match="without use_fp8_=True"):
        ps.get_amax_reduction_group()
    if rank // 2 in (1, 2):
        with pytest.raises(AssertionError, match=f"embedding group is not initialized: rank {rank} is in none"):
            ps.get_embedding_group()
    ps.destroy_model_parallel()


def mistakes_change_nothing(rank: int) -> None:
    for arguments, words in (
        ((3,), "not divisible"),
        ((1, 1, 2), "interleaving needs at least 2 pipeline stages"),
        ((1, 4, None, 4), "must be a stage, 0 to 3, got 4"),
        ((0,), "tensor_model_parallel_size_ must be an integer of at least 1, got 0"),
        ((1, -2), "pipeline_model_parallel_size_ must be an integer of at least 1, got -2"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=words):
            ps.initialize_model_parallel(*arguments)
        assert ps.is_unitialized()
        assert ps.get_virtual_pipeline_model_parallel_world_size() is None
        assert ps.get_pipeline_model_parallel_split_rank() is None
    with pytest.raises(ValueError, match=r"p2p_backend='text' is no backend that this PyTorch has; it knows .*gloo"):
        ps.initialize_model_parallel(p2p_backend="text")
    with pytest.raises(TypeError, match="device_mesh must be a DeviceMesh or None, got 'text'"):
        ps.initialize_model_parallel(device_mesh="text")
    for setter in (ps.set_tensor_model_parallel_rank, ps.set_pipeline_model_parallel_world_size):
        with pytest.raises((TypeError, ValueError), match=r"rank must|world_size must"):
            setter(-1)
    assert not ps._state.rank_overrides
    assert not ps._state.size_overrides
    if not dist.is_ucc_available():
        with pytest.raises(ImportError, match="UCC backend requires pytorch source build with UCC installed"):
            ps.initialize_model_parallel(default_backend="ucc")


def sizes_beyond_the_processes_warn(rank: int) -> None:
    for arguments, words in (
        ((9,), r"tensor_model_parallel_size_=9 is more than the 8 processes that there are: 8 is used"),
        ((1, 12), r"pipeline_model_parallel_size_=12 is more than the 8 processes that there are: 8 is used"),
    ):
        with pytest.warns(UserWarning, match=words):
            ps.initialize_model_parallel(*arguments)
        assert max(ps.get_tensor_model_parallel_world_size(), ps.get_pipeline_model_parallel_world_size()) == 8
        ps.destroy_model_parallel()


def stages_chunks_and_split(rank: int) -> None:
    ps.initialize_model_parallel(2, 4, 2, 2, use_fp8_=True)
    stage = rank // 2
    assert (ps.get_virtual_pipeline_model_parallel_rank(), ps.get_virtual_pipeline_model_parallel_world_size()) == (
        0,
        2,
    )
    assert ps.is_pipeline_first_stage() == (stage == 0)
    assert not ps.is_pipeline_last_stage()
    assert ps.is_pipeline_last_stage(ignore_virtual=True) == (stage == 3)
    assert ps.is_rank_in_embedding_group() == (stage in (0, 2))
    assert ps.is_rank_in_embedding_group(ignore_virtual=True) == (stage in (0, 2, 3))
    ps.set_virtual_pipeline_model_parallel_rank(1)
    assert not ps.is_pipeline_first_stage()
    assert ps.is_pipeline_last_stage() == (stage == 3)
    assert ps.is_rank_in_embedding_group() == (stage in (2, 3))
    assert ps.is_pipeline_stage_before_split() == (stage < 2)
    assert ps.is_pipeline_stage_after_split() == (stage >= 2)
    assert ps.is_pipeline_stage_at_split() == (stage == 1)
    assert ps.is_rank_in_position_embedding_group() == (stage in (0, 2))
    assert ps.is_rank_in_encoder_relative_position_embedding_group() == (stage < 2)
    assert ps.is_rank_in_decoder_relative_position_embedding_group() == (stage >= 2)
    assert dist.get_world_size(ps.get_amax_reduction_group()) == 2
    if stage < 2:
        assert total(1, ps.get_encoder_relative_position_embedding_group()) == 2
    else:
        assert total(1, ps.get_decoder_relative_position_embedding_group()) == 2
    ps.set_pipeline_model_parallel_split_rank(1)
    assert ps.get_pipeline_model_parallel_split_rank() == 1
    ps.destroy_model_parallel()


def groups_of_all_are_connected(rank: int) -> None:
    """Check that no process returns, and could destroy its groups, before the slowest has connected its own."""
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    connected, make_groups = Path(folder[0], "connected"), ps.make_groups

    def made_slowly(*args: Any) -> Any:
        groups = make_groups(*args)
        if rank == 5:
            time.sleep(0.5)
            connected.touch()
        return groups

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ps, "make_groups", made_slowly)
        ps.initialize_model_parallel(2, 2)
    assert connected.exists()
    ps.destroy_model_parallel()


def overrides(rank: int) -> None:
    ps.set_tensor_model_parallel_world_size(4)
    ps.set_tensor_model_parallel_rank(3)
    ps.set_pipeline_model_parallel_world_size(7)
    ps.set_pipeline_model_parallel_rank(6)
    assert (ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()) == (4, 3)
    assert (ps.get_pipeline_model_parallel_world_size(), ps.get_pipeline_model_parallel_rank()) == (7, 6)
    assert ps.is_pipeline_last_stage()
    ps.destroy_model_parallel()


def contexts_and_experts(rank: int) -> None:
    ps.initialize_model_parallel(2, 1, context_parallel_size=2, expert_model_parallel_size=2)
    assert ps.get_data_parallel_world_size() == 2
    assert ps.get_data_parallel_world_size(with_context_parallel=True) == 4
    assert (ps.get_context_parallel_world_size(), ps.get_context_parallel_rank()) == (2, rank // 2 % 2)
    assert (ps.get_expert_model_parallel_world_size(), ps.get_expert_model_parallel_rank()) == (2, rank // 2 % 2)
    assert (ps.get_expert_data_parallel_world_size(), ps.get_expert_data_parallel_rank()) == (2, rank // 4)
    assert total(rank, ps.get_context_parallel_group()) == 2 * (rank // 4 * 4 + rank % 2) + 2
    mesh = ps.get_device_mesh()
    assert mesh.mesh_dim_names == ("pp", "dp", "cp", "tp")
    ps.destroy_model_parallel()


def meshes(rank: int) -> None:
    """Check a mesh of our groups, and groups of a mesh whose ranks have another order."""
    ps.initialize_model_parallel(2, 2)
    mesh = ps.get_device_mesh()
    assert mesh.mesh_dim_names == ("pp", "dp", "tp")
    assert mesh.mesh.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert mesh.get_group("tp") is ps.get_tensor_model_parallel_group()
    assert list(mesh.get_coordinate()) == [rank // 4, rank // 2 % 2, rank % 2]
    ps.destroy_model_parallel()

    from torch.distributed.device_mesh import init_device_mesh

    given = init_device_mesh("cpu", (2, 4), mesh_dim_names=("tp", "dp"))
    ps.initialize_model_parallel(device_mesh=given)
    assert ps.get_tensor_model_parallel_world_size() == 2
    assert ps.get_tensor_model_parallel_group() is given.get_group("tp")
    assert ps.get_tensor_model_parallel_src_rank() == rank % 4
    assert ps.get_data_parallel_src_rank() == rank // 4 * 4
    assert (ps.get_data_parallel_rank(), ps.get_tensor_model_parallel_rank()) == (rank % 4, rank // 4)
    ps.destroy_model_parallel()
    assert total(1, given.get_group("tp")) == 2  # groups that were passed in stay
    other = init_device_mesh("cpu", (8,), mesh_dim_names=("x",))
    with pytest.raises(ValueError, match="must be named among"):
        ps.initialize_model_parallel(device_mesh=other)


def nccl_network_environment(rank: int) -> None:
    assert "NCCL_NET" not in os.environ
    with pytest.raises(RuntimeError, match="NCCL_SOCKET_IFNAME was not set"):
        ps.set_nccl_socket_envs()
    ps.set_nccl_ib_envs()
    assert os.environ.pop("NCCL_NET") == "IB"
    os.environ["NCCL_SOCKET_IFNAME"] = "eth0"
    ps.set_nccl_socket_envs()
    assert os.environ.pop("NCCL_NET") == "Socket"
    del os.environ["NCCL_SOCKET_IFNAME"]


CHECKS = {
    check.__name__: check
    for check in (
        nothing_before_and_after,
        every_size,
        mistakes_change_nothing,
        sizes_beyond_the_processes_warn,
        stages_chunks_and_split,
        groups_of_all_are_connected,
        overrides,
        contexts_and_experts,
        meshes,
        nccl_network_environment,
        replicated_block_equals_one_process,
    )
}
