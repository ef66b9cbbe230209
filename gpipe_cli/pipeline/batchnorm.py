"""Implements BatchNorm under micro-batches (paper, section 2.2).

In training a layer normalises with the statistics of its micro-batch (with ``pipeline.sync_batchnorm`` over all
replicas). The moving averages that evaluation uses follow the statistics of the whole *mini-batch*: they are gathered
in the forwards, never in recomputes, and applied once when the step ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from .gradients import sum_over_replicas


class DeferredBatchNorm(_BatchNorm):
    """Replaces torch's own BatchNorm among the base classes of a module, so that a subclass keeps what it adds to it.

    Attributes:
        group: replicas that share the training statistics of each micro-batch; None: each replica has its own.
        gathering: off while a micro-batch is recomputed.
    """

    group: dist.ProcessGroup | None
    gathering: bool
    _pooled: Tensor | None  # float64 (3, C): count, sum, sum of squares about zero

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``x`` of shape (n, C, …), normalised over all dimensions but the second."""
        if not self.training and self.running_mean is not None:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        count = x.numel() // x.size(1)
        if self.group is not None:
            together: Tensor = self._normalise_over_replicas(x, count)
            return together
        # With momentum 1 the "moving" averages are just this micro-batch's statistics.
        wide = self.weight.dtype if self.weight is not None else torch.promote_types(x.dtype, torch.float32)
        mean = torch.zeros(x.size(1), device=x.device, dtype=wide)
        variance = torch.zeros_like(mean)
        output = F.batch_norm(x, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        self._gather(count, mean, variance * ((count - 1) / count))
        return output

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own; a compiled layer calls it as it is
    def _normalise_over_replicas(self, x: Tensor, count: int) -> Tensor:
        """Normalises as SyncBatchNorm does, with one differentiable sum; gathers only the local statistics.

        All replicas exchange their means and sums of squares about the mean, and combine them (Chan et al., 1979):
        with squares about zero, digits cancel where a mean is large beside its deviation.
        """
        dims, shape = [0, *range(2, x.dim())], [1, -1, *([1] * (x.dim() - 2))]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = wide.mean(dims)
        squares = (wide - mean.view(shape)).square().sum(dims)
        self._gather(count, mean, squares / count)
        everyone = self._from_every_replica(torch.stack([torch.full_like(mean, count), mean, squares]))
        counts, means, squares = everyone.unbind(1)  # each (replicas, C)
        together = (counts * means).sum(0) / counts.sum(0)
        variance = (squares + counts * (means - together).square()).sum(0) / counts.sum(0)
        output: Tensor = (wide - together.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return output.to(x.dtype)

    def _from_every_replica(self, local: Tensor) -> Tensor:
        """Returns ``local`` (3, C) of all replicas: (replicas, 3, C). The sum is exact: each replica fills one row."""
        replicas, place = dist.get_world_size(self.group), dist.get_rank(self.group)
        slots = F.pad(local[None], (0, 0, 0, 0, place, replicas - 1 - place))
        everyone: Tensor = _SumOverReplicas.apply(slots, self.group)
        return everyone

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # so that a compiled layer is one for both cases
    def _gather(self, count: int, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or not (self.gathering and self.training):
            return
        mean, variance = mean.detach().double(), variance.detach().double()
        sums = torch.stack([torch.full_like(mean, count), mean * count, (variance + mean * mean) * count])
        self._pooled = sums if self._pooled is None else self._pooled + sums

    def take_pooled(self) -> Tensor | None:
        """Returns the sums gathered since the last call, float64 (3, C), or None, and clears them."""
        pooled, self._pooled = self._pooled, None
        return pooled

    def update_moving_averages(self, pooled: Tensor) -> None:
        """Updates the moving averages with mean and population variance of all micro-batches of a mini-batch."""
        count, mean = pooled[0], pooled[1] / pooled[0]
        variance = pooled[2] / count - mean * mean
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        share = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


class _SumOverReplicas(torch.autograd.Function):
    """Sums over a group; the gradient is the sum of the replicas' gradients."""

    @staticmethod
    def forward(ctx: object, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]  # torch types the context as a plain object
        total = x.clone(memory_format=torch.contiguous_format)
        sum_over_replicas(total.view(-1), group)
        return total

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        sum_over_replicas(total.view(-1), ctx.group)  # type: ignore[attr-defined]
        return total, None


def defer_batchnorm(module: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Returns the module with a `DeferredBatchNorm` for each BatchNorm, wherever it is used.

    The given module stays as it is: parts that lead to a BatchNorm are copied, and share its parameters and buffers.
    """
    return _deferred(module, group, {})


def _deferred(module: nn.Module, group: dist.ProcessGroup | None, made: dict[nn.Module, nn.Module]) -> nn.Module:
    if module not in made:
        parts = {name: part and _deferred(part, group, made) for name, part in module._modules.items()}
        if isinstance(module, _BatchNorm):
            kind: Any = type(module)
            made[module] = _copied(module, parts, _deferring(kind), group=group, gathering=True, _pooled=None)
        elif any(part is not module._modules[name] for name, part in parts.items()):
            made[module] = _copied(module, parts, type(module))
        else:
            made[module] = module
    return made[module]


@cache
def _deferring(kind: Any) -> Any:
    """Returns a subclass of ``kind`` in which torch's forward, called as ``super()`` too, is the deferred one."""
    if issubclass(kind, nn.SyncBatchNorm):  # its forward is another; pipeline.sync_batchnorm has its effect
        return DeferredBatchNorm if kind is nn.SyncBatchNorm else kind
    return type(kind.__name__, (kind, DeferredBatchNorm), {"__module__": kind.__module__})


def _copied(module: nn.Module, parts: dict[str, nn.Module | None], kind: type[nn.Module], **more: object) -> nn.Module:
    """Returns a module with the attributes of ``module``, the same parameters and buffers, and these parts."""
    copy = kind.__new__(kind)
    own = {"_parameters": dict(module._parameters), "_buffers": dict(module._buffers), "_modules": parts}
    copy.__dict__.update(module.__dict__ | own | more)
    return copy


def finish_batchnorm(layers: Iterable[DeferredBatchNorm], replicas: dist.ProcessGroup | None) -> None:
    """Applies the gathered statistics to the moving averages; with replicas, pooled over them in one sum."""
    gathered = [(layer, pooled) for layer in layers if (pooled := layer.take_pooled()) is not None]
    if not gathered:
        return
    if replicas is not None:
        flat = torch.cat([pooled.flatten() for _, pooled in gathered])
        sum_over_replicas(flat, replicas)
        sums = torch.split(flat, [pooled.numel() for _, pooled in gathered])
        gathered = [(layer, total.view_as(pooled)) for (layer, pooled), total in zip(gathered, sums, strict=True)]
    for layer, pooled in gathered:
        layer.update_moving_averages(pooled)
