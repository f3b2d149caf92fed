"""Training with float8 matrix products.

`convert(model)` makes a model's linear layers multiply in float8 if that is faster: in e4m3 in the forward pass, in
e5m2 for gradients (e4m3 too with a scale per row). Weights, gradients, optimizer and state dict are not changed.
"""

from .convert import Converted, convert, revert, table
from .linear import SCALINGS, Float8Linear, linear

__all__ = ["SCALINGS", "Converted", "Float8Linear", "convert", "linear", "revert", "table"]
