"""Memory shared by the ranks of one machine, and halo exchange through it."""

from .peer_halo_exchanger_1d import PeerHaloExchanger1d
from .peer_memory import PeerMemoryPool

__all__ = ["PeerHaloExchanger1d", "PeerMemoryPool"]
