"""Divides the optimizer's state among the replicas (ZeRO, stage 1): each keeps and updates its share of the parameters.

Parameters are divided whole, so an optimizer that treats each parameter by itself computes the same bits as without.
After Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..pipeline.gradients import buckets, copy_from_replica, flattened

Gather = Callable[[Any], list[Any]]  # a JSON value to those of all replicas, in their order


def shares(sizes: Sequence[int], replicas: int) -> list[int]:
    """Returns the replica that owns each parameter.

    The largest parameter is given away first, and each goes to the replica that has least.

    Args:
        sizes: numbers in each parameter.
    """
    loads, owners = [0] * replicas, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += sizes[number]
    return owners


class OptimizerShards:
    """Knows which replica owns which of a worker's parameters, and passes weights and state between replicas.

    Args:
        parameters: all parameters of the worker.
        group: the ranks that hold the same layers, one of each replica.
        gather: returns a JSON value of all replicas; all ranks call it at the same time.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, gather: Gather) -> None:
        sizes = [parameter.numel() if parameter.requires_grad else 0 for parameter in parameters]
        self._parameters, self._owners = list(parameters), shares(sizes, group.size())
        self._group, self._gather = group, gather

    @property
    def own(self) -> list[nn.Parameter]:
        """Returns the parameters that this replica updates."""
        return self._of(self._group.rank())

    def _of(self, replica: int) -> list[nn.Parameter]:
        """Returns the parameters that a replica owns."""
        return [p for p, owner in zip(self._parameters, self._owners, strict=True) if owner == replica]

    @torch.no_grad()
    def spread(self) -> None:
        """Gives every replica the weights that their owners have updated."""
        for replica in range(self._group.size()):
            trained = [parameter.detach() for parameter in self._of(replica) if parameter.requires_grad]
            for bucket in buckets(trained):
                flat, put_back = flattened(bucket)
                copy_from_replica(flat, replica, self._group)
                if replica != self._group.rank():
                    put_back()

    @torch.no_grad()
    def state_of_others(
        self, state: Mapping[Tensor, Mapping[str, Any]], keep: bool
    ) -> dict[nn.Parameter, dict[str, Any]]:
        """Returns the optimizer's state of the parameters that other replicas own, on the CPU.

        Args:
            state: the state of this replica's optimizer.
            keep: False on a replica that only sends; it returns nothing.
        """
        here = self._group.rank()
        descriptions = self._gather({number: _described(state.get(p, {})) for number, p in enumerate(self._parameters)})
        found: dict[nn.Parameter, dict[str, Any]] = {}
        for number, (parameter, owner) in enumerate(zip(self._parameters, self._owners, strict=True)):
            values: dict[str, Any] = {}
            for key, described in descriptions[owner][str(number)].items():
                if "value" in described:
                    values[key] = described["value"]
                    continue
                if owner == here:
                    sent = state[parameter][key].detach().clone(memory_format=torch.contiguous_format)
                else:
                    dtype = getattr(torch, described["dtype"])
                    sent = torch.empty(described["shape"], dtype=dtype, device=parameter.device)
                copy_from_replica(sent, owner, self._group)
                values[key] = sent.cpu() if keep else None
            if owner != here and values and keep:
                found[parameter] = values
        return found


def _described(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a parameter's state for JSON: shape and type of each tensor, and the value of anything else."""
    return {
        key: {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        if isinstance(value, Tensor)
        else {"value": value}
        for key, value in values.items()
    }
