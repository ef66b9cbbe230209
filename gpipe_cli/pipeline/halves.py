"""A backward in two halves: first the gradient of a cell's input, which others wait for, later those of its weights.

    x --> [ layer a ] --> [ layer b ] --> y        the graph of one micro-batch in one cell
               |               |
              w_a             w_b

The input's half walks from y to x and computes nothing for w_a and w_b. Where a weight joins that way (the node of a
matrix product, say) it notes the gradient that arrives. The weights' half starts at these *joints* and computes only
what leads to weights. Every weight's gradient is the same number, from the same kernels in the same order, as a whole
backward makes. After Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.

Not every weight can wait. One that joins in two places gets its gradient in the first half, because the sum over the
places must be made before it is added to those of other micro-batches. So does one that enters a custom
`torch.autograd.Function`, which computes all its gradients at once. Both are exact; they only leave less for later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

# Their backward cannot be asked for some of its gradients, or not twice: re-entrant checkpoints and compiled layers.
_INDIVISIBLE = ("CheckpointFunctionBackward", "CompiledFunctionBackward")


@dataclass
class _Joint:
    """A node on the way to the input which weights join."""

    node: Node
    leaves: list[Tensor] = field(default_factory=list)
    noted: list[tuple[Tensor | None, ...]] = field(default_factory=list)

    def listen(self) -> None:
        """Notes the gradients that arrive at the node. The second time they are put in place of what hooks make of
        them: a hook on the node's output tensor has seen them before."""
        noted = self.noted  # not self: the node would keep itself alive through its hook

        def note(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
            if noted:
                return noted[0]
            noted.append(gradients)
            return None

        self._handle = self.node.register_prehook(note)

    def finish(self) -> None:
        """The gradients of the weights."""
        noted = self.noted[0] if self.noted else ()
        arrived = [(number, gradient) for number, gradient in enumerate(noted) if gradient is not None]
        if arrived:
            edges = [GradientEdge(self.node, number) for number, _ in arrived]
            torch.autograd.backward(edges, [gradient for _, gradient in arrived], inputs=self.leaves)
        self._handle.remove()


class WeightHalf:
    """What is left of a backward: the gradients of the weights that could wait."""

    def __init__(self, joints: Sequence[_Joint]) -> None:
        self._joints = list(joints)

    def __len__(self) -> int:
        """Weights that wait."""
        return sum(len(joint.leaves) for joint in self._joints)

    @property
    def noted(self) -> list[Tensor]:
        """The gradients that are held for it."""
        return [tensor for joint in self._joints for row in joint.noted for tensor in row if tensor is not None]

    def run(self) -> None:
        """Adds them to the weights' ``.grad`` and forgets the graph, joint by joint."""
        self._joints.reverse()
        while self._joints:
            self._joints.pop().finish()


def backward_of_inputs(roots: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor]) -> WeightHalf:
    """The first half of ``torch.autograd.backward(roots, gradients)``; the second is `WeightHalf.run`.

    Args:
        roots: the outputs and losses of a cell, for one micro-batch.
        gradients: of the roots.
        inputs: leaves whose ``.grad`` is wanted now. Without any, nobody waits and everything is done here.
    """
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    starts = [get_gradient_edge(root).node for root in roots] if wanted else []
    order = _from_roots(starts)
    joints: list[_Joint] = []
    now: list[Tensor] = []
    if order and not any(node.name() in _INDIVISIBLE for node in order):
        joints, now = _sort_weights(order, starts, wanted)
    if not joints:
        torch.autograd.backward(list(roots), list(gradients))
        return WeightHalf(())
    for joint in joints:
        joint.listen()
    torch.autograd.backward(list(roots), list(gradients), retain_graph=True, inputs=wanted + now)
    return WeightHalf(joints)


def _from_roots(roots: Sequence[Node]) -> list[Node]:
    """All nodes of the graph, each before those it passes gradients to."""
    seen: set[Node] = set()
    left: list[Node] = []
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            left.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None and child not in seen]
    left.reverse()
    return left


def _sort_weights(
    order: Sequence[Node], starts: Sequence[Node], inputs: Sequence[Tensor]
) -> tuple[list[_Joint], list[Tensor]]:
    """The leaves that can wait, under their joints, and those that cannot."""
    leads_to_input = _leading_to(order, {id(tensor) for tensor in inputs})
    shared = _Joint(order[0])  # stands for "no single joint"
    owner: dict[Node, _Joint] = {start: shared for start in starts if start not in leads_to_input}
    for node in order:
        if node in leads_to_input:
            joint = shared if isinstance(node, BackwardCFunction) else _Joint(node)
        else:
            joint = owner[node]
        for child, _ in node.next_functions:
            if child is not None and child not in leads_to_input:
                owner[child] = joint if owner.get(child, joint) is joint else shared
    for node, joint in owner.items():
        leaf = _leaf_of(node)
        if leaf is not None:
            joint.leaves.append(leaf)
    joints = {id(joint): joint for joint in owner.values() if joint.leaves and joint is not shared}
    return list(joints.values()), shared.leaves


def _leading_to(order: Sequence[Node], inputs: set[int]) -> set[Node]:
    """The nodes from which a gradient comes to one of the ``inputs`` (ids of leaves)."""
    found: set[Node] = set()
    for node in reversed(order):
        leaf = _leaf_of(node)
        if id(leaf) in inputs if leaf is not None else any(child in found for child, _ in node.next_functions):
            found.add(node)
    return found


def _leaf_of(node: Node) -> Tensor | None:
    """The tensor whose ``.grad`` the node adds to, if it is such a node."""
    return node.variable if node.name() == "torch::autograd::AccumulateGrad" else None  # type: ignore[attr-defined]
