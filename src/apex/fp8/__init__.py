"""Training with products of float8 numbers.

`convert(model)` makes the linear layers of a model multiply in float8 where that is quicker: e4m3 in the forward pass,
e5m2 for gradients (e4m3 too with scales for rows). Weights, gradients, optimizer and state dict stay what they were.
"""

from .convert import Converted, convert, revert, table
from .linear import SCALINGS, Float8Linear, linear

__all__ = ["SCALINGS", "Converted", "Float8Linear", "convert", "linear", "revert", "table"]
