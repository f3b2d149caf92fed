"""Layer norm and RMS norm."""

from .op import FAMILY, NORM, checked_shape, forward_and_save, joined_statistics, layer_norm, rms_norm
from .residual import add_norm, check_addends
