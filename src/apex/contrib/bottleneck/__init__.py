"""ResNet bottleneck blocks with frozen batch norms, optionally split by rows over ranks, and halo exchangers."""

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
