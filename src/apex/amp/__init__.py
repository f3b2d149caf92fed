"""Mixed precision: `initialize`, `scale_loss`, and the functions around them."""

from .._lazy import lazy_subpackages
from . import _autocast, compat, lists, rnn_compat, utils
from ._amp_state import _amp_state, master_params
from ._initialize import release_all
from .amp import (
    _registered,
    bfloat16_function,
    float_function,
    half_function,
    init,
    promote_function,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from .frontend import initialize, load_state_dict, state_dict, trace_overflow
from .handle import _overflow_messages, disable_casts, scale_loss


def shutdown() -> None:
    """End amp: switch casts off and restore models and optimizers as if `initialize` had never been called.

    Any thread may call it. PyTorch lets no thread change another's autocast: in the thread that called `initialize`
    with O1 or O4, operators outside of models are still cast until that thread calls `shutdown` itself.
    """
    release_all()
    _autocast.switch_off()
    _amp_state.reset()
    _overflow_messages.clear()
    _registered.clear()


__all__ = [
    "bfloat16_function",
    "compat",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "lists",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "rnn_compat",
    "scale_loss",
    "shutdown",
    "state_dict",
    "trace_overflow",
    "utils",
]

__getattr__, __dir__ = lazy_subpackages(__name__, ())
