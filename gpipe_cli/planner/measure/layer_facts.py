"""Finds the operations and kept tensors of one layer for one micro-batch, on fake tensors: its weights never exist.

A layer runs forward and backward with shapes instead of values. Equal layers with equal inputs run once, so a model of
thousands of layers takes as long as one of each kind. Kernels are those that torch chooses on a CPU, except for two
that accelerators do in another way: attention in one kernel also with dropout, and dropout masks of one byte for each
element (see `kernels_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...layers import LayerBuilder
from ...micro_batch import Loss, MicroBatch, Tensors
from ...optim.average import averaged_tensors
from ...partition.fake_layers import CostError, TensorShape, draw
from ...partition.survey import Survey, survey
from ...pipeline.batchnorm import DeferredBatchNorm, defer_batchnorm
from ...pipeline.halves import backward_of_inputs
from ...pipeline.messages.boundary import canonical, passed_on
from ...pipeline.messages.grouping import as_argument, as_tensors, grouped_like
from ...pipeline.weight_casts import WeightCasts
from .tracking import Operation, Tracker, noting_saved, storage_key

Autocast = Callable[[], AbstractContextManager[Any]]
Run = Callable[..., tuple[Tensors, Tensor | None]]  # inputs to outputs, and the auxiliary loss of a layer that has one


@dataclass(frozen=True)
class LayerPass:
    """Describes the forward, the backward or half a backward of one layer.

    Attributes:
        operations: its operations, in order.
        peak: the most bytes alive at any moment; of half a backward without those that were alive before it.
    """

    operations: tuple[Operation, ...]
    peak: int


@dataclass(frozen=True)
class BackwardHalves:
    """Describes a backward in two halves (`pipeline/halves.py`).

    Attributes:
        waits: True where gradients of weights are left to the second half.
        noted: bytes of gradients that the first half keeps for the second, without those of the inputs.
        first, second: the halves.
    """

    waits: bool
    noted: int
    first: LayerPass
    second: LayerPass


class OutputMemory(NamedTuple):
    """Describes where the memory of a layer's output is.

    Attributes:
        of_input: number of the input whose memory it shares; None where it has its own.
        storage: number of its storage among the layer's outputs.
        bytes: size of that storage.
    """

    of_input: int | None
    storage: int
    bytes: int


@dataclass(frozen=True, eq=False)
class LayerFacts:
    """Describes one layer's operations, times and bytes, for one micro-batch of known shapes.

    Equal layers of a model share one object, so facts are compared by identity.

    Attributes:
        buffer_bytes: bytes of its buffers, such as BatchNorm's moving averages.
        averaged_buffer_bytes: bytes of the buffers that `trainer.average` averages with the weights.
        inference: forward without a graph.
        forward: forward with a graph.
        backward: backward as a whole.
        backward_extra: most bytes alive in backward beyond what forward has kept.
        halves: the same backward in two halves.
        saves_inputs: numbers of the inputs that the graph keeps.
        saves_outputs: numbers of the output storages that the graph keeps.
        saves_inside: bytes of everything else that the graph keeps, without weights.
        gathered: bytes of BatchNorm's statistics, kept until the mini-batch has ended.
        casts: bytes of weights cast for autocast, kept as long, once for all micro-batches.
        outputs: what the next layer gets.
        memory: place of each output's memory.
        batchnorm: True if it normalises over the examples of a micro-batch.
    """

    buffer_bytes: int
    averaged_buffer_bytes: int
    inference: LayerPass
    forward: LayerPass
    backward: LayerPass
    backward_extra: int
    halves: BackwardHalves
    saves_inputs: frozenset[int]
    saves_outputs: frozenset[int]
    saves_inside: int
    gathered: int
    casts: int
    outputs: tuple[TensorShape, ...]
    memory: tuple[OutputMemory, ...]
    batchnorm: bool


@dataclass(frozen=True)
class ModelFacts(Survey[LayerFacts]):
    """Describes a whole model for one size of micro-batch; none of it depends on the cut.

    Attributes:
        loss: facts of the task's loss; None where it could not be measured: it is left out.
        inputs: inputs of the first layer.
        target_bytes: bytes of each target of a micro-batch.
        notes: assumptions, for the plan.
    """

    loss: LayerFacts | None = None
    inputs: tuple[TensorShape, ...] = ()
    target_bytes: Sequence[int] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def with_loss(self) -> list[LayerFacts]:
        """Returns the facts of the layers, followed by those of the loss."""
        return self.layers if self.loss is None else [*self.layers, self.loss]


def measure_model(
    builders: Sequence[LayerBuilder],
    loss: Loss,
    example: MicroBatch,
    autocast: Autocast,
    boundary_type: torch.dtype | None,
    kernels: str,
) -> ModelFacts:
    """Returns the facts of layers and loss; `Survey.failure` where a layer runs neither on fake nor on random values.

    Args:
        builders: the model.
        loss: the task's loss.
        example: a micro-batch; only its shapes matter, so it may have meta tensors.
        autocast: makes the context in which forward runs.
        boundary_type: type of floating-point tensors between two layers; None: as a layer returns them.
        kernels: see `kernels_of`.
    """
    inputs, targets = example
    target_shapes = [TensorShape.of(tensor) for tensor in targets]

    def measure(module: nn.Module, inputs: Tensors, *, is_last: bool) -> LayerFacts:
        return _measure_module(module, inputs, draw(target_shapes)[0], autocast, None if is_last else boundary_type)

    with kernels_of(kernels):
        layers = survey(builders, inputs, measure)
    of_loss, notes = None, []
    if layers.failure is None:
        try:
            of_loss = _measure_loss(loss, layers.layers[-1].outputs, targets, autocast)
        except CostError as error:
            notes.append(str(error))
    first, target_bytes = tuple(map(TensorShape.of, inputs)), [shape.bytes for shape in target_shapes]
    return ModelFacts(**vars(layers), loss=of_loss, inputs=first, target_bytes=target_bytes, notes=notes)


def _measure_loss(loss: Loss, outputs: Sequence[TensorShape], targets: Tensors, autocast: Autocast) -> LayerFacts:
    """Returns the facts of the task's loss, as of one more layer behind the last.

    It runs on meta tensors, because a loss may look at the device of its input.

    Raises:
        CostError: the loss looks at values.
    """
    with torch.device("meta"):
        logits = [output.empty() for output in outputs]
        wanted = tuple(torch.empty_like(target, device="meta") for target in targets)
    try:
        return _measure(lambda *values: ((loss(values, wanted)[0],), None), logits, nn.Module(), wanted, autocast)
    except Exception as error:
        raise CostError(
            f"the task's loss fails on tensors without values: {type(error).__name__}: {error}; it is planned as if it "
            "kept its logits twice"
        ) from error


def kernels_of(kernels: str) -> AbstractContextManager[Any]:
    """Returns the context in which layers run with other kernels.

    Args:
        kernels: ``cpu``: torch's choice on a CPU. ``accelerator``: attention in one kernel that never keeps its t×s
            matrix, dropout masks of one byte.
    """
    return nullcontext() if kernels == "cpu" else _AcceleratorKernels()


class _AcceleratorKernels(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _attention(func, *args, **kwargs)
        return func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return input
    dropped: Tensor = torch.native_dropout(input, p, True)[0]
    return dropped


def _attention(func: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Calls attention without dropout, which makes a CPU keep the t×s matrix, but not an accelerator."""
    options = dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
    return func(query, key, value, **{**options, "dropout_p": 0.0})


def _measure_module(
    plain: nn.Module, inputs: Tensors, targets: Tensors, autocast: Autocast, boundary_type: torch.dtype | None
) -> LayerFacts:
    module = defer_batchnorm(plain).train()
    auxiliary_loss = getattr(module, "auxiliary_loss", None)

    def run(*values: Tensor) -> tuple[Tensors, Tensor | None]:
        outputs = module(as_argument(grouped_like(values, inputs)))
        loss = None if auxiliary_loss is None else auxiliary_loss(outputs, targets)
        return passed_on(as_tensors(outputs), values, boundary_type), loss

    return _measure(run, list(inputs), module, targets, autocast)


def _measure(run: Run, inputs: list[Tensor], module: nn.Module, others: Tensors, autocast: Autocast) -> LayerFacts:
    """Measures a forward without a graph, one with a graph and its backward, and a backward in halves."""
    parameters, buffers = list(module.parameters()), list(module.buffers())
    averaged = {*averaged_tensors(module).values()}  # each once, under whatever names
    for parameter in parameters:  # as in every micro-batch but the first: gradients are added to what is there
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    grads = [p.grad for p in parameters if p.grad is not None]
    casts = _cast_weights(run, inputs, module, autocast)
    known = [*inputs, *parameters, *buffers, *grads, *others, *casts.held]
    tracker, saved = Tracker(), dict[int, int]()
    tracker.ignore(known)
    with tracker, casts.in_place():
        tracker.begin()
        with torch.no_grad(), autocast():
            run(*inputs)
        inference = LayerPass(tuple(tracker.operations), tracker.peak)
        gathered = _take_gathered(module)
        tracker.begin()
        with noting_saved(saved):
            outputs, loss = _run_forward(run, inputs, autocast)
        forward = LayerPass(tuple(tracker.operations), tracker.peak)
        _take_gathered(module)
        memory, shapes = _memory_of(inputs, outputs), grouped_like(map(TensorShape.of, outputs), outputs)
        saves_inputs, saves_outputs, saves_inside = _what_is_saved(saved, inputs, outputs, memory, known)
        graph = saves_inside + sum({one.storage: one.bytes for one in memory if one.of_input is None}.values())
        tracker.begin()
        if roots := _roots(outputs, loss):
            torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
        del outputs, loss, roots
        backward = LayerPass(tuple(tracker.operations), tracker.peak)
        halves = _run_halves(tracker, _roots(*_run_forward(run, inputs, autocast)), inputs)
    return LayerFacts(
        buffer_bytes=sum(buffer.nbytes for buffer in buffers),
        averaged_buffer_bytes=sum(each.nbytes for each in averaged if not isinstance(each, nn.Parameter)),
        inference=inference,
        forward=forward,
        backward=backward,
        backward_extra=max(0, backward.peak - graph),
        halves=halves,
        saves_inputs=saves_inputs,
        saves_outputs=saves_outputs,
        saves_inside=saves_inside,
        gathered=gathered,
        casts=sum(cast.nbytes for cast in casts.held),
        outputs=shapes,
        memory=memory,
        batchnorm=any(isinstance(part, DeferredBatchNorm) for part in module.modules()),
    )


def _cast_weights(run: Run, inputs: Sequence[Tensor], module: nn.Module, autocast: Autocast) -> WeightCasts:
    """Returns the casts of a step, made behind its first run."""
    casts = WeightCasts([module])
    with torch.no_grad(), autocast():
        if torch.is_autocast_enabled("cpu"):
            with casts.used_on(torch.device("cpu")):
                run(*inputs)
            _take_gathered(module)
    return casts


def _take_gathered(module: nn.Module) -> int:
    """Takes the statistics that BatchNorm has gathered in a run; returns their bytes."""
    norms = [layer for layer in module.modules() if isinstance(layer, DeferredBatchNorm)]
    return sum(statistics.nbytes for norm in norms for statistics in norm.take_gathered())


def _run_forward(run: Run, inputs: Sequence[Tensor], autocast: Autocast) -> tuple[Tensors, Tensor | None]:
    with autocast(), torch.enable_grad():
        # As between the layers of a cell: not leaves, so that a layer may work in place on what autograd allows.
        tensors, loss = run(*(value.view_as(value) for value in inputs))
    return grouped_like(map(canonical, tensors), tensors), loss


def _run_halves(tracker: Tracker, roots: list[Tensor], inputs: Sequence[Tensor]) -> BackwardHalves:
    if not roots:
        return BackwardHalves(False, 0, LayerPass((), 0), LayerPass((), 0))
    for tensor in inputs:
        tensor.grad = None
    tracker.begin()
    before = tracker.now
    left = backward_of_inputs(roots, [torch.empty_like(root) for root in roots], inputs)
    first = LayerPass(tuple(tracker.operations), tracker.peak - before)
    own = {storage_key(tensor.grad) for tensor in inputs if tensor.grad is not None}
    noted = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in left.noted}
    waits = len(left) > 0
    tracker.begin()
    before = tracker.now
    left.run()
    second = LayerPass(tuple(tracker.operations), tracker.peak - before)
    return BackwardHalves(waits, sum(size for key, size in noted.items() if key not in own), first, second)


def _roots(outputs: Tensors, loss: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in (*outputs, *([] if loss is None else [loss])) if tensor.requires_grad]


def _memory_of(inputs: Sequence[Tensor], outputs: Tensors) -> tuple[OutputMemory, ...]:
    of_inputs = {storage_key(tensor): number for number, tensor in reversed(list(enumerate(inputs)))}
    numbers: dict[int, int] = {}
    found = []
    for tensor in outputs:
        key = storage_key(tensor)
        storage = numbers.setdefault(key, len(numbers))
        found.append(OutputMemory(of_inputs.get(key), storage, tensor.untyped_storage().nbytes()))
    return tuple(found)


def _what_is_saved(
    saved: dict[int, int],
    inputs: Sequence[Tensor],
    outputs: Tensors,
    memory: Sequence[OutputMemory],
    known: Sequence[Tensor],
) -> tuple[frozenset[int], frozenset[int], int]:
    """Returns (inputs, output storages, other bytes) that the graph keeps; ``known`` is in memory anyway."""
    of_inputs = {number for number, tensor in enumerate(inputs) if storage_key(tensor) in saved}
    own = {one.storage: storage_key(t) for one, t in zip(memory, outputs, strict=True) if one.of_input is None}
    of_outputs = {storage for storage, key in own.items() if key in saved}
    elsewhere = {storage_key(tensor) for tensor in known} | set(own.values())
    inside = sum(size for key, size in saved.items() if key not in elsewhere)
    return frozenset(of_inputs), frozenset(of_outputs), inside
