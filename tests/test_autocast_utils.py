"""The cast under autocast that upstream's functions, and some clients, do by hand."""

import pytest
import torch

from apex._autocast_utils import _cast_if_autocast_enabled, _get_autocast_dtypes
from apex.contrib.multihead_attn import SelfMultiheadAttn
from apex.contrib.xentropy import linear_cross_entropy
from apex.normalization import FusedLayerNorm
from apex.RNN import LSTM


def test_floating_point_tensors_are_cast_where_autocast_is_on() -> None:
    single, double, whole = torch.randn(2), torch.randn(2, dtype=torch.float64), torch.arange(2)
    arguments = (single, double, whole, 0.5, None)
    assert _cast_if_autocast_enabled(*arguments) == arguments
    with torch.autocast("cpu", torch.bfloat16):
        cast = _cast_if_autocast_enabled(*arguments)
    assert cast[0].dtype == torch.bfloat16
    assert cast[1:] == arguments[1:]
    with torch.autocast("cuda" if torch.cuda.is_available() else "xpu", torch.bfloat16):
        assert _cast_if_autocast_enabled(single)[0] is single


def test_meta_tensors_are_taken_whether_or_not_autocast_is_on_elsewhere() -> None:
    """PyTorch knows no autocast of meta tensors, and raises when it is asked for it."""
    with torch.device("meta"):
        input, weight, target = torch.empty(3, 8), torch.empty(5, 8), torch.empty(3, dtype=torch.int64)
        attention = SelfMultiheadAttn(8, 2, impl="default")
        norm, recurrent = FusedLayerNorm(8), LSTM(8, 4, 1)
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert _cast_if_autocast_enabled(input)[0] is input
            assert linear_cross_entropy(input, weight, target).shape == ()
            states = input[:, None]
            assert attention(states, states, states)[0].shape == (3, 1, 8)
            assert norm(input).shape == (3, 8)
            assert recurrent(states)[0].shape == (3, 1, 4)


@pytest.mark.parametrize("supported", [True, False])
def test_the_dtypes_that_autocast_can_use(monkeypatch: pytest.MonkeyPatch, supported: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _get_autocast_dtypes() == [torch.float16, torch.bfloat16]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: supported)
    assert _get_autocast_dtypes() == [torch.float16, torch.bfloat16][: 1 + supported]
