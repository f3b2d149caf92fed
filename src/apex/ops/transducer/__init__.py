"""Speech transducers (RNN-T): the joint of encoder and predictor, and the loss over all alignments."""

from .op_joint import FAMILY, JOINT, joint_arguments
from .op_loss import LOSS, check_loss, shares_of_scores
from .reference import PADDING
