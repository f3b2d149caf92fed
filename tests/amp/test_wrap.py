"""`apex.amp.wrap`, `utils`, `compat` and `rnn_compat`: the small functions that scripts call by name."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor

from apex import amp
from apex.amp import compat, rnn_compat, utils, wrap
from apex.amp.handle import NoOpHandle


def dtypes(*args: Tensor, **kwargs: Tensor) -> list[torch.dtype]:
    return [value.dtype for value in (*args, *kwargs.values())]


@pytest.fixture
def module() -> Any:
    return types.SimpleNamespace(dtypes=dtypes, mm=torch.mm)


@pytest.fixture
def handle() -> Any:
    return amp.init()


SINGLE, HALF = torch.ones(2, 2), torch.ones(2, 2).half()


def test_cast_until_shutdown(module: Any, handle: Any, capsys: pytest.CaptureFixture[str]) -> None:
    wrap.cached_cast(module, "dtypes", utils.maybe_half, handle, verbose=True)
    wrap.cached_cast(module, "mm", utils.maybe_float, handle)
    assert module.dtypes(SINGLE, key=SINGLE) == [torch.float16] * 2
    assert "torch.float32 -> torch.float16 (dtypes)" in capsys.readouterr().out
    assert module.mm(HALF, HALF).dtype == torch.float32  # autocast would make it float16
    with handle._disable_casts():
        assert module.dtypes(SINGLE) == [torch.float32]
    amp.shutdown()
    assert module.dtypes is dtypes
    assert module.mm is torch.mm


def test_promote(module: Any, handle: Any) -> None:
    wrap.promote(module, "dtypes", handle)
    assert module.dtypes(HALF, key=SINGLE) == [torch.float32] * 2
    assert module.dtypes(HALF, HALF) == [torch.float16] * 2
    assert module.dtypes() == []


def test_promote_a_sequence(handle: Any) -> None:
    module = types.SimpleNamespace(cat=torch.cat)
    wrap.sequence_promote(module, "cat", handle)
    assert module.cat([HALF, SINGLE]).dtype == torch.float32


def test_promote_to_the_first_argument(module: Any, handle: Any) -> None:
    wrap.promote_match_arg0(module, "dtypes", handle)
    assert module.dtypes(HALF, SINGLE, key=SINGLE) == [torch.float16] * 3


def test_refusals(module: Any, handle: Any) -> None:
    wrap.err_if_arg0_half(module, "mm", handle)
    wrap.err_if_any_half(module, "dtypes", handle, "use float32 here")
    with pytest.raises(NotImplementedError, match="mm is refused on tensors in half precision"):
        module.mm(HALF, SINGLE)
    with pytest.raises(NotImplementedError, match="use float32 here"):
        module.dtypes(SINGLE, key=HALF)
    assert module.dtypes(SINGLE) == [torch.float32]


def test_names_that_are_not_there_are_left_alone(module: Any, handle: Any) -> None:
    before = vars(module).copy()
    wrap.cached_cast(module, "missing", utils.maybe_half, handle)
    wrap.promote(module, "missing", handle)
    wrap.promote_match_arg0(module, "missing", handle)
    wrap.err_if_any_half(module, "missing", handle)
    assert vars(module) == before


def test_a_handle_that_is_off(module: Any) -> None:
    wrap.cached_cast(module, "dtypes", utils.maybe_half, NoOpHandle())
    assert module.dtypes(SINGLE) == [torch.float32]


def test_utils() -> None:
    assert utils.is_fp_tensor(HALF)
    assert utils.is_fp_tensor([HALF, (SINGLE,)])
    assert not utils.is_fp_tensor([HALF, torch.arange(2)])
    assert not utils.is_fp_tensor(1.0)
    assert utils.collect_fp_tensor_types(([HALF, torch.arange(2)],), {"key": SINGLE}) == {"HalfTensor", "FloatTensor"}
    assert utils.maybe_bfloat16([SINGLE, 1])[0].dtype == torch.bfloat16
    assert utils.maybe_float(SINGLE) is SINGLE
    assert utils.as_inplace(["exp"]) == ["exp_"]
    assert utils.has_func(torch, "mm")
    assert utils.get_func(torch, "mm") is torch.mm
    assert utils.is_cuda_enabled() == bool(utils.get_cuda_version())
    namespace = types.SimpleNamespace(function=1)
    utils.set_func(namespace, "function", len)
    assert namespace.function is len


def test_compat() -> None:
    assert compat.variable_is_tensor()
    assert compat.tensor_is_variable()
    assert isinstance(torch.autograd.Variable(SINGLE), Tensor)
    assert not compat.tensor_is_float_tensor()
    assert compat.is_tensor_like(HALF)
    assert not compat.is_tensor_like([HALF])
    assert compat.is_floating_point(HALF)
    assert compat.scalar_python_val(torch.tensor(2.5)) == compat.scalar_python_val(2.5) == 2.5
    assert compat.filter_attrs(torch, ["mm", "missing"]) == ["mm"]


def test_recurrent_layers_need_no_help(handle: Any) -> None:
    assert not rnn_compat.has_old_rnns()
    rnn_compat.whitelist_rnn_cells(handle, verbose=False)
    assert all(hasattr(torch, name) for name in rnn_compat.RNN_NAMES)
    assert torch.nn.LSTMCell(2, 3)(torch.ones(1, 2))[0].dtype == torch.float16
