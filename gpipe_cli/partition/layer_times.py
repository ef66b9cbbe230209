"""Times layers, and the task's loss after the last one, in seconds; they run as a cell runs them."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..cpu import waited_for_core
from ..micro_batch import Tensors
from ..pipeline.cell import BuiltLayer, Cell
from ..pipeline.halves import backward_of_inputs
from ..pipeline.messages.boundary import canonical_gradient, is_channels_last
from ..pipeline.messages.grouping import grouped_like
from ..pipeline.meter import event_now
from ..pipeline.randomness import NoiseSource

Autocast = Callable[[], AbstractContextManager[Any]]
_REPEATS = 5  # timed rounds per layer, after one that warms up
_LEAST = 2  # of them
_ENOUGH = 64 << 20  # bytes of weights and outputs, several times the size of a processor's caches
# Graphs kept at the same time, as with several micro-batches: small memory that is reused at once would be faster than
# memory that the allocator takes anew. It always gives back large memory, and always keeps a GPU's.
_IN_FLIGHT = 4


@dataclass(frozen=True)
class LayerTimes:
    """Holds the seconds of one layer, or of several together, for one micro-batch.

    Attributes:
        inference: forward without a graph.
        forward: forward with a graph.
        recompute: forward with a graph for the second time, in which BatchNorm gathers nothing.
        backward: as a whole.
        input_gradient, weight_gradient: its halves (`pipeline/halves.py`); together they take longer than the whole.
    """

    inference: float
    forward: float
    recompute: float
    backward: float
    input_gradient: float
    weight_gradient: float

    @property
    def total(self) -> float:
        """Returns the seconds of a forward with a graph and its backward."""
        return self.forward + self.backward

    def slower(self, factor: float) -> LayerTimes:
        """Returns all times multiplied by ``factor``."""
        return LayerTimes(*(getattr(self, phase.name) * factor for phase in fields(LayerTimes)))


def total_times(times: Sequence[LayerTimes]) -> LayerTimes:
    """Returns the times of layers that run one after the other."""
    return LayerTimes(*(sum(getattr(each, phase.name) for each in times) for phase in fields(LayerTimes)))


def cell_total(layers: Sequence[LayerTimes], loss: Sequence[LayerTimes]) -> LayerTimes:
    """Returns the times of a cell: of its layers and, in the last cell, the loss, which inference does not need."""
    return replace(total_times([*layers, *loss]), inference=total_times(layers).inference)


class LayerTrial:
    """Runs and times one layer as a cell of its own.

    Args:
        run: returns outputs and losses for inputs; its second argument is False when it recomputes.
        inputs: for one micro-batch; a gradient is computed for those that need one.
        device: where it runs.
        autocast: returns the context in which forward runs.
    """

    def __init__(
        self,
        run: Callable[[Tensors, bool], tuple[Tensors, Tensors]],
        inputs: Tensors,
        device: torch.device,
        autocast: Autocast = nullcontext,
    ) -> None:
        self._run, self._inputs, self._autocast, self._clock = run, inputs, autocast, _Clock(device)
        self._kept: list[tuple[list[Tensor], Tensors, Tensors]] = []  # leaves, outputs and losses of each graph

    @classmethod
    def of(
        cls,
        layer: BuiltLayer,
        inputs: Tensors,
        device: torch.device,
        autocast: Autocast = nullcontext,
        targets: Tensors = (),
    ) -> LayerTrial:
        """Makes the trial of a layer on ``device``; ``targets``: for its ``auxiliary_loss``, if it has one."""
        cell = Cell(0, [layer], NoiseSource(0, 0, device))

        def run(values: Tensors, first_time: bool) -> tuple[Tensors, Tensors]:
            with cell.weights_cast(device):
                outputs, losses = cell.run_training(values, targets, 0, 0, None, first_time)
            return outputs, tuple(losses.values())

        return cls(run, inputs, device, autocast)

    def outputs(self) -> Tensors:
        """Runs once, as a warm-up, and returns the next layer's inputs: leaves with `requires_grad` of the outputs."""
        self.forward()
        kept = self._kept[-1][1]
        made = grouped_like((tensor.detach().requires_grad_(tensor.requires_grad) for tensor in kept), kept)
        self.backward()
        return made

    def infer(self) -> None:
        """Runs forward without a graph."""
        with torch.no_grad(), self._clock.running("inference"), self._autocast():
            self._run(self._inputs, True)

    def forward(self) -> None:
        """Runs forward with a graph, which is kept."""
        self._forward("forward")

    def recompute(self) -> None:
        """Runs forward for the second time, with a graph, which is kept."""
        self._forward("recompute")

    def _forward(self, phase: str) -> None:
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self._inputs]
        with self._clock.running(phase), self._autocast():
            outputs, losses = self._run(grouped_like(leaves, self._inputs), phase == "forward")
        self._kept.append((leaves, outputs, losses))

    def backward(self) -> None:
        """Runs backward of the latest graph, and frees it."""
        leaves, roots = self._latest_graph()
        gradients = [torch.ones_like(root) for root in roots]
        with self._clock.running("backward"):
            if roots:
                torch.autograd.backward(roots, gradients)
            _hand_back(leaves)

    def backward_in_halves(self) -> None:
        """Runs backward of the latest graph, the gradients of weights after those of the inputs."""
        leaves, roots = self._latest_graph()
        gradients = [torch.ones_like(root) for root in roots]
        with self._clock.running("input_gradient"):
            weights = backward_of_inputs(roots, gradients, leaves) if roots else None
            _hand_back(leaves)
        with self._clock.running("weight_gradient"):
            if weights is not None:
                weights.run()

    def _latest_graph(self) -> tuple[list[Tensor], list[Tensor]]:
        leaves, outputs, losses = self._kept.pop()
        return leaves, [tensor for tensor in outputs + losses if tensor.requires_grad]

    def times(self) -> LayerTimes:
        """Returns the medians."""
        return LayerTimes(*(self._clock.median(phase.name) for phase in fields(LayerTimes)))

    def forget(self) -> None:
        """Discards the times so far."""
        self._clock.forget()


def _hand_back(leaves: Sequence[Tensor]) -> None:
    """Brings the gradients of a cell's inputs to the layout in which they are sent."""
    for leaf in leaves:
        if leaf.grad is not None:
            canonical_gradient(leaf.grad, is_channels_last(leaf))


class Trials:
    """Times groups of layers, one after the other as in a cell, so that the processor's caches hold other layers' data.

    A group is as small as that allows, because the weights of all its layers exist at the same time.

    Args:
        device: where they run.
        enough: seconds after which no layer is timed again.

    Attributes:
        times: of each layer timed so far.
    """

    def __init__(self, device: torch.device, enough: float = math.inf) -> None:
        self._on_gpu, self._until = device.type == "cuda", time.perf_counter() + enough
        self.times: dict[Hashable, LayerTimes] = {}
        self._waiting: dict[Hashable, LayerTrial] = {}
        self._bytes = 0

    def add(self, key: Hashable, trial: LayerTrial, size: int) -> None:
        """Adds the next layer; ``times`` has it after `run` at the latest.

        Args:
            size: bytes of its weights and outputs.
        """
        if self._bytes >= _ENOUGH:
            self.run()
        self._waiting[key] = trial
        self._bytes += size

    def run(self) -> None:
        """Times the layers added since the last call."""
        trials = list(self._waiting.values())
        in_flight = 1 if self._on_gpu or self._bytes >= _ENOUGH else _IN_FLIGHT
        for repeat in range(1 + _REPEATS):
            if repeat > _LEAST and time.perf_counter() > self._until:
                break
            for trial in trials:
                trial.infer()
            for trial in trials:  # one graph at a time, as with re-materialization
                trial.recompute()
            for trial in reversed(trials):
                trial.backward_in_halves()
            for trial in trials * in_flight:
                trial.forward()
            for trial in trials[::-1] * in_flight:
                trial.backward()
            if repeat == 0:
                for trial in trials:
                    trial.forget()
        self.times |= {key: trial.times() for key, trial in self._waiting.items()}
        self._waiting, self._bytes = {}, 0


class _Clock:
    """Measures seconds by phase, without those in which other processes of a busy machine had the core.

    On a GPU, events record when work begins and ends and are read at the end: waiting for the GPU around each layer
    would add the wait's own time to every small layer, and empty queues that a run does not have.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._events: dict[str, list[tuple[torch.Event, torch.Event]]] = defaultdict(list)

    @contextmanager
    def running(self, phase: str) -> Iterator[None]:
        if self._device.type == "cuda":
            begin = event_now(self._device)
            yield
            self._events[phase].append((begin, event_now(self._device)))
        else:
            waited, start = waited_for_core(), time.perf_counter()
            yield
            seconds = time.perf_counter() - start
            self._seconds[phase].append(max(0.0, seconds - (waited_for_core() - waited)))

    def median(self, phase: str) -> float:
        for begin, end in self._events.pop(phase, []):
            end.synchronize()
            self._seconds[phase].append(begin.elapsed_time(end) / 1000)
        return median(self._seconds[phase])

    def forget(self) -> None:
        self._seconds.clear()
        self._events.clear()
