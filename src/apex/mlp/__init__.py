"""A multi-layer perceptron as a single autograd node."""

from .mlp import MLP, MlpFunction, mlp_function

__all__ = ["MLP", "MlpFunction", "mlp_function"]
