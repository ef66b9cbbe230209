"""How long the parts of a step take on a device that is described by a few figures.

An operation takes the longer of two times: its FLOPs at the device's rate, the bytes it reads and writes at its
memory's. To both belongs a share that a real run reaches (`plan.efficiency`), and every operation costs its start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ..partition.layer_times import LayerTimes, cell_total
from ..schedule.instruction import Instruction, Op
from .cells import CellFacts
from .devices import Device
from .measure.layer_facts import LayerFacts
from .measure.tracking import Operation


@dataclass(frozen=True)
class Clock:
    """A device and the shares of its figures that are reached.

    Attributes:
        measured: times of layers that were timed, or worked out already, by the identity of their facts. Whoever adds
            one keeps the facts alive, so that no identity comes twice.
    """

    device: Device
    efficiency: float
    bandwidth_efficiency: float
    measured: dict[int, LayerTimes]

    def layer(self, facts: LayerFacts) -> LayerTimes:
        """Of one layer: measured, or worked out."""
        known = self.measured.get(id(facts))
        if known is None:
            known = self.measured[id(facts)] = self.estimate(facts)
        return known

    def costs(self, layers: Sequence[LayerFacts], loss: LayerFacts | None) -> list[float]:
        """Seconds of forward and backward of each layer; the last pays for the loss."""
        seconds = [self.layer(facts).total for facts in layers]
        if loss is not None:
            seconds[-1] += self.layer(loss).total
        return seconds

    def once(self, layers: Sequence[LayerFacts], loss: LayerFacts | None) -> float:
        """Seconds of forward and backward, worked out; equal layers count once, as where layers are timed."""
        distinct = {id(facts): facts for facts in (*layers, *([] if loss is None else [loss]))}
        return sum(self.estimate(facts).total for facts in distinct.values())

    def estimate(self, facts: LayerFacts) -> LayerTimes:
        """Of one layer, worked out."""
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
        """Of some operations, one after the other."""
        device, bandwidth = self.device, self.device.bandwidth * self.bandwidth_efficiency
        total = 0.0
        for flops, moved, half in operations:
            rate = (device.half_flops if half else device.flops) * self.efficiency
            total += max(flops / rate, moved / bandwidth) + device.overhead
        return total

    def update(self, cell: CellFacts, state_bytes: float) -> float:
        """Of the optimizer's step for one cell: weights, gradients and state are read, weights and state written."""
        moved = 2 * cell.gradient_bytes + cell.gradient_bytes + 2 * state_bytes
        starts = len(cell.trained) * self.device.overhead
        return moved / (self.device.bandwidth * self.bandwidth_efficiency) + starts

    def transfer(self, size: float) -> float:
        """Of one message to a neighbour."""
        return self.device.latency + size / self.device.link if size else 0.0

    def reduction(self, size: float, replicas: int) -> float:
        """Of summing gradients over replicas around a ring."""
        return 0.0 if replicas == 1 else 2 * (replicas - 1) / replicas * size / self.device.link


def cell_times(cells: Sequence[CellFacts], clock: Clock) -> list[LayerTimes]:
    """Of every cell, at speed 1."""
    made = []
    for cell in cells:
        times = [clock.layer(layer) for layer in cell.layers]
        layers = cell.last - cell.first + 1
        total = cell_total(times[:layers], times[layers:])
        if not cell.sizes.put_off:  # nobody waits for the first half, which then does everything
            total = replace(total, input_gradient=total.backward, weight_gradient=0.0)
        made.append(total)
    return made


def durations(
    times: Sequence[LayerTimes],
    lists: Sequence[Sequence[Instruction]],
    placement: Sequence[int],
    speeds: Sequence[float] | None,
) -> Callable[[Instruction], float]:
    """For `simulate`: seconds of each computation of these lists."""
    recomputed = {(i.cell, i.micro_batch) for each in lists for i in each if i.op is Op.RECOMPUTE}

    def duration(instruction: Instruction) -> float:
        time, op = times[instruction.cell], instruction.op
        without_graph = op is Op.FORWARD and (instruction.cell, instruction.micro_batch) in recomputed
        seconds: float = time.inference if without_graph else getattr(time, op.name.lower())
        return seconds / (speeds[placement[instruction.cell]] if speeds else 1.0)

    return duration
