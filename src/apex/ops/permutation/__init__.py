"""Magnitudes that 2:4 pruning keeps, for every way to share the columns of neighbouring stripes."""

from .op import FAMILY, best_splits, kept_magnitude
from .reference import splits_of, window_splits

__all__ = ["FAMILY", "best_splits", "kept_magnitude", "splits_of", "window_splits"]
