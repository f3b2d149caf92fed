"""Dumps of every module's results in one step to a file, and comparison of two such files."""

from ._compare import Comparison, Difference, compare
from .dump import HDF5FileOperation, HookerAndDumper

__all__ = ["Comparison", "Difference", "HDF5FileOperation", "HookerAndDumper", "compare"]
