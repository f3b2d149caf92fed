"""Functions of other packages that benchmarks time beside ours, by the example whose arguments they take."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

# By example: the package and a function that imports it and returns the peer.
PEERS: dict[str, tuple[str, Callable[[], Callable[..., Any]]]] = {}


def installed(example: str) -> dict[str, Callable[[], Callable[..., Any]]]:
    """Return the peer of an example, by the name of its column, if its package is installed."""
    package, make = PEERS.get(example, ("", None))
    if make is None or importlib.util.find_spec(package) is None:
        return {}
    return {package.removesuffix("_kernel"): make}


def _peer(package: str, *examples: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def register(make: Callable[[], Any]) -> Callable[[], Any]:
        PEERS.update(dict.fromkeys(examples, (package, make)))
        return make

    return register


@_peer("liger_kernel", "swiglu_no_bias")
def _liger_swiglu() -> Callable[..., Any]:
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction  # type: ignore[import-not-found]

    return lambda input, bias, activation: LigerFusedGateUpSiLUMulFunction.apply(input)
