"""Implements BatchNorm under micro-batches (paper, section 2.2).

In training a layer normalises with the statistics of its micro-batch (with ``pipeline.sync_batchnorm`` over all
replicas). The moving averages that evaluation uses follow the statistics of the whole *mini-batch*: they are gathered
in the forwards, never in recomputes, and applied once when the step ends.
"""

from collections import defaultdict
from collections.abc import Iterable
from copy import deepcopy
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from .gradients import on_wire, sum_over_replicas


class DeferredBatchNorm(_BatchNorm):
    """Replaces torch's own BatchNorm among the base classes of a module, so that a subclass keeps what it adds to it.

    Attributes:
        group: replicas that share the training statistics of each micro-batch; None: each replica has its own.
        gathering: False while a micro-batch is recomputed, whose statistics are gathered already.
    """

    group: dist.ProcessGroup | None
    gathering: bool
    _gathered: list[Tensor]  # for each forward count, mean and unbiased variance by channel, (3, C)

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``x`` of shape (n, C, …), normalised over all dimensions but the second."""
        if not self.training and self.running_mean is not None:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        count = x.numel() // x.size(1)
        if self.group is not None:
            together: Tensor = self._normalise_over_replicas(x, count)
            return together
        if not (torch.compiler.is_compiling() or self.gathering):  # a compiled layer is one for both cases
            return F.batch_norm(x, None, None, self.weight, self.bias, True, 1.0, self.eps)
        # With momentum 1 the "moving" averages are just this micro-batch's statistics.
        wide = self.weight.dtype if self.weight is not None else torch.promote_types(x.dtype, torch.float32)
        statistics = torch.full((3, x.size(1)), count, dtype=wide, device=x.device)
        _, mean, variance = statistics.unbind()
        output = F.batch_norm(x, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        self._gather(statistics)
        return output

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own; a compiled layer calls it as it is
    def _normalise_over_replicas(self, x: Tensor, count: int) -> Tensor:
        """Normalises by the statistics of all replicas, as SyncBatchNorm does, and gathers only the local ones.

        All replicas gather their counts, means and sums of squares about the mean, and combine them (Chan et al.,
        1979). With squares about zero, digits would cancel if a mean is large beside its deviation.

        Args:
            count: numbers of ``x`` in each channel.
        """
        dims, shape = [0, *range(2, x.dim())], [1, -1, *([1] * (x.dim() - 2))]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = wide.mean(dims)
        squares = (wide - mean.view(shape)).square().sum(dims)
        counts = torch.full_like(mean, count)
        self._gather(torch.stack([counts, mean, squares / max(count - 1, 1)]).detach())
        everyone = _FromEveryReplica.apply(torch.stack([counts, mean, squares]), self.group)
        counts, means, squares = everyone.unbind(1)  # each (replicas, C)
        together = (counts * means).sum(0) / counts.sum(0)
        variance = (squares + counts * (means - together).square()).sum(0) / counts.sum(0)
        output: Tensor = (wide - together.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return output.to(x.dtype)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own; see `forward`
    def _gather(self, statistics: Tensor) -> None:
        """Notes the statistics (3, C) of a forward for `finish_batchnorm`, unless it is a recompute."""
        averages = self.running_mean, self.running_var, self.num_batches_tracked
        if self.gathering and self.training and not any(average is None for average in averages):
            self._gathered.append(statistics)

    def take_gathered(self) -> list[Tensor]:
        """Returns the statistics (3, C) of the forwards since the last call, and clears them."""
        gathered, self._gathered = self._gathered, []
        return gathered


class _FromEveryReplica(torch.autograd.Function):
    """Gathers a tensor from all replicas; its gradient is the sum of the replicas' gradients of it."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Returns the ``local`` of all replicas, in their order, in a new first dimension."""
        ctx.group, sent = group, on_wire(local, group)
        everyone = sent.new_empty(group.size(), *sent.shape)
        dist.all_gather_into_tensor(everyone, sent, group=group)
        return everyone.to(local.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Returns the sum of what all replicas have for this one's ``local``, in the order of the replicas."""
        sent = on_wire(gradient, ctx.group)
        arrived = torch.empty_like(sent)
        dist.all_to_all_single(arrived, sent, group=ctx.group)
        first, *others = arrived.unbind()
        return sum(others, first).to(gradient.device), None


def defer_batchnorm(module: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Returns a copy of the module with a `DeferredBatchNorm` for each BatchNorm, and the same parameters and buffers.

    A module without BatchNorm is returned as it is.
    """
    if not any(isinstance(part, _BatchNorm) for part in module.modules()):
        return module
    kept = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    copy = deepcopy(module, kept)
    for part in copy.modules():
        if isinstance(part, _BatchNorm):
            kind: Any = type(part)
            part.__class__ = _deferring(kind)
            vars(part).update(group=group, gathering=True, _gathered=[])
    return copy


@cache
def _deferring(kind: Any) -> Any:
    """Returns a subclass of ``kind`` whose forward, also if called through ``super()``, is that of the deferred one."""
    if issubclass(kind, nn.SyncBatchNorm):  # its forward is another; pipeline.sync_batchnorm has its effect
        return DeferredBatchNorm if kind is nn.SyncBatchNorm else kind
    return type(kind.__name__, (kind, DeferredBatchNorm), {"__module__": kind.__module__})


def finish_batchnorm(layers: Iterable[DeferredBatchNorm], replicas: dist.ProcessGroup | None) -> None:
    """Updates the moving averages by mean and population variance of the mini-batch, for all layers together.

    Numbers are added up one by one in the order of the micro-batches, and then over the replicas, so they are the same
    for every cut.

    Args:
        replicas: group of the replicas; None: there is one.
    """
    alike: dict[object, list[tuple[Any, list[Tensor]]]] = defaultdict(list)
    for layer in layers:
        if gathered := layer.take_gathered():
            alike[len(gathered), cast(Tensor, layer.running_mean).dtype].append((layer, gathered))
    # Layers that have run equally often are updated together: nearly always all, once for each micro-batch.
    for group in alike.values():
        norms, by_norm = zip(*group, strict=True)
        flat = torch.cat([statistics for micro_batch in zip(*by_norm, strict=True) for statistics in micro_batch], 1)
        counts, means, variances = flat.double().view(3, len(by_norm[0]), -1)
        sums = torch.stack([counts, counts * means, (counts - 1) * variances + counts * means * means], 1)
        first, *others = sums.unbind()
        total = sum(others, first)
        if replicas is not None:
            sum_over_replicas(total.view(-1), replicas)
        mean = total[1] / total[0]
        variance = total[2] / total[0] - mean * mean
        torch._foreach_add_([norm.num_batches_tracked for norm in norms], 1)
        shares = [1 / n.num_batches_tracked.item() if n.momentum is None else n.momentum for n in norms]
        for averages, new in (([n.running_mean for n in norms], mean), ([n.running_var for n in norms], variance)):
            news = torch.split(new.to(averages[0].dtype), [len(average) for average in averages])
            torch._foreach_lerp_(averages, news, shares)
