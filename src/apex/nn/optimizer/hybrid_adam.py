"""HybridAdam, with Colossal-AI's arguments."""

from .cpu_adam import CPUAdam

__all__ = ["HybridAdam"]


class HybridAdam(CPUAdam):
    """CPUAdam under another name: in Colossal-AI it also takes parameters on a GPU, which CPUAdam does here, too."""
