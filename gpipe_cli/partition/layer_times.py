"""How long a layer takes, and the task's loss behind the last: run as a cell runs them, with a clock beside."""

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
from ..pipeline.boundary import GradientLayouts, as_argument, as_tensors, canonical_gradient, is_channels_last
from ..pipeline.halves import backward_of_inputs
from ..pipeline.meter import event_now
from ..pipeline.randomness import NoiseSource

Autocast = Callable[[], AbstractContextManager[Any]]
_REPEATS = 5  # timed rounds per layer, after one that warms up
_ENOUGH = 64 << 20  # bytes of weights and outputs: several times a processor's caches
# Graphs that forwards build before any goes, as with several micro-batches: small memory that is used again at once
# comes sooner than what the allocator had given back. Large memory it gives back, and a GPU's it keeps, in any case.
_IN_FLIGHT = 4


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one layer, or of several together, for one micro-batch.

    Attributes:
        inference: forward without a graph. forward: with one.
        recompute: forward once more, in which BatchNorm gathers nothing.
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
        """Of a forward with a graph and its backward."""
        return self.forward + self.backward

    def slower(self, factor: float) -> LayerTimes:
        """Where all of it takes so many times as long."""
        return LayerTimes(*(getattr(self, part.name) * factor for part in fields(LayerTimes)))


def total_times(times: Sequence[LayerTimes]) -> LayerTimes:
    """Of layers that run one after the other."""
    return LayerTimes(*(sum(getattr(each, part.name) for each in times) for part in fields(LayerTimes)))


def cell_total(layers: Sequence[LayerTimes], loss: Sequence[LayerTimes]) -> LayerTimes:
    """Of a cell with these layers and, if it is the last, the loss, which a forward without a graph does not need."""
    return replace(total_times([*layers, *loss]), inference=total_times(layers).inference)


class LayerTrial:
    """One layer that is to be timed, with what a cell does around it: its noise, boundaries of one layout.

    Args:
        run: inputs to outputs, and to losses that stand beside them.
        inputs: for one micro-batch; a gradient is computed for those that need one.
        device: where it runs.
        autocast: makes the context in which forward runs.
        batchnorms: inside it; they gather nothing while it is recomputed.
    """

    def __init__(
        self,
        run: Callable[[Tensors], tuple[Tensors, Tensors]],
        inputs: Tensors,
        device: torch.device,
        autocast: Autocast = nullcontext,
        batchnorms: Sequence[DeferredBatchNorm] = (),
    ) -> None:
        self._run, self._inputs, self._autocast = run, inputs, autocast
        self._layouts, self._noise = GradientLayouts(), NoiseSource(0, 0, device)
        self._clock = _Clock(device)
        self._batchnorms = batchnorms
        self._kept: list[tuple[list[Tensor], Tensors, Tensors]] = []  # leaves, outputs and losses of each graph

    @classmethod
    def of(
        cls,
        module: nn.Module,
        inputs: Tensors,
        device: torch.device,
        autocast: Autocast = nullcontext,
        targets: Tensors | None = None,
    ) -> LayerTrial:
        """Of a module on ``device``, with its ``auxiliary_loss`` if it has one and there are ``targets``."""
        layer = defer_batchnorm(module)
        batchnorms = [part for part in layer.modules() if isinstance(part, DeferredBatchNorm)]
        auxiliary_loss = None if targets is None else getattr(layer, "auxiliary_loss", None)

        def run(values: Tensors) -> tuple[Tensors, Tensors]:
            outputs = layer(as_argument(values))
            losses = () if auxiliary_loss is None else (auxiliary_loss(outputs, targets),)
            return as_tensors(outputs), losses

        return cls(run, inputs, device, autocast, batchnorms)

    def outputs(self) -> Tensors:
        """What it hands on: leaves that need a gradient where the layer's outputs do. Its first run, which warms up."""
        self.forward()
        made = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self._kept[-1][1])
        self.backward()
        return made

    def infer(self) -> None:
        """Forward without a graph."""
        with torch.no_grad():
            values = tuple(tensor.clone() for tensor in self._inputs)
            with self._clock.running("inference"), self._autocast():
                self._settled(values)

    def forward(self) -> None:
        """Forward with a graph, which is kept."""
        self._forward("forward")

    def recompute(self) -> None:
        """Likewise, for the second time."""
        for batchnorm in self._batchnorms:
            batchnorm.gathering = False
        self._forward("recompute")
        for batchnorm in self._batchnorms:
            batchnorm.gathering = True

    def _forward(self, phase: str) -> None:
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self._inputs]
        # Clones, because a layer may change its input in place, which autograd forbids for a leaf.
        values = tuple(leaf.clone() for leaf in leaves)
        with self._clock.running(phase), self._autocast():
            outputs, losses = self._settled(values)
        self._kept.append((leaves, outputs, losses))

    def backward(self) -> None:
        """Of the latest graph, which it forgets."""
        leaves, roots = self._latest_graph()
        gradients = [torch.ones_like(root) for root in roots]
        with self._clock.running("backward"):
            if roots:
                torch.autograd.backward(roots, gradients)
            _hand_back(leaves)

    def backward_in_halves(self) -> None:
        """Likewise, the gradients of weights after those of the inputs."""
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

    def _settled(self, values: Tensors) -> tuple[Tensors, Tensors]:
        self._noise.seed_layer(0, 0, 0)
        outputs, losses = self._run(values)
        return self._layouts.settle(outputs, values, 0, None), losses

    def times(self) -> LayerTimes:
        """The medians of what has run."""
        return LayerTimes(*(self._clock.median(phase.name) for phase in fields(LayerTimes)))

    def forget(self) -> None:
        """What has run does not count."""
        self._clock.forget()


def _hand_back(leaves: Sequence[Tensor]) -> None:
    """The gradients of a cell's inputs, in the layout in which they travel."""
    for leaf in leaves:
        if leaf.grad is not None:
            canonical_gradient(leaf.grad, is_channels_last(leaf))


class Trials:
    """Layers that are timed together, one after the other as in a cell, so that each finds the processor's caches as in
    a run: full of what other layers have worked on. As few as that takes, because all their weights exist at once.

    Args:
        device: where they run.

    Attributes:
        times: of those that were.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.times: dict[Hashable, LayerTimes] = {}
        self._waiting: dict[Hashable, LayerTrial] = {}
        self._bytes = 0

    def add(self, key: Hashable, trial: LayerTrial, size: int) -> None:
        """One that stands behind those added before; ``times`` has it after `run` at the latest.

        Args:
            size: bytes of its weights and outputs.
        """
        if self._bytes >= _ENOUGH:
            self.run()
        self._waiting[key] = trial
        self._bytes += size

    def run(self) -> None:
        """Times what was added since the last time."""
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
    """Seconds of what runs, by its kind.

    A GPU notes when its work begins and ends, and is asked at the end: waiting for it around each layer would give
    every small one the wait's own time too, and idle queues that a run does not have.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._noted: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = defaultdict(list)

    @contextmanager
    def running(self, phase: str) -> Iterator[None]:
        if self._device.type == "cuda":
            begin = event_now(self._device)
            yield
            self._noted[phase].append((begin, event_now(self._device)))
        else:
            start = time.perf_counter()
            yield
            self._seconds[phase].append(time.perf_counter() - start)

    def median(self, phase: str) -> float:
        for begin, end in self._noted.pop(phase, []):
            end.synchronize()
            self._seconds[phase].append(begin.elapsed_time(end) / 1000)
        return median(self._seconds[phase])

    def forget(self) -> None:
        self._seconds.clear()
        self._noted.clear()
