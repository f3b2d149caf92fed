"""A backward pass in two parts: first the input gradient, which another stage waits for, later the parameter gradients.

A node of the autograd graph is a "join" if it lies on a path from the stage's output to its input and parameters also
enter it. While the input gradient is computed, the gradients that arrive at each join are kept. The second part starts
at the joins and computes the gradients of their parameters, so nothing is computed twice. If two joins share a
parameter, all gradients are computed at once, because autograd cannot separate the two contributions.
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
    """Return the gradients of the inputs, and a function that adds the parameter gradients to their `grad`.

    Reentrant checkpoints are not supported, as with `torch.autograd.grad`.
    """
    root = get_gradient_edge(output)
    sources = {get_gradient_edge(tensor).node for tensor in inputs}
    joins = _joins(root.node, sources)
    uses = Counter(leaf for leaves in joins.values() for leaf in leaves)
    computed_now: list[Tensor] = list(uses) if any(count > 1 for count in uses.values()) else []
    arrived: dict[Node, Any] = {}
    # Keeps the graph alive: in PyTorch 2.6 to 2.9 the keys of `arrived` do not, if they are an autograd.Function's.
    kept = [output]

    def record_gradients(node: Node) -> Any:
        return node.register_prehook(lambda gradients: arrived.__setitem__(node, gradients))

    handles = [] if computed_now else [record_gradients(node) for node in joins]
    output_gradients = None if gradient is None else [gradient]
    try:
        with contextlib.nullcontext() if computed_now else backward_part.only("input"):
            results = torch.autograd.grad(
                [root], [*inputs, *computed_now], output_gradients, retain_graph=True, allow_unused=True
            )
    finally:
        for handle in handles:
            handle.remove()
    total = {leaf: part for leaf, part in zip(computed_now, results[len(inputs) :], strict=True) if part is not None}

    def backward_weight() -> None:
        for node, gradients in arrived.items():
            edges = [GradientEdge(node, index) for index, gradient in enumerate(gradients) if gradient is not None]
            output_gradients = [gradient for gradient in gradients if gradient is not None]
            with backward_part.only("weight"):
                parts = torch.autograd.grad(edges, joins[node], output_gradients, retain_graph=True, allow_unused=True)
            total.update({leaf: part for leaf, part in zip(joins[node], parts, strict=True) if part is not None})
        arrived.clear()
        kept.clear()
        if total:
            torch.autograd.backward(list(total), list(total.values()))

    return list(results[: len(inputs)]), backward_weight


def _joins(root: Node, sources: set[Node]) -> dict[Node, list[Tensor]]:
    """Return the nodes between root and sources that parameters enter, each with its parameters."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False)]
    while stack:  # iterative, because graphs can be deeper than the recursion limit
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((following, False) for following, _ in node.next_functions if following is not None)
    # `order` is topological: a node comes after all nodes that it leads to.
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
            leaf_variable = getattr(node, "variable", None)
            leaves[node] = {leaf_variable: None} if leaf_variable is not None else {}
            for other in following:
                leaves[node].update(leaves[other])
    return joins
