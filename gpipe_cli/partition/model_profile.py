"""Times layers, and the task's loss after the last one, as a cell runs them (pipeline.cost=profile), in seconds."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, fields
from itertools import starmap
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..cpu import waited_for_core
from ..gpus import GPU
from ..layers import LayerBuilder, announce
from ..micro_batch import Tensors
from ..pipeline.cell import BuiltLayer, Cell
from ..pipeline.halves import WeightHalf, backward_of_inputs
from ..pipeline.messages.boundary import canonical_gradient, grouped_like, grouping_of, is_channels_last
from ..pipeline.randomness import NoiseSource
from ..pipeline.step import Mark, event_now, seconds_between
from .cost import LayerTimes, cell_total
from .fake_layers import CostError, TensorShape, build_key, build_or_explain, explaining_failures

Autocast = Callable[[], AbstractContextManager[Any]]
Run = Callable[[Tensors, bool], tuple[Tensors, Tensors]]  # (inputs, False to recompute) -> (outputs, losses)
_REPEATS = 5  # timed rounds per layer, after one that warms up
_LEAST = 2  # fewest timed rounds, when time is short
_ENOUGH = 64 << 20  # bytes of weights and outputs, several times the size of a processor's caches
_LOSS = "loss"  # among the keys of layers


@dataclass(frozen=True)
class ModelProfile:
    """Holds the measured times of a model.

    Attributes:
        layers: times of each layer.
        loss: times of the task's loss after the last layer; None where it was not timed.
    """

    layers: list[LayerTimes]
    loss: LayerTimes | None

    @property
    def with_loss(self) -> list[LayerTimes]:
        """Returns the times of each layer; the last one's include the loss, which always runs in its cell."""
        *others, last = self.layers
        return [*others, cell_total([last], [] if self.loss is None else [self.loss])]


def profile_layers(
    builders: Sequence[LayerBuilder],
    example_inputs: Tensors,
    device: torch.device,
    autocast: Autocast = nullcontext,
    loss: Callable[[Tensors], Tensor] | None = None,
    targets: Tensors = (),
    boundary_type: torch.dtype | None = None,
    enough: float = math.inf,
) -> ModelProfile:
    """Times forward and backward of every layer, the median of some repeats; equal layers are timed once.

    Args:
        builders: the model.
        example_inputs: inputs of the first layer for one micro-batch: real tensors.
        device: device on which the layers run.
        autocast: returns the context in which forward runs.
        loss: loss of the last layer's outputs; None: it is not timed.
        targets: the micro-batch's targets, for layers with an ``auxiliary_loss``.
        boundary_type: type of floating-point tensors between two layers; None: as a layer returns them.
        enough: seconds after which no layer is timed again.

    Raises:
        CostError: a layer or the loss fails; the message names it, and for a layer the way out.
    """
    known: dict[Hashable, Tensors] = {}  # outputs of each layer that has run, by its key
    keys: list[Hashable] = []
    times: dict[Hashable, LayerTimes] = {}
    group, size, until = dict[Hashable, LayerTrial](), 0, time.perf_counter() + enough
    with torch.random.fork_rng(devices=[device] if device.type == GPU else []):
        values = tuple(tensor.to(device) for tensor in example_inputs)
        for index, builder in enumerate(builders):
            shapes = tuple(map(TensorShape.of, values))
            keys.append((build_key(builder, index), shapes, grouping_of(values)))
            if keys[-1] not in known:
                announce([builder])
                module = deepcopy(build_or_explain(builder)).to(device)  # the run has this one, if builders share it
                passed_as = boundary_type if index < len(builders) - 1 else None
                layer = BuiltLayer(index, builder.name, module, passed_as)
                trial = LayerTrial(_run_of(layer, device, targets), values, device, autocast)
                with explaining_failures(builder, shapes):
                    outputs = trial.outputs()
                known[keys[-1]] = outputs
                if size >= _ENOUGH:
                    times |= _timed(group, device, size, until)
                    group, size = {}, 0
                group[keys[-1]] = trial
                size += sum(tensor.nbytes for tensor in (*module.parameters(), *outputs))
            values = known[keys[-1]]
        if loss is not None:
            group[_LOSS] = LayerTrial(lambda values, _: ((loss(values),), ()), values, device, autocast)
            try:
                group[_LOSS].outputs()
            except Exception as error:
                raise CostError(f"the task's loss fails while it is timed: {type(error).__name__}: {error}") from error
        times |= _timed(group, device, size, until)
    return ModelProfile([times[key] for key in keys], times.get(_LOSS))


def _run_of(layer: BuiltLayer, device: torch.device, targets: Tensors) -> Run:
    """Returns a function that runs a layer as a cell of its own.

    Args:
        targets: targets for the layer's ``auxiliary_loss``, if it has one.
    """
    cell = Cell(0, [layer], NoiseSource(0, 0, device))

    def run(values: Tensors, first_time: bool) -> tuple[Tensors, Tensors]:
        with cell.weights_cast(device):
            outputs, losses = cell.run_training(values, targets, 0, 0, None, first_time)
        return outputs, tuple(losses.values())

    return run


class LayerTrial:
    """Runs and times one layer as a cell of its own.

    Args:
        run: returns outputs and losses for inputs; its second argument is False when it recomputes.
        inputs: tensors of one micro-batch; a gradient is computed for those that need one.
        device: device on which it runs.
        autocast: returns the context in which forward runs.
    """

    def __init__(self, run: Run, inputs: Tensors, device: torch.device, autocast: Autocast = nullcontext) -> None:
        self._run, self._inputs, self._device, self._autocast = run, inputs, device, autocast
        self._kept: list[tuple[list[Tensor], Tensors, Tensors]] = []  # leaves, outputs and losses of each graph
        self._put_off: deque[WeightHalf] = deque()
        self._marks: dict[str, list[tuple[Mark, Mark]]] = defaultdict(list)  # begin and end of each run of a phase

    def outputs(self) -> Tensors:
        """Runs once, as a warm-up, and returns the outputs as leaves, which are the next layer's inputs."""
        self.forward()
        kept = self._kept[-1][1]
        made = grouped_like((tensor.detach().requires_grad_(tensor.requires_grad) for tensor in kept), kept)
        self.backward()
        return made

    def infer(self) -> None:
        """Runs forward without a graph."""
        with torch.no_grad(), self._timed("inference"), self._autocast():
            self._run(self._inputs, True)

    def forward(self, phase: str = "forward") -> None:
        """Runs forward with a graph, which is kept.

        Args:
            phase: name of the time; "recompute" runs the forward as a recompute.
        """
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self._inputs]
        with self._timed(phase), self._autocast():
            outputs, losses = self._run(grouped_like(leaves, self._inputs), phase == "forward")
        self._kept.append((leaves, outputs, losses))

    def backward(self, first_half: bool = False) -> None:
        """Runs backward of the latest graph, whole or only its first half, and forgets the graph."""
        leaves, outputs, losses = self._kept.pop()
        roots = [tensor for tensor in outputs + losses if tensor.requires_grad]
        gradients = [torch.ones_like(root) for root in roots]
        with self._timed("input_gradient" if first_half else "backward"):
            if first_half:
                self._put_off.append(backward_of_inputs(roots, gradients, leaves) if roots else WeightHalf(()))
            elif roots:
                torch.autograd.backward(roots, gradients)
            for leaf in leaves:
                if leaf.grad is not None:  # in the layout in which it is sent
                    canonical_gradient(leaf.grad, is_channels_last(leaf))

    def weight_gradient(self) -> None:
        """Runs the oldest second half of a backward that is still to run."""
        with self._timed("weight_gradient"):
            self._put_off.popleft().run()

    def drop_graphs(self) -> None:
        """Frees all graphs that are kept."""
        self._kept.clear()

    def forget(self) -> None:
        """Discards the times so far."""
        self._marks.clear()

    def times(self) -> LayerTimes:
        """Returns the median seconds of each phase."""
        if self._device.type == GPU:
            torch.cuda.synchronize(self._device)
        return LayerTimes(*(median(starmap(seconds_between, self._marks[phase.name])) for phase in fields(LayerTimes)))

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Measures the seconds of a run, without those in which other processes of a busy machine had the core.

        On a GPU, events record when work begins and ends, and are read at the end. To wait for the GPU around each
        layer would add the wait's own time to every small layer, and would empty queues that are full in a run.
        """
        if self._device.type == GPU:
            begin = event_now(self._device)
            yield
            self._marks[phase].append((begin, event_now(self._device)))
        else:
            waited, start = waited_for_core(), time.perf_counter()
            yield
            end = time.perf_counter()
            self._marks[phase].append((start, max(start, end - (waited_for_core() - waited))))


def _timed(
    group: Mapping[Hashable, LayerTrial], device: torch.device, size: int, until: float
) -> dict[Hashable, LayerTimes]:
    """Times layers one after the other as in a cell, so that the processor's caches hold other layers' data.

    A group is as small as that allows, because the weights of all its layers exist at the same time.

    Args:
        group: layers by their keys.
        size: bytes of their weights and outputs.
        until: moment after which no layer is timed again.
    """
    trials = list(group.values())
    # Two graphs at the same time, as with several micro-batches: small memory that is reused at once would be faster
    # than memory that the allocator takes anew. It always gives back large memory, and always keeps a GPU's.
    whole, halved = (1, 0) if device.type == GPU or size >= _ENOUGH else (2, 2)
    for repeat in range(1 + _REPEATS):
        if repeat > _LEAST and time.perf_counter() > until:
            break
        for trial in trials:
            trial.infer()
        for trial in trials:  # one graph at a time, as with re-materialization
            trial.forward("recompute")
        if not halved:
            _backward_in_halves(trials)
        for trial in trials:
            trial.drop_graphs()
        for trial in trials * (whole + halved):
            trial.forward()
        for trial in trials[::-1] * whole:
            trial.backward()
        _backward_in_halves(trials * halved)
        if repeat == 0:
            for trial in trials:
                trial.forget()
    return {key: trial.times() for key, trial in group.items()}


def _backward_in_halves(trials: Sequence[LayerTrial]) -> None:
    """Runs the backward of a graph of each; as in a schedule, others' memory is used between its two halves."""
    for trial in reversed(trials):
        trial.backward(first_half=True)
    for trial in reversed(trials):
        trial.weight_gradient()
