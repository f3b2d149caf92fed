"""OffloadedOptimizer: the bits of the optimizer that it offloads, and where its state is.

Without a GPU a stand-in decides which tensors count as a device's, so that the same code runs.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from apex import amp, optimizers
from apex.ops import _library
from apex.ops._host_memory import HostMemory
from apex.ops.multi_tensor import config as multi_tensor_config
from apex.optimizers import FusedAdam, FusedMuon, FusedSGD, OffloadedOptimizer, offloaded
from tests.optimizers.helpers import set_gradients
from tests.support.harness import Route, assert_equal_bits, routes

SHAPES = ((64, 80), (128,), (96, 64), (100, 50))
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "FusedAdam": (FusedAdam, {"lr": 0.01, "weight_decay": 0.1}),
    "masters": (FusedAdam, {"lr": 0.01, "master_weights": True}),
    "int8": (FusedAdam, {"lr": 0.01, "state_format": "int8", "master_bits": 24}),
    "FusedSGD": (FusedSGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.1}),
    "FusedMuon": (FusedMuon, {"lr": 0.01}),
    "FusedLAMB": (optimizers.FusedLAMB, {"lr": 0.01}),
    "FusedNovoGrad": (optimizers.FusedNovoGrad, {"lr": 0.01}),
    "FusedAdEMAMix": (optimizers.FusedAdEMAMix, {"lr": 0.01}),
    "FusedScheduleFreeAdamW": (optimizers.FusedScheduleFreeAdamW, {"lr": 0.01}),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make_params(device: str = "cpu", dtype: torch.dtype = torch.bfloat16, shapes: Any = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype, copy=True)) for shape in shapes
    ]


class Pretended:
    """CPU tensors that count as tensors of a device; kept, so that their memory cannot come to hold others."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def add(self, params: list[Tensor]) -> None:
        """Let parameters and their gradients count as tensors of a device."""
        tensors = [tensor for param in params for tensor in (param, param.grad) if tensor is not None]
        self._kept.update((tensor.data_ptr(), tensor.detach()) for tensor in tensors)

    def has(self, tensor: Tensor) -> bool:
        return tensor.data_ptr() in self._kept


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    device = Pretended()
    monkeypatch.setattr(offloaded, "on_host", lambda tensor: tensor.is_cpu and not device.has(tensor))
    return device


def train(optimizer: Any, params: list[Tensor], steps: range, pretended: Pretended | None) -> None:
    for step in steps:
        set_gradients(params, step)
        if pretended is not None:
            pretended.add(params)
        optimizer.step()


def tensors_of(optimizer: Any) -> list[Tensor]:
    values = [value for state in optimizer.state.values() for _, value in sorted(state.items())]
    return [value.cpu() for value in values if isinstance(value, Tensor)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", ["gpu", "cpu"])
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_the_resident_optimizer(case: str, where: str, device: str, pretended: Pretended) -> None:
    """On a real GPU `where="cpu"` has the CPU's bits, if the CPU updates all parameters."""
    cls, options = CASES[case]
    least = 0 if where == "cpu" else 4096
    resident_device = "cpu" if where == "cpu" else device
    resident_params, params = make_params(resident_device), make_params(device)
    resident = cls(resident_params, **options)
    optimizer = OffloadedOptimizer(params, cls, where=where, minimal_size=least, **options)
    assert isinstance(optimizer, cls)
    train(resident, resident_params, range(4), None)
    train(optimizer, params, range(4), pretended)
    assert_equal_bits([param.cpu() for param in resident_params], [param.cpu() for param in params])
    assert_equal_bits(tensors_of(resident), tensors_of(optimizer))
    for param in (param for param in params if param.numel() >= least):
        state = optimizer.state[param]
        large = [value for value in state.values() if isinstance(value, Tensor) and value.shape == param.shape]
        assert large
        if where == "gpu":
            memory = optimizer._memory(param.device)
            assert all(memory.moved(value) is value for value in large)
        else:
            assert all(value.is_cpu for value in large)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize(("case", "fraction"), [("masters", 0.6), ("int8", 1.0), ("FusedLAMB", 1.0)])
def test_pieces_of_state_have_the_bits_of_one_launch(
    case: str, fraction: float, route: Route, pretended: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State is copied in pieces that end inside of tensors; the second step is skipped."""
    if route.implementation != "triton":
        pytest.skip("only kernels work on copies")
    monkeypatch.setattr(multi_tensor_config, "STAGED", 0)
    monkeypatch.setattr(multi_tensor_config, "PIECE", 2048)
    monkeypatch.setattr(multi_tensor_config, "PIECES", 1)
    cls, options = CASES[case]
    own = {"fraction": fraction, "minimal_size": 0}
    runs = []
    with _library.implementation("triton"):
        for make, more in ((cls, {}), (lambda params, **given: OffloadedOptimizer(params, cls, **given), own)):
            # Blocks of the interpreter have 128 elements, of a GPU 1024.
            scale = 8 if route.device == "cuda" else 1
            params = make_params(route.device, shapes=((20 * scale, 45), (7,), (30 * scale, 21), (3, 100 * scale)))
            optimizer: Any = make(params, **options, **more)
            for step in range(3):
                optimizer.found_inf = torch.full((1,), float(step == 1), device=route.device)
                train(optimizer, params, range(step, step + 1), pretended if more else None)
            runs.append([*(param.detach().cpu() for param in params), *tensors_of(optimizer)])
    assert_equal_bits(*runs)
    made = [bucket.lists._pieces for buckets in optimizer._group_buckets.values() for bucket in buckets.buckets]
    assert max(len(pieces) for each in made for _, pieces, _ in each.values()) > multi_tensor_config.PIECES_AT_ONCE


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", ["gpu", "cpu"])
def test_skipped_steps_change_nothing(where: str, device: str, pretended: Pretended) -> None:
    params = make_params(device)
    optimizer = OffloadedOptimizer(params, lr=0.1, master_weights=True, where=where)
    train(optimizer, params, range(1), pretended)
    before = [value.clone() for value in (*params, *tensors_of(optimizer))]
    optimizer.found_inf = torch.ones(1, device=device)  # as torch.amp.GradScaler sets it
    optimizer.grad_scale = torch.full((1,), 4.0, device=device)
    train(optimizer, params, range(1, 2), pretended)
    assert_equal_bits([value.cpu() for value in before], [value.cpu() for value in (*params, *tensors_of(optimizer))])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", ["gpu", "cpu"])
@pytest.mark.parametrize("way", ["state dict", "of the resident", "pickle", "deepcopy"])
def test_resumed_runs_go_on_alike(way: str, where: str, device: str, pretended: Pretended) -> None:
    options: dict[str, Any] = {"lr": 0.01, "state_format": "int8", "master_bits": 24}
    params = make_params(device)
    optimizer = OffloadedOptimizer(params, where=where, **options)
    train(optimizer, params, range(2), pretended)
    if way in ("pickle", "deepcopy"):
        twin = copy.deepcopy(optimizer) if way == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
        others = [param for group in twin.param_groups for param in group["params"]]
        assert type(twin) is type(optimizer)
        assert twin.where == where
    else:
        others = [torch.nn.Parameter(param.detach().clone()) for param in params]
        pretended.add(others)
        twin = OffloadedOptimizer(others, where=where, **options)
        if way == "of the resident":
            resident = FusedAdam([torch.nn.Parameter(param.detach().clone()) for param in params], **options)
            resident.load_state_dict(optimizer.state_dict())
            twin.load_state_dict(resident.state_dict())
        else:
            twin.load_state_dict(optimizer.state_dict())
        state = twin.state[others[0]]["exp_avg::quantized"]
        assert state.is_cpu if where == "cpu" else twin._memory(others[0].device).moved(state) is state
    train(optimizer, params, range(2, 4), pretended)
    train(twin, others, range(2, 4), pretended)
    assert_equal_bits([param.cpu() for param in params], [param.cpu() for param in others])
    assert_equal_bits(tensors_of(optimizer), tensors_of(twin))


def test_fraction_and_minimal_size_choose_parameters(pretended: Pretended) -> None:
    params = [torch.nn.Parameter(torch.ones(size)) for size in (5000, 4095, 5000, 5000, 5000)]
    optimizer = OffloadedOptimizer(params, fraction=0.5)
    train(optimizer, params, range(1), pretended)
    assert [optimizer._is_offloaded(param) for param in params] == [False, False, True, False, True]
    all_of_them = OffloadedOptimizer(params, minimal_size=0)
    assert all(map(all_of_them._is_offloaded, params))
    assert not any(map(OffloadedOptimizer(params, fraction=0)._is_offloaded, params))


def test_schedulers_groups_and_clipping(pretended: Pretended) -> None:
    params = make_params(dtype=torch.float32)
    resident_params = make_params(dtype=torch.float32)
    runs = []
    for cls, members in ((FusedAdam, resident_params), (OffloadedOptimizer, params)):
        optimizer = cls([{"params": members[:2], "lr": 0.1}], lr=0.01)
        optimizer.add_param_group({"params": members[2:]})
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for step in range(3):
            set_gradients(members, step)
            torch.nn.utils.clip_grad_norm_(members, 0.1)
            pretended.add(params)
            optimizer.step()
            scheduler.step()
        optimizer.zero_grad()
        assert all(param.grad is None for param in members)
        runs.append([group["lr"] for group in optimizer.param_groups])
    assert runs[0] == runs[1]
    assert_equal_bits(resident_params, params)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", ["gpu", "cpu"])
def test_dynamic_loss_scales_and_masters_of_amp(where: str, device: str, pretended: Pretended) -> None:
    """The first scale overflows float16, so that a step is skipped."""
    runs = []
    for make in (FusedAdam, lambda params, **options: OffloadedOptimizer(params, where=where, **options)):
        torch.manual_seed(0)
        # With `where="cpu"` a real GPU's bits are not those of the CPU, so that the model is on the CPU.
        model = torch.nn.Linear(96, 64).to("cpu" if where == "cpu" else device)
        model, optimizer = amp.initialize(model, make(model.parameters(), lr=0.01), opt_level="O2", verbosity=0)
        for _ in range(4):
            inputs = torch.ones(8, 96, device=next(model.parameters()).device)
            with amp.scale_loss(model(inputs).float().square().sum(), optimizer) as scaled:
                scaled.backward()
            if make is not FusedAdam:
                pretended.add([*model.parameters(), *amp.master_params(optimizer)])
            optimizer.step()
            optimizer.zero_grad()
        runs.append([param.detach().cpu().clone() for param in (*model.parameters(), *amp.master_params(optimizer))])
        amp.shutdown()
    assert_equal_bits(*runs)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"fraction": 1.5}, ValueError, "fraction=1.5"),
        ({"minimal_size": -1}, ValueError, "minimal_size=-1"),
        ({"where": "disk"}, ValueError, "where='disk'"),
        ({"cls": torch.optim.AdamW}, TypeError, "cls="),
        ({"cls": OffloadedOptimizer}, TypeError, "cls="),
        ({"where": "cpu", "capturable": True}, ValueError, "capturable=True"),
        ({"momentum": 0.9}, TypeError, "momentum"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        OffloadedOptimizer(make_params(), **options)


def test_an_optimizer_instead_of_parameters_is_refused() -> None:
    with pytest.raises(TypeError, match="params is a SGD; parameters and the class are needed"):
        OffloadedOptimizer(torch.optim.SGD(make_params()))


def test_sharded_parameters_are_refused(pretended: Pretended) -> None:
    param = torch.nn.Parameter(torch.ones(5000))
    param._local_tensor = torch.ones(2500)  # as a DTensor has it
    optimizer = OffloadedOptimizer([param])
    with pytest.raises(NotImplementedError, match="DTensor"):
        train(optimizer, [param], range(1), pretended)
    assert not optimizer.state


@pytest.mark.parametrize("device", DEVICES)
def test_host_memory(device: str) -> None:
    memory = HostMemory(torch.device(device))
    values = torch.randn(3, 4, 5, 6, device=device).to(memory_format=torch.channels_last)
    moved = memory.moved(values)
    assert moved.device == values.device
    assert moved.stride() == values.stride()
    assert_equal_bits(values, moved)
    assert memory.moved(moved) is moved
    assert moved.untyped_storage().nbytes() == values.untyped_storage().nbytes()
    assert memory.pinned_like(values).stride() == values.stride()
    large = [memory.empty((1 << 20,), torch.float32).fill_(number) for number in range(6)]  # in several blocks
    assert [float(tensor.sum()) for tensor in large] == [number * 2.0**20 for number in range(6)]
    assert memory.empty((0, 3), torch.int8).shape == (0, 3)
    with pytest.raises(ValueError, match="meta"):
        HostMemory(torch.device("meta"))


@pytest.mark.gpu
def test_state_takes_no_memory_of_the_gpu() -> None:
    params = [torch.nn.Parameter(torch.randn(1 << 22, device="cuda")) for _ in range(4)]
    for param in params:
        param.grad = torch.randn_like(param)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer = OffloadedOptimizer(params)
    for _ in range(2):
        optimizer.step()
    assert torch.cuda.memory_allocated() - before < 1 << 20
    assert torch.cuda.max_memory_allocated() - before < 3 * (1 << 24)  # new state of one parameter at a time


@pytest.mark.gpu
@pytest.mark.parametrize("piece", [0, 4096])
def test_captured_steps_have_the_same_bits(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if piece:
        monkeypatch.setattr(multi_tensor_config, "STAGED", 0)
        monkeypatch.setattr(multi_tensor_config, "PIECE", piece)
        monkeypatch.setattr(multi_tensor_config, "PIECES", 1)
    runs = []
    for cls in (FusedAdam, OffloadedOptimizer):
        params = make_params("cuda")
        optimizer = cls(params, lr=0.01, capturable=True, state_format="int8", master_bits=24)
        set_gradients(params, 0)
        optimizer.step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        runs.append([*map(torch.Tensor.cpu, params), *tensors_of(optimizer)])
    assert_equal_bits(*runs)
