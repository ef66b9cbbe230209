"""Measures what each layer costs, in seconds of forward and backward on a device (pipeline.cost=profile)."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..layers import LayerBuilder, announce
from ..micro_batch import Tensors
from ..pipeline.cell import BuiltLayer, require_values
from ..pipeline.messages.grouping import grouped_like, grouping_of
from .cost import LayerCost, number_of_parameters
from .fake_layers import CostError, TensorShape, build_key, build_or_explain, explaining_failures
from .layer_times import Autocast, LayerTimes, LayerTrial, Trials, cell_total

_LOSS = "loss"  # among the keys of layers


@dataclass(frozen=True)
class ModelProfile:
    """Holds the measured times of a model.

    Attributes:
        layers: with costs in seconds, and the times of each.
        loss: times of the task's loss after the last layer; None where it was not timed.
    """

    layers: list[LayerCost]
    loss: LayerTimes | None

    @property
    def costs(self) -> list[LayerCost]:
        """Returns the costs for the partitioner; the last layer's includes the loss, which always runs in its cell."""
        last = self.layers[-1]
        times = cell_total([last.times], [] if self.loss is None else [self.loss])
        return [*self.layers[:-1], replace(last, cost=times.total, measured=times)]

    @property
    def times(self) -> list[LayerTimes]:
        """Returns the times of each layer, without the loss."""
        return [layer.times for layer in self.layers]


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
        example_inputs: of the first layer, for one micro-batch: real tensors.
        device: where the layers run.
        autocast: returns the context in which forward runs.
        loss: of the last layer's outputs; None: it is not timed.
        targets: of the micro-batch, for layers with an ``auxiliary_loss``.
        boundary_type: of the floating-point tensors between two layers; None: as a layer returns them.
        enough: seconds after which no layer is timed again.

    Raises:
        CostError: a layer or the loss fails; the message names it, and for a layer the way out.
    """
    known: dict[Hashable, tuple[LayerCost, Tensors]] = {}
    keys: list[Hashable] = []
    trials = Trials(device, enough)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        values = tuple(tensor.to(device) for tensor in example_inputs)
        for index, builder in enumerate(builders):
            shapes, trained = tuple(map(TensorShape.of, values)), tuple(tensor.requires_grad for tensor in values)
            keys.append((build_key(builder, index), shapes, trained, grouping_of(values)))
            if keys[-1] not in known:
                announce([builder])
                require_values(builder, own := build_or_explain(builder))
                module = deepcopy(own).to(device)  # the run has this one, if builders share it
                passed_as = boundary_type if index < len(builders) - 1 else None
                layer = BuiltLayer(index, builder.name, module, passed_as)
                trial = LayerTrial.of(layer, values, device, autocast, targets)
                with explaining_failures(builder, shapes):
                    outputs = trial.outputs()
                made = grouped_like(map(TensorShape.of, outputs), outputs)
                known[keys[-1]] = LayerCost(builder.name, number_of_parameters(module), None, made, 0.0), outputs
                trials.add(keys[-1], trial, sum(t.numel() * t.element_size() for t in (*module.parameters(), *outputs)))
            values = known[keys[-1]][1]
        if loss is not None:
            trials.add(_LOSS, _trial_of_loss(loss, values, device, autocast), 0)
        trials.run()
    times = [trials.times[key] for key in keys]
    layers = [
        replace(known[key][0], name=builder.name, cost=time.total, measured=time)
        for key, builder, time in zip(keys, builders, times, strict=True)
    ]
    return ModelProfile(layers, trials.times.get(_LOSS))


def _trial_of_loss(
    loss: Callable[[Tensors], Tensor], outputs: Tensors, device: torch.device, autocast: Autocast
) -> LayerTrial:
    trial = LayerTrial(lambda values, _: ((loss(values),), ()), outputs, device, autocast)
    try:
        trial.outputs()
    except Exception as error:
        raise CostError(f"the task's loss fails while it is timed: {type(error).__name__}: {error}") from error
    return trial
