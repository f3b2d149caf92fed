"""The multi-layer perceptron in one autograd node."""

from .mlp import MLP, mlp_function

__all__ = ["MLP", "mlp_function"]
