"""Magnitudes that 2:4 pruning keeps, for every way to share the columns of neighbouring stripes."""

from .op import FAMILY, best_splits
from .reference import kept_magnitude, window_splits
