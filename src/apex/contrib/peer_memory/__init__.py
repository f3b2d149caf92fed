"""Memory that the ranks of a machine share, and the exchange of halos through it."""

from .peer_halo_exchanger_1d import PeerHaloExchanger1d
from .peer_memory import PeerMemoryPool

__all__ = ["PeerHaloExchanger1d", "PeerMemoryPool"]
