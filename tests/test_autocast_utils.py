"""The cast under autocast that upstream's functions, and some clients, do by hand."""

import torch

from apex._autocast_utils import _cast_if_autocast_enabled


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
