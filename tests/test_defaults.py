"""What users set as the default device, dtype or tensor type changes no result.

The device "meta" stands for any other than that of the tensors: what is made there by mistake has no numbers.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import amp_C
from apex import amp, checkpoint, normalization
from apex.contrib.cudnn_gbn import GroupBatchNorm2d
from apex.contrib.group_norm import GroupNorm
from apex.contrib.groupbn import BatchNorm2d_NHWC
from apex.contrib.layer_norm import FastLayerNorm
from apex.contrib.multihead_attn import EncdecMultiheadAttn, SelfMultiheadAttn
from apex.fused_dense import FusedDenseGeluDense
from apex.mlp import MLP
from apex.ops import implementation
from apex.optimizers import FusedAdam
from apex.parallel import SyncBatchNorm, convert_syncbn_model
from apex.RNN import mLSTM
from tests.support.default_functions import FUNCTIONS, LIST_CALLS, MASK, Case
from tests.support.default_training import OPTIMIZERS, TRAINING
from tests.support.harness import NO_GATHER, Route, assert_equal_bits, routes

SETTINGS: dict[str, Callable[[], Any]] = {
    "meta": lambda: torch.set_default_device("meta"),
    "float64": lambda: torch.set_default_dtype(torch.float64),
    "float16": lambda: torch.set_default_dtype(torch.float16),
    "meta and float64": lambda: (torch.set_default_device("meta"), torch.set_default_dtype(torch.float64)),
    "cuda": lambda: torch.set_default_device("cuda"),
    "cuda.FloatTensor": lambda: torch.set_default_tensor_type(torch.cuda.FloatTensor),
}
ON_CPU = ("meta", "float64", "float16")
ON_GPU = (*ON_CPU, "cuda", "cuda.FloatTensor")
# Both at once, since each run takes long.
INTERPRETED = ("meta and float64",)
CASES = FUNCTIONS | LIST_CALLS | OPTIMIZERS | TRAINING


def cases() -> list:
    """Each case on each route; of training, the kernels are those of the lists."""
    return [
        pytest.param(name, *route.values, id=f"{name}-{route.id}", marks=route.marks)
        for name in CASES
        for route in routes(
            interpreter=name not in TRAINING, lacks=NO_GATHER if name.startswith("TransducerLoss") else ""
        )
    ]


@contextlib.contextmanager
def defaults(name: str) -> Iterator[None]:
    try:
        SETTINGS[name]()
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_tensor_type(torch.FloatTensor)


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One process is enough: what it would send to others it makes all the same."""
    store = f"file://{tmp_path_factory.mktemp('group')}/store"
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def results(case: Case, route: Route, name: str | None) -> list[Any]:
    """What a call returns under some defaults; everything that it is given was made under PyTorch's own."""
    call = case(torch.device(route.device))
    torch.manual_seed(0)
    try:
        with implementation(route.implementation), DtypesNamed() if name is None else defaults(name):
            found = call()
    finally:
        amp.shutdown()
    return [each.detach() if isinstance(each, Tensor) else each for each in tree_leaves(found)]


class DtypesNamed(TorchFunctionMode):
    """Refuses operators of our code whose results take the default dtype: floats of neither a float tensor nor a dtype.

    They are bits like any others if a default of float16 holds the same number, and the wrong dtype where a user's
    tensors are not of the default one.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        output, given = func(*args, **kwargs or {}), tree_leaves((args, kwargs))
        names_it = getattr(func, "__name__", "") in ("float", "double", "half", "bfloat16") or any(
            isinstance(each, torch.dtype) or (isinstance(each, Tensor) and each.dtype.is_floating_point)
            for each in given
        )
        caller = sys._getframe(1)
        if isinstance(output, Tensor) and output.is_floating_point() and not names_it:
            assert not re.search("src/(apex|compiled_names)/", Path(caller.f_code.co_filename).as_posix()), (
                f"{caller.f_code.co_filename}:{caller.f_lineno}: {torch.overrides.resolve_name(func)} of numbers and "
                "integers follows the default dtype; use new_full, full_like or .to(dtype) of a float tensor"
            )
        return output


@pytest.mark.parametrize(
    "call",
    [
        "torch.where(mask, 1.3, 0.6)",
        "torch.full((2,), 0.5)",
        "torch.arange(3) / 2",
        "0.1 * torch.arange(3)",
        "mask.sum() / mask.sum()",
        "torch.zeros(())",
    ],
)
def test_the_rule_about_dtypes_can_fail(call: str) -> None:
    code = compile(call, "src/apex/some.py", "eval")
    with pytest.raises(AssertionError, match="follows the default dtype"), DtypesNamed():
        eval(code, {"torch": torch, "mask": MASK})
    with DtypesNamed():
        eval(compile("mask.float() * 0.5 + torch.zeros((), dtype=torch.float32)", "src/apex/some.py", "eval"),
             {"torch": torch, "mask": MASK})  # fmt: skip


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("name", "route"), cases())
def test_results_do_not_depend_on_defaults(name: str, route: Route) -> None:
    expected = results(CASES[name], route, None)
    assert any(isinstance(each, Tensor) and each.numel() for each in expected)
    settings = (*INTERPRETED, "float16") if route.implementation == "torch" else INTERPRETED
    for setting in ON_GPU if route.device == "cuda" else settings:
        actual = results(CASES[name], route, setting)
        assert [getattr(each, "device", each) for each in actual] == [
            getattr(each, "device", each) for each in expected
        ], setting
        tensors = [[each for each in found if isinstance(each, Tensor)] for found in (actual, expected)]
        if route.device == "cuda":  # cuDNN does not promise the same bits twice
            torch.testing.assert_close(*tensors, equal_nan=True)
        else:
            assert_equal_bits(*tensors)


# Functions of autograd that the functions beside them call, and what neither takes nor makes tensors.
COVERED = {
    "CanSchTriMHA",
    "DenseNoBiasFunc",
    "ElasticLoader",
    "PolicySettings",
    "FP16_Optimizer",
    "FusedDenseFunc",
    "FusedDenseGeluDenseFunc",
    "GenericScaledMaskedSoftmax",
    "MlpFunction",
    "ReduceOp",
    "ScaledMaskedSoftmax",
    "ScaledSoftmax",
    "ScaledUpperTriangMaskedSoftmax",
    "TokenOutputs",
    "_transducer_ref",
    "check_replicas",
    "create_syncbn_process_group",
    "sync_triton_auto_tune_cache_across_gpus",
}
PACKAGES = (
    "RNN fused_bias_swiglu fused_dense mlp normalization optimizers parallel transformer.functional contrib.clip_grad "
    "contrib.conv_bias_relu contrib.cudnn_gbn contrib.fmha contrib.focal_loss contrib.group_norm contrib.groupbn "
    "contrib.index_mul_2d contrib.layer_norm contrib.llm_losses contrib.multihead_attn "
    "contrib.openfold_triton contrib.optimizers contrib.transducer contrib.xentropy"
)


def test_everything_public_has_a_case() -> None:
    have = {" ".join(name.split()[:2]) for name in CASES} | {name.split()[0] for name in CASES} | COVERED
    wanted = {
        f"contrib {name}" if package == "contrib.optimizers" else name
        for package in PACKAGES.split()
        for name in importlib.import_module(f"apex.{package}").__all__
    }
    assert not wanted - have
    functions = {name for name in vars(amp_C) if name.startswith(("multi_tensor_", "update_"))}
    assert not {name for name in functions if callable(getattr(amp_C, name))} - have


MODULES: dict[str, Callable[[], nn.Module]] = {
    "FusedLayerNorm": lambda: normalization.FusedLayerNorm(6),
    "MixedFusedRMSNorm": lambda: normalization.MixedFusedRMSNorm(6),
    "InstanceNorm3dNVFuser": lambda: normalization.InstanceNorm3dNVFuser(4, affine=True, track_running_stats=True),
    "FastLayerNorm": lambda: FastLayerNorm(6),
    "GroupNorm": lambda: GroupNorm(2, 4),
    "BatchNorm2d_NHWC": lambda: BatchNorm2d_NHWC(4),
    "GroupBatchNorm2d": lambda: GroupBatchNorm2d(4, 1),
    "SyncBatchNorm": lambda: SyncBatchNorm(4),
    "convert_syncbn_model": lambda: convert_syncbn_model(nn.Sequential(nn.BatchNorm2d(4))),
    "MLP": lambda: MLP([4, 6, 3]),
    "FusedDenseGeluDense": lambda: FusedDenseGeluDense(4, 6, 3),
    "SelfMultiheadAttn": lambda: SelfMultiheadAttn(8, 2, bias=True, include_norm_add=True),
    "EncdecMultiheadAttn": lambda: EncdecMultiheadAttn(8, 2, include_norm_add=True),
    "mLSTM": lambda: mLSTM(4, 6, 2),
}


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("setting", [*ON_CPU, *INTERPRETED])
def test_parameters_of_modules_follow_defaults_as_those_of_torch_do(
    setting: str, make: Callable[[], nn.Module]
) -> None:
    with defaults(setting):
        ours, torchs = make(), nn.BatchNorm2d(4)
        expected = {(each.device, each.dtype) for each in torchs.parameters()}
    tensors = [each for each in (*ours.parameters(), *ours.buffers()) if each.is_floating_point()]
    assert {(each.device, each.dtype) for each in tensors} == expected


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_amp_takes_a_model_on_the_default_device_meta(level: str) -> None:
    """It can be cast there, but the loss scale must not get lost where there are no numbers."""
    try:
        with defaults("meta"):
            model = nn.Linear(3, 2)
            model, _ = amp.initialize(model, FusedAdam(model.parameters()), opt_level=level, verbosity=0)
            assert model(torch.empty(4, 3)).device.type == "meta"
            saved = amp.state_dict()
        assert saved["loss_scaler0"]["loss_scale"] == (2.0**16 if level in ("O1", "O2") else 1.0)
    finally:
        amp.shutdown()


def test_checkpoints_hold_numbers_whatever_the_default_device(tmp_path: Path) -> None:
    state = {"model": nn.Linear(3, 2).state_dict(), "step": 5}
    with defaults("meta"):
        checkpoint.save(state, tmp_path / "state.pt")
        found = checkpoint.load(tmp_path / "state.pt")
    assert_equal_bits(list(found["model"].values()), list(state["model"].values()))
    sharded = {"weight": torch.ones(3), "step": 5}
    into = {"weight": torch.zeros(3), "step": 0}
    with defaults("meta"):
        checkpoint.save_sharded(sharded, tmp_path / "sharded")
        checkpoint.load_sharded(into, tmp_path / "sharded")
    assert_equal_bits([into["weight"]], [sharded["weight"]])


def test_defaults_are_put_back() -> None:
    for name in (*ON_CPU, *INTERPRETED):
        with defaults(name):
            pass
        made = torch.empty(0)
        assert (made.device.type, made.dtype) == ("cpu", torch.float32)
