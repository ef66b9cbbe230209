"""Finds the operations and kept tensors of one layer for one micro-batch, on fake tensors: its weights never exist.

A layer runs forward and backward with shapes instead of values. Equal layers with equal inputs run once, so a model of
thousands of layers takes as long as one of each kind. Kernels are those that torch chooses on a CPU, except for two
that accelerators do in another way: attention in one kernel also with dropout, and dropout masks of one byte for each
element (`_AcceleratorKernels`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...config import PrecisionConfig
from ...factory.build import boundary_type_of, build_autocast
from ...layers import LayerBuilder
from ...micro_batch import Loss, MicroBatch, Tensors
from ...optim.average import averaged_tensors
from ...partition.cost import LayerTimes
from ...partition.fake_layers import TensorShape, draw
from ...partition.survey import ForwardFacts, Survey, survey
from ...partition.tracking import Operation, Tracker, noting_saved, storage_key
from ...pipeline.batchnorm import DeferredBatchNorm, defer_batchnorm
from ...pipeline.halves import WeightHalf, backward_of_inputs
from ...pipeline.messages.boundary import as_argument, as_tensors, canonical, grouped_like, passed_on
from ...pipeline.weight_casts import WeightCasts

Autocast = Callable[[], AbstractContextManager[Any]]
Run = Callable[..., tuple[Tensors, Tensors]]  # inputs to outputs, and the auxiliary loss of a layer that has one


@dataclass(frozen=True, eq=False)
class LayerFacts(ForwardFacts):
    """Describes a layer's operations and bytes, for one micro-batch of known shapes.

    A storage is the memory that one or more tensors share. Those of the inputs are numbered first, then those that only
    outputs have.

    Attributes:
        buffer_bytes: bytes of its buffers, such as BatchNorm's moving averages.
        averaged_buffer_bytes: bytes of the buffers that `trainer.average` averages with the weights.
        operations: operations of each pass, in order; passes have the names of `LayerTimes`.
        peaks: most bytes alive in each pass, without those that were alive before a backward or one of its halves.
        noted: bytes of gradients that the first half of a backward keeps for the second, without those of the inputs.
        output_storages: number of the storage of each output.
        new_storages: bytes of each storage that no input has.
        saved_storages: numbers of the storages that the graph keeps.
        saved_inside: bytes of everything else that the graph keeps, without weights.
        gathered: bytes of BatchNorm's statistics, kept until the mini-batch has ended.
        casts: bytes of weights cast for autocast, once for all micro-batches of a mini-batch.
    """

    buffer_bytes: int
    averaged_buffer_bytes: int
    operations: Mapping[str, Sequence[Operation]]
    peaks: Mapping[str, int]
    noted: int
    output_storages: tuple[int, ...]
    new_storages: tuple[int, ...]
    saved_storages: frozenset[int]
    saved_inside: int
    gathered: int
    casts: int


@dataclass(frozen=True)
class ModelFacts(Survey[LayerFacts]):
    """Describes a whole model for one size of micro-batch; none of it depends on the cut.

    Attributes:
        loss: facts of the task's loss; None where it could not be measured: it is left out.
        inputs: inputs of the first layer.
        target_bytes: bytes of each target of a micro-batch.
        notes: assumptions, for the plan.
        times: times of each layer by which the model is cut, in any unit.
        examples: number of examples in the mini-batch.
    """

    loss: LayerFacts | None = None
    inputs: tuple[TensorShape, ...] = ()
    target_bytes: Sequence[int] = ()
    notes: list[str] = field(default_factory=list)
    times: Sequence[LayerTimes] = ()
    examples: int = 0

    @property
    def with_loss(self) -> list[LayerFacts]:
        """Returns the facts of the layers, followed by those of the loss."""
        return self.layers if self.loss is None else [*self.layers, self.loss]


def measure_model(
    builders: Sequence[LayerBuilder],
    loss: Loss,
    example: MicroBatch,
    precision: PrecisionConfig,
    kernels: str,
) -> ModelFacts:
    """Returns the facts of layers and loss; `Survey.failure` where a layer runs neither on fake nor on random values.

    Args:
        builders: the model.
        loss: the task's loss.
        example: a micro-batch; only its shapes matter, so it may have meta tensors.
        precision: number types of forwards and boundaries.
        kernels: ``cpu`` or ``accelerator``, as `_AcceleratorKernels` has them.
    """
    autocast, boundary_type = build_autocast(precision, torch.device("cpu")), boundary_type_of(precision)
    inputs, targets = example
    target_shapes = [TensorShape.of(tensor) for tensor in targets]

    def measure(plain: nn.Module, inputs: Tensors, *, is_last: bool) -> LayerFacts:
        module, drawn = defer_batchnorm(plain).train(), draw(target_shapes)[0]
        auxiliary_loss = getattr(module, "auxiliary_loss", None)

        def run(*values: Tensor) -> tuple[Tensors, Tensors]:
            outputs = module(as_argument(grouped_like(values, inputs)))
            losses = () if auxiliary_loss is None else (auxiliary_loss(outputs, drawn),)
            return passed_on(as_tensors(outputs), values, None if is_last else boundary_type), losses

        return _measure(run, list(inputs), module, drawn, autocast)

    with _AcceleratorKernels() if kernels == "accelerator" else nullcontext():
        layers = survey(builders, inputs, measure)
    of_loss, notes = None, []
    if layers.failure is None:
        try:
            of_loss = _measure_loss(loss, layers.layers[-1].outputs, targets, autocast)
        except Exception as error:  # it looks at values
            said = f"the task's loss fails on tensors without values: {type(error).__name__}: {error}"
            notes.append(f"{said}; the plan leaves it out")
    first, target_bytes = tuple(map(TensorShape.of, inputs)), [shape.bytes for shape in target_shapes]
    return ModelFacts(**vars(layers), loss=of_loss, inputs=first, target_bytes=target_bytes, notes=notes)


def _measure_loss(loss: Loss, outputs: Sequence[TensorShape], targets: Tensors, autocast: Autocast) -> LayerFacts:
    """Returns the facts of the task's loss, as of one more layer behind the last.

    It runs on meta tensors, because a loss may look at the device of its input.
    """
    with torch.device("meta"):
        logits = [output.empty() for output in outputs]
        wanted = tuple(torch.empty_like(target, device="meta") for target in targets)
    return _measure(lambda *values: ((loss(values, wanted)[0],), ()), logits, nn.Module(), wanted, autocast)


class _AcceleratorKernels(TorchFunctionMode):
    """Replaces two kernels by those of accelerators.

    Attention is one kernel that never keeps its t×s matrix, and dropout masks have one byte for each element.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _attention(func, *args, **kwargs)
        return func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Applies dropout with a mask of one byte for each element; the arguments are those of `F.dropout`."""
    if not training or p == 0:
        return input
    return torch.native_dropout(input, p, True)[0]


def _attention(func: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Calls attention without dropout, which makes a CPU keep the t×s matrix, but not an accelerator."""
    options = dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
    return func(query, key, value, **{**options, "dropout_p": 0.0})


def _measure(run: Run, inputs: list[Tensor], module: nn.Module, others: Tensors, autocast: Autocast) -> LayerFacts:
    """Measures a forward without a graph, one with a graph and its backward, and a backward in halves.

    Args:
        run: returns a layer's outputs and auxiliary loss for its inputs.
        module: the layer, for its parameters and buffers.
        others: further tensors that ``run`` uses and that do not count, as targets.
    """
    parameters, buffers = list(module.parameters()), list(module.buffers())
    for parameter in parameters:  # as in every micro-batch but the first: gradients are added to what is there
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    casts = _cast_weights(run, inputs, module, autocast)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    known = [*inputs, *parameters, *buffers, *gradients, *others, *casts.held]
    tracker, saved = Tracker(), dict[int, int]()
    tracker.ignore(known)
    operations, peaks = dict[str, Sequence[Operation]](), dict[str, int]()

    def note(name: str, before: int = 0) -> None:
        """Notes the operations of the pass that has just run, and its peak above ``before`` bytes."""
        operations[name], peaks[name] = tracker.operations, max(0, tracker.peak - before)
        tracker.begin()

    with tracker, casts.in_place():
        with torch.no_grad(), autocast():
            run(*inputs)
        note("inference")
        gathered = _take_gathered(module)
        with noting_saved(saved):
            outputs, roots = _run_forward(run, inputs, autocast)
        note("forward")
        _take_gathered(module)
        shapes = grouped_like(map(TensorShape.of, outputs), outputs)
        before = [storage_key(tensor) for tensor in inputs]
        new = {storage_key(one): one.untyped_storage().nbytes() for one in outputs if storage_key(one) not in before}
        storages = [*before, *new]
        places = tuple(storages.index(storage_key(output)) for output in outputs)
        saved_inside = sum(saved[key] for key in saved.keys() - {*storages, *map(storage_key, known)})
        if roots:
            torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
        note("backward", saved_inside + sum(new.values()))
        del outputs, roots
        _, roots = _run_forward(run, inputs, autocast)
        noted = _run_halves(tracker, note, roots, inputs)
    averaged = {*averaged_tensors(module).values()}  # each once, under whatever names
    return LayerFacts(
        flops=sum(operation.flops for operation in operations["inference"]),
        outputs=shapes,
        buffer_bytes=sum(buffer.nbytes for buffer in buffers),
        averaged_buffer_bytes=sum(buffer.nbytes for buffer in averaged - {*parameters}),
        operations={**operations, "recompute": operations["forward"]},
        peaks=peaks,
        noted=noted,
        output_storages=places,
        new_storages=tuple(new.values()),
        saved_storages=frozenset(number for number, key in enumerate(storages) if key in saved),
        saved_inside=saved_inside,
        gathered=gathered,
        casts=sum(cast.nbytes for cast in casts.held),
    )


def _cast_weights(run: Run, inputs: Sequence[Tensor], module: nn.Module, autocast: Autocast) -> WeightCasts:
    """Finds the weights that autocast casts once in a step, by a first run, which is not measured.

    In a training step, too, the first micro-batch shows which these are; measured is one of the later micro-batches.
    """
    casts = WeightCasts([module])
    with torch.no_grad(), autocast():
        if torch.is_autocast_enabled("cpu"):
            with casts.used():
                run(*inputs)
            _take_gathered(module)  # BatchNorm's statistics of this run do not count
    return casts


def _take_gathered(module: nn.Module) -> int:
    """Takes the statistics that BatchNorm has gathered in a run; returns their bytes."""
    norms = [layer for layer in module.modules() if isinstance(layer, DeferredBatchNorm)]
    return sum(statistics.nbytes for norm in norms for statistics in norm.take_gathered())


def _run_forward(run: Run, inputs: Sequence[Tensor], autocast: Autocast) -> tuple[Tensors, list[Tensor]]:
    """Returns the outputs of a forward, and the tensors from which its backward begins."""
    with autocast(), torch.enable_grad():
        # As between the layers of a cell: not leaves, so that a layer may work in place on what autograd allows.
        tensors, losses = run(*(value.view_as(value) for value in inputs))
    outputs = grouped_like(map(canonical, tensors), tensors)
    return outputs, [tensor for tensor in (*outputs, *losses) if tensor.requires_grad]


def _run_halves(
    tracker: Tracker, note: Callable[[str, int], None], roots: list[Tensor], inputs: Sequence[Tensor]
) -> int:
    """Runs a backward in two halves (`pipeline/halves.py`); returns the bytes that the first keeps for the second."""
    for tensor in inputs:
        tensor.grad = None
    tracker.begin()
    before = tracker.now
    left = backward_of_inputs(roots, [torch.empty_like(root) for root in roots], inputs) if roots else WeightHalf(())
    note("input_gradient", before)
    own = {storage_key(tensor.grad) for tensor in inputs if tensor.grad is not None}
    noted = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in left.noted}
    before = tracker.now
    left.run()
    note("weight_gradient", before)
    return sum(size for key, size in noted.items() if key not in own)
