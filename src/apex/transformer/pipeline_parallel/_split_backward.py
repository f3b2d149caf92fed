"""A backward pass in two parts: the gradient of the input, which another stage waits for, and those of parameters.

The graph of a stage has operations on the way from its output to its input. Those of them that parameters enter divide
the work: when the gradient of the input is computed, the gradients that arrive at them are kept, and each computes the
gradients of its parameters from these later. Nothing in between is computed twice. Where two of them share a parameter
all gradients are computed at once, since autograd cannot keep the two apart.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ..tensor_parallel import backward_part


def backward_input(
    output: Tensor, gradient: Tensor | None, inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], Callable[[], None]]:
    """The gradients of the inputs, and a function that adds those of the parameters to their `grad`.

    As with `torch.autograd.grad`, reentrant checkpoints cannot be on the way.
    """
    root = get_gradient_edge(output)
    sources = {get_gradient_edge(tensor).node for tensor in inputs}
    joins = _joins(root.node, sources)
    uses = Counter(leaf for leaves in joins.values() for leaf in leaves)
    now: list[Tensor] = list(uses) if any(count > 1 for count in uses.values()) else []
    arrived: dict[Node, Any] = {}

    def keep(node: Node) -> Any:
        return node.register_prehook(lambda gradients: arrived.__setitem__(node, gradients))

    handles = [] if now else [keep(node) for node in joins]
    given = None if gradient is None else [gradient]
    try:
        with contextlib.nullcontext() if now else backward_part.only("input"):
            found = torch.autograd.grad([root], [*inputs, *now], given, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    total = {leaf: part for leaf, part in zip(now, found[len(inputs) :], strict=True) if part is not None}

    def backward_weight() -> None:
        for node, gradients in arrived.items():
            edges = [GradientEdge(node, place) for place, each in enumerate(gradients) if each is not None]
            given = [each for each in gradients if each is not None]
            with backward_part.only("weight"):
                parts = torch.autograd.grad(edges, joins[node], given, retain_graph=True, allow_unused=True)
            total.update({leaf: part for leaf, part in zip(joins[node], parts, strict=True) if part is not None})
        arrived.clear()
        if total:
            torch.autograd.backward(list(total), list(total.values()))

    return list(found[: len(inputs)]), backward_weight


def _joins(root: Node, sources: set[Node]) -> dict[Node, list[Tensor]]:
    """The operations between root and sources that parameters enter, each with these parameters."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False)]
    while stack:  # not recursive: graphs are deep
        node, left = stack.pop()
        if left:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((following, False) for following, _ in node.next_functions if following is not None)
    # A node comes after everything that it leads to.
    leads: set[Node] = set()
    leaves: dict[Node, dict[Tensor, None]] = {}
    joins: dict[Node, list[Tensor]] = {}
    for node in order:
        following = [other for other, _ in node.next_functions if other is not None]
        if node in sources or any(other in leads for other in following):
            leads.add(node)
            entering = {leaf: None for other in following if other not in leads for leaf in leaves[other]}
            if entering:
                joins[node] = list(entering)
        else:
            own = getattr(node, "variable", None)
            leaves[node] = {own: None} if own is not None else {}
            for other in following:
                leaves[node].update(leaves[other])
    return joins
