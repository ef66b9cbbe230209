"""Runs a backward in two halves: first the gradient of a cell's input, later the gradients of its weights.

    x --> [ layer a ] --> [ layer b ] --> y        the graph of one micro-batch in one cell
               |               |
              w_a             w_b

The input's half goes from y to x and computes nothing for w_a and w_b. Where a weight joins this path (at the node of
a matrix product, for example) it keeps the gradient that arrives. The weights' half starts at these *joints* and
computes only what leads to weights. Every weight's gradient is the same number as in a whole backward, from the same
kernels in the same order. After Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.

Some weights get their gradient in the first half: a weight that joins in two places, because its two gradients must be
added up before they are added to those of other micro-batches; a weight that enters a custom
`torch.autograd.Function`, which computes all its gradients at once and may draw random numbers; and one with a hook.
All are exact; less is left for the second half.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

# Nodes whose backward cannot compute only some gradients, or not twice: re-entrant checkpoints and compiled layers.
_INDIVISIBLE = ("CheckpointFunctionBackward", "CompiledFunctionBackward")


@dataclass
class _Joint:
    """Holds a node on the path to the input.

    Attributes:
        leaves: the weights that join there.
        noted: the gradients that arrived, for each output of the node; empty before.
    """

    node: Node
    leaves: list[Tensor] = field(default_factory=list)
    noted: list[tuple[Tensor | None, ...]] = field(default_factory=list)

    def listen(self) -> None:
        """Keeps the gradients that arrive at the node, and uses them again in the second half.

        There they replace the incoming ones, on which a hook of the node's output tensor has run a second time.
        """
        noted = self.noted  # not self: the node would keep itself alive through its hook

        def note(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
            if noted:
                return noted[0]
            noted.append(gradients)
            return None

        self._handle = self.node.register_prehook(note)

    def finish(self) -> None:
        """Computes the gradients of the weights."""
        noted = self.noted[0] if self.noted else ()
        arrived = [(number, gradient) for number, gradient in enumerate(noted) if gradient is not None]
        if arrived:
            edges = [GradientEdge(self.node, number) for number, _ in arrived]
            torch.autograd.backward(edges, [gradient for _, gradient in arrived], inputs=self.leaves)
        self._handle.remove()


class WeightHalf:
    """Holds the second half of a backward: the gradients of the weights that could wait.

    Args:
        joints: nodes at which the weights join the path to the inputs.
        late: weights that must wait and have no joint.
        whole: runs the backward once more, for the ``late`` weights alone.
    """

    def __init__(
        self, joints: Sequence[_Joint], late: Sequence[Tensor] = (), whole: Callable[..., None] | None = None
    ) -> None:
        self._joints, self._late, self._whole = list(joints), list(late), whole

    def __len__(self) -> int:
        """Returns the number of weights that wait."""
        return sum(len(joint.leaves) for joint in self._joints) + len(self._late)

    @property
    def noted(self) -> list[Tensor]:
        """Returns the gradients that are held for the second half."""
        return [tensor for joint in self._joints for row in joint.noted for tensor in row if tensor is not None]

    def run(self) -> None:
        """Adds the gradients to the weights' ``.grad`` and frees the graph, joint by joint."""
        if self._whole is not None and self._late:
            self._whole(retain_graph=bool(self._joints), inputs=self._late)
        self._whole = None
        self._joints.reverse()
        while self._joints:
            self._joints.pop().finish()


def backward_of_inputs(
    roots: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor], waits: dict[int, bool] | None = None
) -> WeightHalf:
    """Runs the first half of ``torch.autograd.backward(roots, gradients)``; the second is `WeightHalf.run`.

    Args:
        roots: the outputs and losses of a cell, for one micro-batch.
        gradients: the gradient of each root.
        inputs: leaves whose ``.grad`` is computed now. If none needs a gradient, the whole backward runs here.
        waits: True for each weight, by its id, that has waited in an earlier micro-batch of the step. Then it does so
            again, even if this graph is another, because its gradients must be added up in one order.
    """
    if not roots and not waits:
        return WeightHalf(())
    wanted, whole = [tensor for tensor in inputs if tensor.requires_grad], partial(_backward, roots, gradients)
    starts = [get_gradient_edge(root).node for root in roots] if wanted or waits else []
    order = _from_roots(starts)  # nodes of the graph; `now` gets the weights whose gradient is computed in this half
    joints: list[_Joint] = []
    late: list[Tensor] = []
    divisible = not any(type(node).__name__ in _INDIVISIBLE for node in order)
    if divisible and wanted and order:
        joints, now = _sort_weights(order, starts, wanted)
    else:
        given = set(map(id, inputs))
        now = [leaf for node in order if (leaf := _leaf_of(node)) is not None and id(leaf) not in given]
    if divisible and waits is not None:
        joints, now, late = _as_before(joints, now, waits)
    if not joints and not late:
        whole()
        return WeightHalf(())
    for joint in joints:
        joint.listen()
    if wanted or now:
        whole(retain_graph=True, inputs=wanted + now)
    return WeightHalf(joints, late, whole if late else None)  # it would keep the whole graph


def _backward(roots: Sequence[Tensor], gradients: Sequence[Tensor], **options: Any) -> None:
    """Runs torch's backward with these options; does nothing without roots."""
    if roots:
        torch.autograd.backward(list(roots), list(gradients), **options)


def _as_before(
    joints: Sequence[_Joint], now: Sequence[Tensor], waits: dict[int, bool]
) -> tuple[list[_Joint], list[Tensor], list[Tensor]]:
    """Makes each weight wait, or not, as it did in the step's earlier micro-batches; a new one is noted in ``waits``.

    Args:
        joints: joints with weights that could wait in this graph.
        now: weights that cannot wait in this graph.
        waits: argument of `backward_of_inputs`.

    Returns:
        (joints with weights that wait, weights that do not wait, weights that must wait and have no joint).
    """
    late = [weight for weight in now if waits.setdefault(id(weight), False)]
    now = [weight for weight in now if not waits[id(weight)]]
    for joint in joints:
        now += [weight for weight in joint.leaves if not waits.setdefault(id(weight), True)]
        joint.leaves = [weight for weight in joint.leaves if waits[id(weight)]]
    return [joint for joint in joints if joint.leaves], now, late


def _from_roots(roots: Sequence[Node]) -> list[Node]:
    """Returns all nodes of the graph, each before the nodes that it passes gradients to."""
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
    """Returns the joints with the weights that can wait, and the weights that cannot.

    Args:
        order: nodes of the graph, as `_from_roots` returns them.
        starts: nodes of the roots.
        inputs: leaves whose gradient is computed in the first half.
    """
    leads_to_input = _leading_to(order, {id(tensor) for tensor in inputs})
    shared = _Joint(order[0])  # stands for "no single joint": its weights cannot wait
    # The joint through which all gradients reach a node that does not lead to an input.
    owner: dict[Node, _Joint] = {start: shared for start in starts if start not in leads_to_input}
    for node in order:
        if isinstance(node, BackwardCFunction):
            joint = shared
        else:
            joint = _Joint(node) if node in leads_to_input else owner[node]
        for child, _ in node.next_functions:
            if child is not None and child not in leads_to_input:
                owner[child] = joint if owner.get(child, joint) is joint else shared
    for node, joint in owner.items():
        leaf = _leaf_of(node)
        if leaf is not None:
            hooked = leaf._backward_hooks or leaf._post_accumulate_grad_hooks
            (shared if hooked else joint).leaves.append(leaf)
    joints = {id(joint): joint for joint in owner.values() if joint.leaves and joint is not shared}
    return list(joints.values()), shared.leaves


def _leading_to(order: Sequence[Node], inputs: set[int]) -> set[Node]:
    """Returns the nodes from which a gradient comes to one of the ``inputs`` (ids of leaves)."""
    found: set[Node] = set()
    for node in reversed(order):
        leaf = _leaf_of(node)
        if id(leaf) in inputs if leaf is not None else any(child in found for child, _ in node.next_functions):
            found.add(node)
    return found


def _leaf_of(node: Node) -> Tensor | None:
    """Returns the tensor whose ``.grad`` the node adds to; None for other nodes."""
    return node.variable if type(node).__name__ == "AccumulateGrad" else None  # type: ignore[attr-defined]
