"""Focal loss of dense detectors, with label smoothing and padded classes."""

from .op import FAMILY, FOCAL_LOSS, check, loss_and_gradient_of_sum
