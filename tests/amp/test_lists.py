"""`apex.amp.lists` says what O1 and O4 do, and a script that changes the lists changes that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apex import amp
from apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides
from apex.ops.autocast import rules
from tests.amp.common import quiet
from tests.amp.test_rules import NEED_A_GPU, Make, pretended_gpu

# PyTorch warns of defaults that functions are called with here.
pytestmark = pytest.mark.filterwarnings("ignore")

MODULES = (functional_overrides, torch_overrides, tensor_overrides)

# Shapes of the tensors that a function takes; a [2, 2] matrix, or two where types are mixed, if it is not here.
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "conv1d": ((1, 2, 5), (3, 2, 2)),
    "conv2d": ((1, 2, 5, 5), (3, 2, 2, 2)),
    "conv3d": ((1, 2, 3, 3, 3), (3, 2, 2, 2, 2)),
    "conv_transpose1d": ((1, 2, 5), (2, 3, 2)),
    "conv_transpose2d": ((1, 2, 5, 5), (2, 3, 2, 2)),
    "conv_transpose3d": ((1, 2, 3, 3, 3), (2, 3, 2, 2, 2)),
    "conv_tbc": ((5, 1, 2), (2, 2, 3), (3,)),
    "prelu": ((2, 2), (1,)),
    "addmv": ((2,), (2, 2), (2,)),
    "addr": ((2, 2), (2,), (2,)),
    "mv": ((2, 2), (2,)),
    "addbmm": ((2, 2), (1, 2, 2), (1, 2, 2)),
    "baddbmm": ((1, 2, 2), (1, 2, 2), (1, 2, 2)),
    "bmm": ((1, 2, 2), (1, 2, 2)),
    "scaled_dot_product_attention": ((1, 1, 2, 4), (1, 1, 2, 4), (1, 1, 2, 4)),
    "interpolate": ((1, 1, 4, 4),),
    "grid_sample": ((1, 1, 2, 2), (1, 2, 2, 2)),
    "group_norm": ((2, 2, 3),),
    "local_response_norm": ((2, 2, 3),),
    "cosine_embedding_loss": ((2, 2), (2, 2), (2,)),
    "margin_ranking_loss": ((2,), (2,), (2,)),
    "triplet_margin_loss": ((2, 2), (2, 2), (2, 2)),
    "ctc_loss": ((5, 1, 4),),
    "dot": ((2,), (2,)),
    "vdot": ((2,), (2,)),
    "cross": ((2, 3), (2, 3)),
    "bilinear": ((2, 2), (2, 2), (1, 2, 2)),
    **dict.fromkeys(("addmm", "addcdiv", "addcmul"), ((2, 2),) * 3),
    **dict.fromkeys(("linear", "matmul", "mm", "chain_matmul", "__matmul__", "dist"), ((2, 2),) * 2),
    **dict.fromkeys(
        ("poisson_nll_loss", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "mse_loss", "smooth_l1_loss",
         "multilabel_soft_margin_loss", "binary_cross_entropy_with_logits", "soft_margin_loss", "cosine_similarity"),
        ((2, 2),) * 2,
    ),
}  # fmt: skip

# Arguments after the tensors.
OTHERS: dict[str, Callable[[Make], tuple[Any, ...]]] = {
    **dict.fromkeys(("pow", "__pow__", "__rpow__"), lambda m: (2,)),
    **dict.fromkeys(("cumprod", "cumsum", "logsumexp", "softmax", "log_softmax", "softmin"), lambda m: (1,)),
    **dict.fromkeys(("cross_entropy", "nll_loss", "multi_margin_loss"), lambda m: (m.i(2),)),
    "multilabel_margin_loss": lambda m: (m.i(2, 2),),
    "renorm": lambda m: (2, 0, 1.0),
    "interpolate": lambda m: (None, 2),
    "group_norm": lambda m: (1,),
    "layer_norm": lambda m: ((2,),),
    "local_response_norm": lambda m: (2,),
    "ctc_loss": lambda m: (m.i(1, 2) + 1, (5,), (2,)),
}
# CUDA builds of PyTorch 2.6 and 2.9 ask the driver which implementation of these to take, if dtypes or sizes allow
# several. That of 2.15 does not.
MAY_ASK_THE_DRIVER = ("conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention")
COMPARISONS = {f"{prefix}{name}{prefix}" for name in ("eq", "ge", "gt", "le", "lt", "ne") for prefix in ("", "__")}


def call(overrides: ModuleType, kind: str, name: str, make: Make) -> Any:
    mixed = kind in ("CASTS", "SEQUENCE_CASTS")
    shapes = SHAPES.get(name, ((2, 2),) * (2 if mixed else 1))
    makers = [make.h, make.f, make.f] if mixed else [make.h if kind == "FP32_FUNCS" else make.f] * 3
    tensors: list[Any] = [maker(*shape) for maker, shape in zip(makers, shapes, strict=False)]
    if name == "scatter_add":
        tensors = [tensors[0], 0, make.i(2, 2), tensors[1]]
    if kind == "SEQUENCE_CASTS":
        tensors = [tensors]
    if name == "__rpow__":
        return 2 ** tensors[0]
    return getattr(overrides.MODULE, name)(*tensors, *OTHERS.get(name, lambda m: ())(make))


def wrong(make: Make, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the listed functions whose result has another dtype than their list requires."""
    found = {}
    half = "FP16_FUNCS" if make.low == torch.float16 else "BFLOAT16_FUNCS"
    expected = {half: make.low, "FP32_FUNCS": torch.float32, "CASTS": torch.float32, "SEQUENCE_CASTS": torch.float32}
    for overrides in MODULES:
        for kind, dtype in expected.items():
            for name in getattr(overrides, kind, ()):
                if name in without:
                    continue
                try:
                    result = call(overrides, kind, name, make)
                except RuntimeError as error:
                    if name in MAY_ASK_THE_DRIVER and "driver" in str(error):
                        continue
                    raise
                if name == "equal":
                    assert result is True
                elif result.dtype != (torch.bool if name in COMPARISONS else dtype):
                    found[f"{overrides.__name__}.{kind}: {name}"] = result.dtype
    return found


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=["O1", "O4"])
def test_every_name_is_cast_as_its_list_says(low: torch.dtype) -> None:
    quiet(nn.Linear(1, 1), opt_level="O1" if low == torch.float16 else "O4")
    assert wrong(Make("cpu", low)) == {}


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=["O1", "O4"])
def test_every_name_is_cast_with_fake_gpu_tensors(low: torch.dtype) -> None:
    with pretended_gpu(low) as make:
        assert wrong(make, without=(*NEED_A_GPU, "equal", "pdist")) == {}


@pytest.mark.gpu
def test_and_on_a_gpu() -> None:
    quiet(nn.Linear(1, 1).cuda(), opt_level="O1")
    assert wrong(Make("cuda", torch.float16)) == {}


def test_no_name_is_on_two_lists_of_a_module() -> None:
    for overrides in MODULES:
        kinds = ("FP16_FUNCS", "FP32_FUNCS", "CASTS", "SEQUENCE_CASTS")
        names = [name for kind in kinds for name in getattr(overrides, kind, ())]
        assert len(names) == len(set(names))


def test_the_lists_have_every_rule_that_has_a_public_name() -> None:
    """Rules are for operators of `aten`; some of these are only reached through other functions."""
    inner = {"lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
             "grid_sampler", "frobenius_norm", "nuclear_norm", "index_put", "rms_norm"}  # fmt: skip
    lists = {name for overrides in MODULES for kind in ("FP16_FUNCS", "FP32_FUNCS", "CASTS")
             for name in getattr(overrides, kind, ())}  # fmt: skip
    ruled = (*rules.FLOAT_ON_CPU, *rules.FLOAT_EVERYWHERE, *rules.HALF_ON_CPU, *rules.WIDEST_ON_CPU)
    names = {name.partition(".")[0] for name in ruled}
    assert {name for name in names if hasattr(torch, name) or hasattr(F, name)} - inner <= lists
    assert functional_overrides.BANNED_FUNCS == ((rules.BANNED, rules.BAN_MESSAGE),)


@pytest.fixture(autouse=True)
def lists_as_they_were() -> Iterator[None]:
    lists = [value for overrides in MODULES for value in vars(overrides).values() if isinstance(value, list)]
    before = [list(value) for value in lists]
    yield
    for value, names in zip(lists, before, strict=True):
        value[:] = names


def softmax() -> torch.dtype:
    return F.softmax(torch.ones(2, 2), 1).dtype


def test_a_function_that_was_moved_to_half_precision() -> None:
    """Do as Tacotron 2 before it calls initialize."""
    amp.lists.functional_overrides.FP32_FUNCS.remove("softmax")
    amp.lists.functional_overrides.FP16_FUNCS.append("softmax")
    original = F.softmax
    quiet(nn.Linear(1, 1), opt_level="O1")
    assert softmax() == torch.float16
    assert nn.Softmax(1)(torch.ones(2, 2)).dtype == torch.float16
    amp.init()  # which clients call after initialize
    assert softmax() == torch.float16
    amp.shutdown()
    assert F.softmax is original
    assert softmax() == torch.float32
    quiet(nn.Linear(1, 1), opt_level="O1")
    assert softmax() == torch.float16


def test_each_type_has_its_list() -> None:
    """Under O4 the name is on no list any more."""
    amp.lists.functional_overrides.FP32_FUNCS.remove("softmax")
    amp.lists.functional_overrides.FP16_FUNCS.append("softmax")
    quiet(nn.Linear(1, 1), opt_level="O4")
    assert softmax() == torch.float32
    assert F.softmax(torch.ones(2, 2, dtype=torch.bfloat16), 1).dtype == torch.bfloat16


def test_functions_that_were_added_and_removed() -> None:
    torch_overrides.FP32_FUNCS.append("relu")
    torch_overrides.FP32_FUNCS.remove("exp")
    tensor_overrides.FP16_FUNCS.remove("__matmul__")
    quiet(nn.Linear(1, 1), opt_level="O1")
    half = torch.ones(2, 2).half()
    assert torch.relu(half).dtype == torch.float32
    assert torch.exp(half).dtype == torch.float16
    assert half.exp().dtype == torch.float32
    assert (torch.ones(2, 2) @ half).dtype == torch.float32


def test_a_name_that_does_not_exist() -> None:
    torch_overrides.FP16_FUNCS.append("no_such_function")
    with pytest.raises(ValueError, match="no function named no_such_function in module <module 'torch'"):
        quiet(nn.Linear(1, 1), opt_level="O1")


def test_lists_as_they_are_replace_nothing() -> None:
    before = F.softmax, torch.exp, Tensor.__matmul__
    quiet(nn.Linear(1, 1), opt_level="O1")
    assert (F.softmax, torch.exp, Tensor.__matmul__) == before
