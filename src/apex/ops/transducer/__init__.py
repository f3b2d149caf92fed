"""Speech transducers (RNN-T): the joint of encoder and predictor, and the loss over all alignments."""

from . import library_ops, reference_joint, reference_loss  # noqa: F401  registers torch.ops.apex.transducer_*
from .joint import (
    FAMILY,
    check_joint,
    draw_noise,
    joint_backward,
    joint_backward_from_saved,
    joint_forward,
    joint_forward_and_save,
)
from .loss import (
    check_loss,
    loss_backward,
    loss_backward_from_saved,
    loss_forward,
    loss_forward_and_save,
    nodes_of_scores,
)
from .spec import PADDING, JointSpec, LossNodes

__all__ = [
    "FAMILY",
    "PADDING",
    "JointSpec",
    "LossNodes",
    "check_joint",
    "check_loss",
    "draw_noise",
    "joint_backward",
    "joint_backward_from_saved",
    "joint_forward",
    "joint_forward_and_save",
    "loss_backward",
    "loss_backward_from_saved",
    "loss_forward",
    "loss_forward_and_save",
    "nodes_of_scores",
]
