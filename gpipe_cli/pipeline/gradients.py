"""Sums gradients, and other tensors, over the D replicas of a pipeline; computes norms, clips.

Sums depend on neither K nor the number of workers.

The global norm is made of one number per parameter, computed on the parameter's worker, and summed in layer order in
float64: the same bits for every K.
"""

from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..gpus import GPU

BUCKET_BYTES = 32 << 20  # gradients are reduced in flat buckets of about this size
MOST_UNDER_WAY = 2  # buckets; each needs its memory once more, with three or more replicas three times


def fill_gradients(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Gives a gradient of zero to trained parameters that have none, and returns these parameters.

    A sparse gradient, as of nn.Embedding(sparse=True), becomes dense: norms, sums over replicas and optimizers expect
    that.
    """
    filled = []
    for parameter in parameters:
        if parameter.grad is None and parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            filled.append(parameter)
        elif parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
    return filled


class UnusedParameters:
    """Knows which parameters this worker has used in a step, and which have a gradient of zero only for the sums.

    A parameter that nothing used has no gradient, and the optimizer leaves it alone. With a gradient of zero, weight
    decay and momentum would change it. Sums over replicas and over the uses of tied parameters need a gradient
    everywhere, so zeros stand in until the workers have exchanged which parameters were used.

    Args:
        own: this worker's parameters, by full name.

    Attributes:
        owners: names of the tied parameters that this worker's layers have used in the step.
    """

    def __init__(self, own: Mapping[str, nn.Parameter]) -> None:
        self._own, self._filled = own, set[int]()
        self.owners: Sequence[str] = ()

    def fill(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gives a gradient of zero to trained parameters that have none; `clear` takes it away."""
        self._filled.update(map(id, fill_gradients(parameters)))

    def used(self) -> list[str]:
        """Returns the names of the parameters that this worker has used; for tied ones, of their owners."""
        return [*(n for n, p in self._own.items() if p.grad is not None and id(p) not in self._filled), *self.owners]

    def clear(self, everywhere: Callable[[], Container[str]]) -> None:
        """Takes the gradient of zero from the parameters that no worker has used.

        Args:
            everywhere: returns the names of the parameters that at least one worker has used.
        """
        if self._filled:
            used = everywhere()
            for name, parameter in self._own.items():
                if id(parameter) in self._filled and name not in used:
                    parameter.grad = None
        self._filled, self.owners = set(), ()


class ReplicaSums:
    """Sums the gradients of the D replicas in place, once per mini-batch (paper, section 2.2).

    A sum, not a mean: every replica has already divided by the weight of the whole mini-batch. Every replica passes the
    same parameters in the same order, and after `fill_gradients` the same of them have a gradient. Parameters may be
    passed as soon as their gradients are whole: their sums are on their way while other cells still run.

    Args:
        group: the ranks that hold the same layers, one of each replica.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._begun: set[nn.Parameter] = set()
        # For each bucket, in order: waits for its sum; puts the sum into the gradients.
        self._under_way: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Begins to sum the gradients of those parameters that were not passed before in this mini-batch."""
        new = [parameter for parameter in parameters if parameter not in self._begun]
        self._begun.update(new)
        for bucket in buckets([parameter.grad for parameter in new if parameter.grad is not None]):
            if len(self._under_way) == MOST_UNDER_WAY:
                self._finish_oldest()
            flat, put_back = flattened(bucket)
            self._under_way.append((begin_sum(flat, self._group), put_back))

    def finish(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sums the gradients of all parameters, those that were begun before and the others."""
        self.begin(parameters)
        while self._under_way:
            self._finish_oldest()
        self._begun.clear()

    def _finish_oldest(self) -> None:
        """Waits for the sum of the oldest bucket and puts it into the gradients."""
        wait, put_back = self._under_way.popleft()
        wait()
        put_back()


def flattened(bucket: Sequence[Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """Returns the numbers of all tensors in one flat tensor, and a function that copies them back from it.

    A large tensor has a bucket of its own, and needs no copy.
    """
    if len(bucket) == 1 and bucket[0].is_contiguous():
        return bucket[0].view(-1), lambda: None
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])

    def put_back() -> None:
        parts = torch.split(flat, [tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view_as(tensor))

    return flat, put_back


def buckets(gradients: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    """Yields the tensors in groups of one type and device, of about `BUCKET_BYTES`."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        form = gradient.dtype, gradient.device
        if bucket and (size >= BUCKET_BYTES or form != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.numel() * gradient.element_size()
    if bucket:
        yield bucket


def squared_norms(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Returns the squared norm of each parameter's gradient, 0 where there is none: float64 (P,), on their device."""
    if not (gradients := [p.grad for p in parameters if p.grad is not None]):
        return torch.zeros(len(parameters), dtype=torch.float64)
    norms = iter(torch._foreach_norm(gradients, 2, torch.float64))
    zero = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
    return torch.stack([zero if p.grad is None else next(norms) for p in parameters]).square()


def clip_factor(norm: float, limit: float | None) -> float:
    """Returns the factor that brings gradients of global norm ``norm`` down to ``limit``, at most 1."""
    return 1.0 if limit is None or not norm > limit else limit / norm


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiplies the parameters' gradients by a factor, in place."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)


def sum_over_replicas(flat: Tensor, group: dist.ProcessGroup) -> None:
    """Replaces ``flat`` by the sum of all replicas' ``flat``; see `begin_sum`."""
    begin_sum(flat, group)()


def begin_sum(flat: Tensor, group: dist.ProcessGroup) -> Callable[[], None]:
    """Begins to replace ``flat`` by the sum of all replicas' ``flat``, added up in the order of the replicas.

    An all-reduce around a ring starts each chunk of the tensor at another replica, so the order in which a number is
    added up would depend on its place in the tensor, and so on the cut. (With two replicas the order does not matter.)
    Here every replica adds up one chunk and all of them gather the chunks: as many bytes as around a ring.

    Args:
        flat: one-dimensional and contiguous; of the same size on all replicas.

    Returns:
        A function that waits for the sum; all replicas call it at the same place.
    """
    wired, replicas = on_wire(flat, group), group.size()
    share = -(-wired.numel() // replicas)
    if replicas <= 2:
        padded = mine = wired
        work: dist.Work | None = dist.all_reduce(wired, group=group, async_op=True)
    else:
        padded = torch.cat([wired, wired.new_zeros(share * replicas - wired.numel())])
        mine = torch.empty_like(padded)
        work = dist.all_to_all_single(mine, padded, group=group, async_op=True)

    def finish() -> None:
        assert work is not None  # this rank is in the group
        work.wait()
        if replicas > 2:
            first, *others = mine.view(replicas, share)
            for other in others:
                first.add_(other)
            dist.all_gather_into_tensor(padded, first, group=group)
        if padded is not flat:
            flat.copy_(padded[: flat.numel()])

    return finish


def copy_from_replica(tensor: Tensor, replica: int, group: dist.ProcessGroup) -> None:
    """Replaces a contiguous ``tensor`` by that of one replica; all replicas call it at the same time."""
    wired = on_wire(tensor, group)
    dist.broadcast(wired, group_src=replica, group=group)
    if wired is not tensor:
        tensor.copy_(wired)


def on_wire(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the tensor or a contiguous copy on the device of the group's messages: with NCCL a GPU, else the CPU."""
    return tensor.to(GPU if dist.get_backend(group) == "nccl" else "cpu").contiguous()
