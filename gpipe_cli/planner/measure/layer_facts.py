"""What one layer computes and keeps, for one micro-batch: found on fake tensors, without its weights ever existing.

A layer is run forward and backward once with shapes instead of values. Equal layers with equal inputs are measured
once, so that a model of thousands of layers takes as long as one of each kind. Kernels are those that torch chooses on
a CPU, but for two that accelerators do otherwise: attention in one kernel also with dropout, and dropout masks of one
byte an element (see `kernels_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from ...layers import LayerBuilder
from ...micro_batch import Tensors
from ...optim.average import averaged_tensors
from ...partition.cost import (
    CostError,
    TensorShape,
    build_key,
    build_without_memory,
    fake_mode,
    refuse_too_few_examples,
)
from ...pipeline.batchnorm import DeferredBatchNorm, defer_batchnorm
from ...pipeline.boundary import as_argument, as_tensors, canonical
from ...pipeline.halves import backward_of_inputs
from .tracking import Operation, Saved, Tracker, storage_key

Autocast = Callable[[], AbstractContextManager[Any]]
Loss = Callable[[Tensors, Tensors], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class BoundaryTensor:
    """One tensor between two layers: its shape, and whether a gradient flows back through it."""

    shape: TensorShape
    needs_gradient: bool

    @property
    def bytes(self) -> int:
        return self.shape.bytes

    def fake(self) -> Tensor:
        return self.shape.empty().requires_grad_(self.needs_gradient)


@dataclass(frozen=True)
class Phase:
    """Forward, backward or half a backward of one layer.

    Attributes:
        operations: in order.
        peak: the most bytes alive at any moment that were not alive when it began.
    """

    operations: tuple[Operation, ...]
    peak: int


@dataclass(frozen=True)
class Halves:
    """A backward in two halves (`pipeline/halves.py`).

    Attributes:
        waits: whether there are weights whose gradients are left to the second half.
        noted: bytes of gradients that the first half holds for it, those of the inputs not counted.
        first, second: each half.
    """

    waits: bool
    noted: int
    first: Phase
    second: Phase


@dataclass(frozen=True)
class Output:
    """One output of a layer: where its memory is.

    Attributes:
        tensor: what it is.
        of_input: the number of the input whose memory it shares; None: its own.
        storage: the number of its own storage among the layer's outputs.
        bytes: of that storage.
    """

    tensor: BoundaryTensor
    of_input: int | None
    storage: int
    bytes: int


@dataclass(frozen=True)
class LayerFacts:
    """What one layer is and needs, for one micro-batch of known shapes.

    Attributes:
        parameters: shape and dtype of its weights, by their names within the layer.
        frozen: names of those that do not learn (``requires_grad`` is false).
        buffer_bytes: of what it keeps beside them, such as BatchNorm's moving averages.
        averaged_buffer_bytes: of those that `trainer.average` averages, as it does the parameters.
        inference: forward without a graph; forward: with one; backward.
        backward_extra: bytes alive at most in backward beyond what forward has kept.
        halves: the same backward in two.
        saves_inputs: numbers of the inputs that the graph keeps.
        saves_outputs: numbers of the output storages that the graph keeps.
        saves_inside: bytes of everything else that the graph keeps, weights not counted.
        gathered: bytes kept until the mini-batch has ended: the sums of BatchNorm.
        outputs: in order.
    """

    parameters: tuple[tuple[str, TensorShape], ...]
    frozen: frozenset[str]
    buffer_bytes: int
    averaged_buffer_bytes: int
    inference: Phase
    forward: Phase
    backward: Phase
    backward_extra: int
    halves: Halves
    saves_inputs: frozenset[int]
    saves_outputs: frozenset[int]
    saves_inside: int
    gathered: int
    outputs: tuple[Output, ...] = field(repr=False)

    @property
    def boundary(self) -> tuple[BoundaryTensor, ...]:
        """What the layer hands on."""
        return tuple(output.tensor for output in self.outputs)

    @property
    def parameter_count(self) -> int:
        return sum(shape.numel for _, shape in self.parameters)


def measure_layers(
    builders: Sequence[LayerBuilder], inputs: Tensors, targets: Tensors, autocast: Autocast, kernels: str
) -> list[LayerFacts]:
    """The facts of every layer.

    Args:
        builders: the model.
        inputs: of one micro-batch; only their shapes matter, so meta tensors do.
        targets: of the same, for layers with an ``auxiliary_loss``.
        autocast: makes the context in which forward runs.
        kernels: see `kernels_of`.

    Raises:
        CostError: a layer that does not run on fake tensors, by its name.
    """
    boundary = tuple(BoundaryTensor(TensorShape.of(tensor), False) for tensor in inputs)
    of_targets = tuple(TensorShape.of(tensor) for tensor in targets)
    known: dict[Hashable, LayerFacts] = {}
    facts = []
    with torch.random.fork_rng(devices=[]), kernels_of(kernels):
        for index, builder in enumerate(builders):
            key = (build_key(builder, index), boundary)
            if key not in known:
                known[key] = _measure(builder, boundary, of_targets, autocast)
            facts.append(known[key])
            boundary = known[key].boundary
    return facts


def measure_loss(loss: Loss, outputs: Sequence[BoundaryTensor], targets: Tensors, autocast: Autocast) -> LayerFacts:
    """The task's loss as one more layer, behind the last. Meta tensors, because a loss may look where its input lies.

    Raises:
        CostError: the loss looks at values.
    """
    with torch.device("meta"):
        logits = [output.fake() for output in outputs]
        wanted = tuple(torch.empty_like(target, device="meta") for target in targets)

    def run(*values: Tensor) -> Tensor:
        return loss(values, wanted)[0]

    try:
        return _run_twice(run, logits, [], wanted, autocast)
    except Exception as error:
        raise CostError(
            f"the task's loss fails on tensors without values: {type(error).__name__}: {error}; it is planned as if it "
            "kept its logits twice"
        ) from error


@contextmanager
def kernels_of(kernels: str) -> Iterator[None]:
    """Which kernels are taken for granted.

    ``cpu``: torch's choice on a CPU. ``accelerator``: attention in one kernel that never keeps its t×s matrix, dropout
    masks of one byte. ``plain``: the latter, and attention as matrix products that keep it (2019, the paper's tables).
    """
    with ExitStack() as stack:
        if kernels != "cpu":
            stack.enter_context(_AcceleratorKernels(fused=kernels == "accelerator"))
        if kernels == "plain":
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield


class _AcceleratorKernels(TorchFunctionMode):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self._fused = fused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention and self._fused:
            return _attention(func, *args, **kwargs)
        return func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return input
    made: Tensor = torch.native_dropout(input, p, True)[0]
    return made


def _attention(func: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The same without dropout, which is no reason for an accelerator to keep the matrix."""
    options = dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
    return func(query, key, value, **{**options, "dropout_p": 0.0})


def _measure(
    builder: LayerBuilder, boundary: Sequence[BoundaryTensor], targets: Sequence[TensorShape], autocast: Autocast
) -> LayerFacts:
    fake = fake_mode()
    module = defer_batchnorm(build_without_memory(builder, fake)).train()
    auxiliary_loss = getattr(module, "auxiliary_loss", None)
    with fake:
        inputs = [tensor.fake() for tensor in boundary]
        wanted = tuple(shape.empty() for shape in targets)

    def run(*values: Tensor) -> Any:
        outputs = module(as_argument(values))
        return (outputs, auxiliary_loss(outputs, wanted)) if auxiliary_loss is not None else outputs

    given = ", ".join(str(tensor.shape) for tensor in boundary)
    try:
        with fake:
            return _run_twice(run, inputs, [module], wanted, autocast, auxiliary_loss is not None)
    except Exception as error:
        refuse_too_few_examples(error, f"layer {builder.name!r}, given {given}")
        raise CostError(
            f"layer {builder.name!r}, given {given}, cannot be planned on tensors without values: "
            f"{type(error).__name__}: {error}"
        ) from error


def _run_twice(
    run: Callable[..., Any],
    inputs: list[Tensor],
    modules: Sequence[nn.Module],
    others: Tensors,
    autocast: Autocast,
    has_loss: bool = False,
) -> LayerFacts:
    parameters = [(name, p) for module in modules for name, p in module.named_parameters()]
    buffers = [buffer for module in modules for buffer in module.buffers()]
    for _, parameter in parameters:  # as in every micro-batch but the first: gradients are added to what is there
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    grads = [p.grad for _, p in parameters if p.grad is not None]
    known = [*inputs, *(p for _, p in parameters), *buffers, *grads, *others]
    tracker, saved = Tracker(), Saved()
    tracker.ignore(known)
    with tracker:
        inference = _run_inference(tracker, run, inputs, autocast)
        gathered = _take_gathered(modules)
        tracker.begin()
        with saved.watch():
            outputs, losses = _run_forward(run, inputs, autocast, has_loss)
        forward = Phase(tuple(tracker.operations), tracker.peak)
        _take_gathered(modules)
        described = _describe(inputs, outputs)
        kept = _what_is_saved(saved, inputs, outputs, described, known)
        graph = kept[2] + sum({o.storage: o.bytes for o in described if o.of_input is None}.values())
        tracker.begin()
        _run_backward(outputs, losses)
        del outputs, losses
        backward = Phase(tuple(tracker.operations), tracker.peak)
        halves = _run_halves(tracker, *_run_forward(run, inputs, autocast, has_loss), inputs)
    return LayerFacts(
        parameters=tuple((name, TensorShape.of(p)) for name, p in parameters),
        frozen=frozenset(name for name, p in parameters if not p.requires_grad),
        buffer_bytes=sum(buffer.nbytes for buffer in buffers),
        averaged_buffer_bytes=_averaged_buffer_bytes(modules),
        inference=inference,
        forward=forward,
        backward=backward,
        backward_extra=max(0, backward.peak - graph),
        halves=halves,
        saves_inputs=kept[0],
        saves_outputs=kept[1],
        saves_inside=kept[2],
        gathered=gathered,
        outputs=described,
    )


def _averaged_buffer_bytes(modules: Sequence[nn.Module]) -> int:
    averaged = {id(tensor): tensor for module in modules for tensor in averaged_tensors(module).values()}
    return sum(tensor.nbytes for tensor in averaged.values() if not isinstance(tensor, nn.Parameter))


def _take_gathered(modules: Sequence[nn.Module]) -> int:
    """Bytes of the sums that BatchNorm has gathered in a run; the next one begins without."""
    batchnorms = [m for module in modules for m in module.modules() if isinstance(m, DeferredBatchNorm)]
    pooled = [batchnorm.take_pooled() for batchnorm in batchnorms]
    return sum(sums.nbytes for sums in pooled if sums is not None)


def _run_inference(tracker: Tracker, run: Callable[..., Any], inputs: Sequence[Tensor], autocast: Autocast) -> Phase:
    tracker.begin()
    with torch.no_grad(), autocast():
        run(*inputs)
    return Phase(tuple(tracker.operations), tracker.peak)


def _run_forward(
    run: Callable[..., Any], inputs: Sequence[Tensor], autocast: Autocast, has_loss: bool
) -> tuple[Tensors, Tensor | None]:
    """Outputs, and the auxiliary loss if ``run`` gives one."""
    with autocast(), torch.enable_grad():
        # As between the layers of a cell: not leaves, so that a layer may work in place on what autograd allows.
        made = run(*(value.view_as(value) for value in inputs))
    made, loss = made if has_loss else (made, None)
    return tuple(canonical(tensor) for tensor in as_tensors(made)), loss


def _run_backward(outputs: Tensors, loss: Tensor | None) -> None:
    roots = _roots(outputs, loss)
    if roots:
        torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])


def _run_halves(tracker: Tracker, outputs: Tensors, loss: Tensor | None, inputs: Sequence[Tensor]) -> Halves:
    roots = _roots(outputs, loss)
    if not roots:
        return Halves(False, 0, Phase((), 0), Phase((), 0))
    for tensor in inputs:
        tensor.grad = None
    tracker.begin()
    before = tracker.now
    left = backward_of_inputs(roots, [torch.empty_like(root) for root in roots], inputs)
    first = Phase(tuple(tracker.operations), tracker.peak - before)
    own = {storage_key(tensor.grad) for tensor in inputs if tensor.grad is not None}
    noted = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in left.noted}
    waits = len(left) > 0
    tracker.begin()
    before = tracker.now
    left.run()
    held = sum(size for key, size in noted.items() if key not in own)
    return Halves(waits, held, first, Phase(tuple(tracker.operations), tracker.peak - before))


def _roots(outputs: Tensors, loss: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in (*outputs, *([] if loss is None else [loss])) if tensor.requires_grad]


def _describe(inputs: Sequence[Tensor], outputs: Tensors) -> tuple[Output, ...]:
    of_inputs = {storage_key(tensor): number for number, tensor in reversed(list(enumerate(inputs)))}
    numbers: dict[int, int] = {}
    described = []
    for tensor in outputs:
        key = storage_key(tensor)
        storage = numbers.setdefault(key, len(numbers))
        shape = BoundaryTensor(TensorShape.of(tensor), tensor.requires_grad)
        described.append(Output(shape, of_inputs.get(key), storage, tensor.untyped_storage().nbytes()))
    return tuple(described)


def _what_is_saved(
    saved: Saved, inputs: Sequence[Tensor], outputs: Tensors, described: Sequence[Output], known: Sequence[Tensor]
) -> tuple[frozenset[int], frozenset[int], int]:
    """(inputs, output storages, other bytes) that the graph keeps; weights and the like are there anyway."""
    of_inputs = {number for number, tensor in enumerate(inputs) if storage_key(tensor) in saved.sizes}
    own = {o.storage: storage_key(t) for o, t in zip(described, outputs, strict=True) if o.of_input is None}
    of_outputs = {storage for storage, key in own.items() if key in saved.sizes}
    elsewhere = {storage_key(tensor) for tensor in known} | set(own.values())
    inside = sum(size for key, size in saved.sizes.items() if key not in elsewhere)
    return frozenset(of_inputs), frozenset(of_outputs), inside
