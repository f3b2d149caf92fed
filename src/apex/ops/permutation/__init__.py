"""Magnitudes that 2:4 pruning keeps, for every way to divide the columns of two stripes between them."""

from .op import FAMILY, best_splits
from .reference import kept_magnitude, window_splits
