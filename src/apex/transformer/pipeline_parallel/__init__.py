"""Pipeline parallelism: a model is divided into stages on different ranks, and microbatches flow through the stages."""

from . import p2p_communication, utils
from .schedules import forward_backward_zero_bubble, get_forward_backward_func
from .schedules.common import build_model

__all__ = ["build_model", "forward_backward_zero_bubble", "get_forward_backward_func", "p2p_communication", "utils"]
