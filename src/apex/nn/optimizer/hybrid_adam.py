"""HybridAdam, with Colossal-AI's arguments."""

from .cpu_adam import CPUAdam

__all__ = ["HybridAdam"]


class HybridAdam(CPUAdam):
    """CPUAdam under another name. Colossal-AI's HybridAdam also takes parameters on a GPU; here both classes do."""
