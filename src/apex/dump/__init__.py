"""What every module of a model computed in one step, in a file, and where two such files begin to differ."""

from ._compare import Comparison, Difference, compare
from .dump import HDF5FileOperation, HookerAndDumper

__all__ = ["Comparison", "Difference", "HDF5FileOperation", "HookerAndDumper", "compare"]
