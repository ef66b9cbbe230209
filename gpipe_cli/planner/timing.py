"""Works out the seconds that layers, cells, updates and messages take on a device.

An operation takes the longer of two times: its FLOPs at the device's rate, or its bytes at the memory's rate. A real
run reaches a share of both rates (`plan.efficiency`), and every operation costs its start.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ..partition.cost import LayerTimes, cell_total
from .devices import Device
from .kept import KeptBytes
from .measure.layer_facts import LayerFacts, ModelFacts
from .measure.tracking import Operation
from .memory import CellSizes


@dataclass(frozen=True)
class TimeModel:
    """Returns seconds on one device: measured ones for layers that were timed, else worked out.

    Attributes:
        device: with the rates that are reached.
        measured: times of the layers that were timed, and of those worked out already.
    """

    device: Device
    measured: dict[LayerFacts, LayerTimes] = field(default_factory=dict)

    def layer(self, facts: LayerFacts) -> LayerTimes:
        """Returns the times of one layer, measured or worked out."""
        if facts not in self.measured:
            self.measured[facts] = self.estimate(facts)
        return self.measured[facts]

    def layers(self, model: ModelFacts) -> list[LayerTimes]:
        """Returns the times of each layer; those of the loss are added to the last."""
        times = [self.layer(facts) for facts in model.layers]
        if model.loss is not None:
            times[-1] = cell_total(times[-1:], [self.layer(model.loss)])
        return times

    def estimate(self, facts: LayerFacts) -> LayerTimes:
        """Returns the times of one layer, worked out."""
        forward = self.seconds(facts.forward.operations)
        return LayerTimes(
            inference=self.seconds(facts.inference.operations),
            forward=forward,
            recompute=forward,
            backward=self.seconds(facts.backward.operations),
            input_gradient=self.seconds(facts.halves.first.operations),
            weight_gradient=self.seconds(facts.halves.second.operations),
        )

    def seconds(self, operations: Iterable[Operation]) -> float:
        """Returns the seconds of some operations, one after the other."""
        device, total = self.device, 0.0
        for flops, moved, half in operations:
            rate = device.half_flops if half else device.flops
            total += max(flops / rate, moved / device.bandwidth) + device.overhead
        return total

    def update(self, cell: KeptBytes, tensors: int) -> float:
        """Returns the seconds of the optimizer's step for a cell with so many parameter tensors that learn.

        Weights, gradients and state are read, weights and state written.
        """
        moved = 3 * cell.gradients + 2 * cell.optimizer
        return moved / self.device.bandwidth + tensors * self.device.overhead

    def transfer(self, size: float) -> float:
        """Returns the seconds that a message of ``size`` bytes takes to a neighbour."""
        return self.device.latency + size / self.device.link if size else 0.0

    def reduction(self, size: float, replicas: int) -> float:
        """Returns the seconds of summing ``size`` bytes of gradients over replicas around a ring."""
        return 0.0 if replicas == 1 else 2 * (replicas - 1) / replicas * size / self.device.link

    def cell(self, model: ModelFacts, members: range, sizes: CellSizes) -> LayerTimes:
        """Returns the times of a cell of these layers; the last one runs the loss, too."""
        layers = [self.layer(facts) for facts in model.layers[members.start : members.stop]]
        loss = [] if model.loss is None or members.stop < len(model.layers) else [self.layer(model.loss)]
        total = cell_total(layers, loss)
        if sizes.put_off:
            return total
        # No worker waits for its first half, which then does all of the backward.
        return replace(total, input_gradient=total.backward, weight_gradient=0.0)
