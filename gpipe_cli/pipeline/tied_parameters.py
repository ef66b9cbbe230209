"""Keeps tied parameters one: adds up the gradients of their uses and gives all of them the owner's value.

Every use has an `nn.Parameter` of its own, also within a worker, so that its gradients are summed up apart; once a step
the sums are added in layer order, and the bits do not depend on the cut. The first use in the model is the owner: it
alone has an optimizer state, an average and a place in checkpoints.
"""

from collections.abc import Container, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .cell import Cell
from .gradients import fill_gradients, on_wire

_TAG = 0  # no other message has it


class Use(NamedTuple):
    """Names one use of a tied parameter: full name, and the worker that runs the layer."""

    name: str
    worker: int


class TiedParameters:
    """Holds the tied parameters of a model, as one worker sees them.

    All workers of a replica call each method at the same time, and go through ties and uses in the same order. So the
    blocking sends and receives cannot deadlock.

    Args:
        ties: the uses of every tied parameter of the model, in layer order, so the owner comes first.
        cells: this worker's cells.
        worker: number of this worker in the replica.
        ranks: ranks of all workers of the replica.
        group: process group for messages; None where there is one worker.

    Attributes:
        ties: the uses of every tied parameter; empty if the model has none.
    """

    def __init__(
        self,
        ties: Sequence[Sequence[Use]],
        cells: Sequence[Cell],
        worker: int,
        ranks: Sequence[int],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.ties, self._worker, self._ranks, self._group = ties, worker, ranks, group
        names = {use.name for uses in ties for use in uses}
        layers = [layer for cell in cells for layer in cell.layers]
        self._own = {
            full: parameter
            for layer in layers
            for name, parameter in layer.module.named_parameters(remove_duplicate=False)
            if (full := f"{layer.name}.{name}") in names
        }

    @cached_property
    def users(self) -> list[nn.Parameter]:
        """Returns the parameters of this worker's uses, without owners."""
        own = (use.name for owner, *others in self.ties for use in others if use.worker == self._worker)
        return [self._own[name] for name in own]

    @property
    def own(self) -> set[nn.Parameter]:
        """Returns the parameters of all uses on this worker, owners among them."""
        return set(self._own.values())

    @property
    def hooked(self) -> list[str]:
        """Returns the names of this worker's tied parameters whose gradient has a hook."""
        return [name for name, p in self._own.items() if p._backward_hooks or p._post_accumulate_grad_hooks]

    def freeze_with_owners(self, trained: Container[str]) -> None:
        """Freezes each use whose owner is frozen, and no other.

        Args:
            trained: full names of the owners, on all workers, that require a gradient.
        """
        for owner, *others in self.ties:
            for use in others:
                if use.name in self._own:
                    self._own[use.name].requires_grad_(owner.name in trained)

    def add_gradients(self) -> list[str]:
        """Adds the gradients of all uses, in layer order, to those of the owners, and then clears them.

        Owners that are trained have a gradient (`UnusedParameters.fill`).

        Returns:
            For each use on this worker that had a gradient, the owner's name.
        """
        here = self._worker
        uses = [(owner.name, self._own[use.name]) for owner, *rest in self.ties for use in rest if use.worker == here]
        used = [owner for owner, parameter in uses if parameter.grad is not None]
        fill_gradients(self.users)
        for owner, *others in self.ties:
            for use in others:
                gradient = self._brought_to(owner, use)
                if gradient is not None:
                    total = self._own[owner.name].grad
                    assert total is not None
                    total += gradient
        self.forget_gradients()
        return used

    def _brought_to(self, owner: Use, use: Use) -> Tensor | None:
        """Sends the gradient of a use to the owner's worker.

        Returns:
            The gradient on the owner's worker; None on other workers, and if the parameter is frozen.
        """
        here = self._worker
        if here not in (owner.worker, use.worker):
            return None
        if here == use.worker:
            gradient = self._own[use.name].grad
            if gradient is None or here == owner.worker:
                return gradient
            self._send(gradient, owner.worker)
            return None
        parameter = self._own[owner.name]
        if not parameter.requires_grad:
            return None
        gradient = torch.empty_like(parameter, memory_format=torch.contiguous_format, requires_grad=False)
        self._receive(gradient, use.worker)
        return gradient

    def forget_gradients(self) -> None:
        """Clears the gradients of all uses but the owners'."""
        for parameter in self.users:
            parameter.grad = None

    def spread(self) -> None:
        """Gives every use the value of its owner. The uses on one worker share the memory of the first of them."""
        here = self._worker
        for owner, *others in self.ties:
            first = {owner.worker: owner}
            for use in others:
                if use.worker in first:
                    if here == use.worker:
                        self._own[use.name].data = self._own[first[here].name].data
                    continue
                first[use.worker] = use
                if here == owner.worker:
                    self._send(self._own[owner.name], use.worker)
                elif here == use.worker:
                    self._receive(self._own[use.name].data, owner.worker)

    def _send(self, tensor: Tensor, worker: int) -> None:
        """Sends the values of a tensor, in logical order."""
        assert self._group is not None  # there are other workers
        dist.send(on_wire(tensor.detach(), self._group), self._ranks[worker], group=self._group, tag=_TAG)

    @torch.no_grad()
    def _receive(self, into: Tensor, worker: int) -> None:
        """Receives the values of a tensor."""
        assert self._group is not None  # there are other workers
        into = into.detach()
        arrived = on_wire(into, self._group)
        dist.recv(arrived, self._ranks[worker], group=self._group, tag=_TAG)
        if arrived is not into:
            into.copy_(arrived)
