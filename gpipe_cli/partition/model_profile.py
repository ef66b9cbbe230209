"""Times layers, and the task's loss after the last one, as a cell runs them (pipeline.cost=profile), in seconds."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, fields
from itertools import starmap
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..gpus import GPU
from ..layers import LayerBuilder, announce
from ..micro_batch import Tensors
from ..pipeline.cell import BuiltLayer, Cell
from ..pipeline.halves import WeightHalf, backward_of_inputs
from ..pipeline.messages.boundary import canonical_gradient, grouped_like, grouping_of, is_channels_last
from ..pipeline.randomness import NoiseSource
from ..pipeline.step import Mark, event_now, seconds_between
from .cost import LayerTimes
from .fake_layers import CostError, TensorShape, build_key, build_or_explain, explaining_failures

Autocast = Callable[[], AbstractContextManager[Any]]
Run = Callable[[Tensors, bool], tuple[Tensors, Tensors]]  # (inputs, False to recompute) -> (outputs, losses)
_REPEATS = 5  # timed rounds per layer, after one that warms up
_LEAST = 2  # fewest timed rounds, when time is short
_SECONDS = 0.5  # after which no layer is timed again
_GROUP_BYTES = 64 << 20  # of weights and outputs, several times the size of a processor's caches
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


def profile_layers(
    builders: Sequence[LayerBuilder],
    example_inputs: Tensors,
    device: torch.device,
    autocast: Autocast = nullcontext,
    loss: Callable[[Tensors], Tensor] | None = None,
    targets: Tensors = (),
    boundary_type: torch.dtype | None = None,
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

    Raises:
        CostError: a layer or the loss fails; the message names it, and for a layer the way out.
    """
    known: dict[Hashable, Tensors] = {}  # outputs of each layer that has run, by its key
    keys: list[Hashable] = []
    times: dict[Hashable, LayerTimes] = {}
    group, size, until = dict[Hashable, LayerTrial](), 0, time.perf_counter() + _SECONDS
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
                if size >= _GROUP_BYTES:
                    times |= _timed(group, until)
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
        times |= _timed(group, until)
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
        self._graph: tuple[list[Tensor], Tensors, Tensors] = [], (), ()  # leaves, outputs and losses
        self._put_off = WeightHalf(())
        self._marks: dict[str, list[tuple[Mark, Mark]]] = defaultdict(list)  # begin and end of each run of a phase

    def outputs(self) -> Tensors:
        """Runs once, as a warm-up, and returns the outputs as leaves, which are the next layer's inputs."""
        self.forward()
        _, outputs, _ = self._graph
        self.backward()
        return grouped_like((tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outputs), outputs)

    def infer(self) -> None:
        """Runs forward without a graph."""
        with torch.no_grad(), self._timed("inference"), self._autocast():
            self._run(self._inputs, True)

    def forward(self, phase: str = "forward") -> None:
        """Runs forward with a graph, which is kept until the backward.

        Args:
            phase: name of the time; "recompute" runs the forward as a recompute.
        """
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self._inputs]
        with self._timed(phase), self._autocast():
            outputs, losses = self._run(grouped_like(leaves, self._inputs), phase == "forward")
        self._graph = leaves, outputs, losses

    def backward(self, first_half: bool = False) -> None:
        """Runs backward of the graph, whole or only its first half, and forgets the graph."""
        (leaves, outputs, losses), self._graph = self._graph, ([], (), ())
        roots = [tensor for tensor in outputs + losses if tensor.requires_grad]
        gradients = [torch.ones_like(root) for root in roots]
        with self._timed("input_gradient" if first_half else "backward"):
            if first_half:
                self._put_off = backward_of_inputs(roots, gradients, leaves) if roots else WeightHalf(())
            elif roots:
                torch.autograd.backward(roots, gradients)
            for leaf in leaves:
                if leaf.grad is not None:  # in the layout in which it is sent
                    canonical_gradient(leaf.grad, is_channels_last(leaf))

    def weight_gradient(self) -> None:
        """Runs the second half of the backward whose first half has run."""
        with self._timed("weight_gradient"):
            self._put_off.run()

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
        """Notes when a run begins and ends.

        On a CPU by this thread's processor time, in which no other process of a busy machine had the core. On a GPU,
        events record it, and are read at the end. To wait for the GPU around each layer would add the wait's own time
        to every small layer, and would empty queues that are full in a run.
        """
        begin = self._now()
        yield
        self._marks[phase].append((begin, self._now()))

    def _now(self) -> Mark:
        """Returns a mark of this moment in the device's work."""
        return event_now(self._device) if self._device.type == GPU else time.thread_time()


def _timed(group: Mapping[Hashable, LayerTrial], until: float) -> dict[Hashable, LayerTimes]:
    """Times layers one after the other as in a cell, so that the processor's caches hold other layers' data.

    A group is as small as that allows, because the weights of all its layers exist at the same time.

    Args:
        group: layers by their keys.
        until: moment, by the clock of `time.perf_counter`, after which no layer is timed again.
    """
    trials = list(group.values())
    for repeat in range(1 + _REPEATS):
        if repeat > _LEAST and time.perf_counter() > until:
            break
        for trial in trials:
            trial.infer()
        for trial in trials:
            trial.forward("recompute")
        for trial in reversed(trials):
            trial.backward(first_half=True)
        for trial in reversed(trials):
            trial.weight_gradient()
        for trial in trials:
            trial.forward()
        for trial in reversed(trials):
            trial.backward()
        if repeat == 0:
            for trial in trials:
                trial.forget()
    return {key: trial.times() for key, trial in group.items()}
