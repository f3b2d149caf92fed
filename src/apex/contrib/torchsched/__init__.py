"""torch.compile with convolution gradients computed one after the other, and a default backend of one's choice.

Importing this registers the backend "torchsched": Inductor, with the gradients of a convolution as separate operators,
which it can then order.
"""

from .backend import get_backend, set_default_backend

__all__ = ["get_backend", "set_default_backend"]
