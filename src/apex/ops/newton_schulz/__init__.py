"""Newton-Schulz iteration: replaces the singular values of matrices by numbers near 1, with products alone."""

from .op import FAMILY, METHODS, newton_schulz, resolved
