"""Times layers, and the task's loss after the last one, in seconds; they run as a cell runs them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ..micro_batch import Tensors
from ..pipeline.batchnorm import DeferredBatchNorm, defer_batchnorm
from ..pipeline.halves import backward_of_inputs
from ..pipeline.messages.boundary import GradientLayouts, canonical_gradient, is_channels_last, passed_on
from ..pipeline.messages.grouping import as_argument, as_tensors, grouped_like
from ..pipeline.meter import event_now
from ..pipeline.randomness import NoiseSource
from ..pipeline.weight_casts import WeightCasts

Autocast = Callable[[], AbstractContextManager[Any]]
_REPEATS = 5  # timed rounds per layer, after one that warms up
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
    """Runs and times one layer, with what a cell does around it: it seeds the noise and settles the memory layouts.

    Args:
        run: returns outputs for inputs, and losses beside them.
        inputs: for one micro-batch; a gradient is computed for those that need one.
        device: where it runs.
        autocast: returns the context in which forward runs.
        batchnorms: inside the layer; they gather nothing while it is recomputed.
        casts: of the layer's weights.
    """

    def __init__(
        self,
        run: Callable[[Tensors], tuple[Tensors, Tensors]],
        inputs: Tensors,
        device: torch.device,
        autocast: Autocast = nullcontext,
        batchnorms: Sequence[DeferredBatchNorm] = (),
        casts: WeightCasts | None = None,
    ) -> None:
        self._run, self._inputs, self._autocast = run, inputs, autocast
        self._layouts, self._noise = GradientLayouts(), NoiseSource(0, 0, device)
        self._clock, self._device = _Clock(device), device
        self._batchnorms, self._casts = batchnorms, WeightCasts([]) if casts is None else casts
        self._kept: list[tuple[list[Tensor], Tensors, Tensors]] = []  # leaves, outputs and losses of each graph

    @classmethod
    def of(
        cls,
        module: nn.Module,
        inputs: Tensors,
        device: torch.device,
        autocast: Autocast = nullcontext,
        targets: Tensors | None = None,
        boundary_type: torch.dtype | None = None,
    ) -> LayerTrial:
        """Makes the trial of a module on ``device``, with its ``auxiliary_loss`` if there are ``targets``."""
        layer = defer_batchnorm(module)
        batchnorms = [inner for inner in layer.modules() if isinstance(inner, DeferredBatchNorm)]
        auxiliary_loss = None if targets is None else getattr(layer, "auxiliary_loss", None)

        def run(values: Tensors) -> tuple[Tensors, Tensors]:
            outputs = layer(as_argument(values))
            losses = () if auxiliary_loss is None else (auxiliary_loss(outputs, targets),)
            return passed_on(as_tensors(outputs), values, boundary_type), losses

        return cls(run, inputs, device, autocast, batchnorms, WeightCasts([layer]))

    def outputs(self) -> Tensors:
        """Runs once, as a warm-up, and returns the next layer's inputs: leaves with `requires_grad` of the outputs."""
        self.forward()
        kept = self._kept[-1][1]
        made = grouped_like((tensor.detach().requires_grad_(tensor.requires_grad) for tensor in kept), kept)
        self.backward()
        return made

    def infer(self) -> None:
        """Runs forward without a graph."""
        with torch.no_grad():
            values = grouped_like((tensor.clone() for tensor in self._inputs), self._inputs)
            with self._clock.running("inference"), self._autocast():
                self._outputs_of(values)

    def forward(self) -> None:
        """Runs forward with a graph, which is kept."""
        self._forward("forward")

    def recompute(self) -> None:
        """Runs forward for the second time, with a graph, which is kept."""
        for batchnorm in self._batchnorms:
            batchnorm.gathering = False
        self._forward("recompute")
        for batchnorm in self._batchnorms:
            batchnorm.gathering = True

    def _forward(self, phase: str) -> None:
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self._inputs]
        # Clones, because a layer may change its input in place, which autograd forbids for a leaf.
        values = grouped_like((leaf.clone() for leaf in leaves), self._inputs)
        with self._clock.running(phase), self._autocast():
            outputs, losses = self._outputs_of(values)
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

    def _outputs_of(self, values: Tensors) -> tuple[Tensors, Tensors]:
        self._noise.seed_layer(0, 0, 0)
        with self._casts.used_on(self._device):
            outputs, losses = self._run(values)
        return self._layouts.settle(outputs, values, 0, None), losses

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

    Attributes:
        times: of each layer timed so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
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
    """Measures seconds by phase.

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
            start = time.perf_counter()
            yield
            self._seconds[phase].append(time.perf_counter() - start)

    def median(self, phase: str) -> float:
        for begin, end in self._events.pop(phase, []):
            end.synchronize()
            self._seconds[phase].append(begin.elapsed_time(end) / 1000)
        return median(self._seconds[phase])

    def forget(self) -> None:
        self._seconds.clear()
        self._events.clear()
