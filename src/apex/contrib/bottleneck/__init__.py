"""ResNet bottlenecks with frozen batch norms, whole or divided by rows among ranks, and the exchanges of rows."""

from .bottleneck import Bottleneck, SpatialBottleneck
from .halo_exchangers import HaloExchangerAllGather, HaloExchangerNoComm, HaloExchangerPeer, HaloExchangerSendRecv

__all__ = [
    "Bottleneck",
    "HaloExchangerAllGather",
    "HaloExchangerNoComm",
    "HaloExchangerPeer",
    "HaloExchangerSendRecv",
    "SpatialBottleneck",
]
