"""Defines the measurements of tables 2 and 3: the models' costs, and each model's speed at one K and M.

Imports no torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gpipe_cli.partition.partition import cell_layers, partition
from gpipe_cli.schedule.instruction import Instruction, Op
from gpipe_cli.schedule.schedule import kept_graphs, schedule
from gpipe_cli.schedule.simulate import simulate

from .options import BenchOptions
from .paper import TABLE_2, TABLE_3, Throughputs
from .workers import run_workers

Seconds = dict[str, Any]  # of a step, by the name of the contender; None where it refuses the setting
BACKWARD = 2.0  # a backward takes so many forwards: the gradients of the input and of the weights
TORCH = "torch "  # before the name of a schedule
PEERS = (f"{TORCH}gpipe", f"{TORCH}1f1b", f"{TORCH}interleaved")
SERIAL_SECONDS = {1: 1.0, 4: 2.0, 32: 6.0}  # by M: sleeps should last a millisecond, short steps are mostly overhead
QUICK_SERIAL_SECONDS = {1: 0.4, 4: 0.8, 32: 3.0}
BATCH = {"amoebanet": 128, "transformer": 32}


@dataclass(frozen=True)
class ModelCosts:
    """Holds the costs of one of the paper's models for one example, counted without running it.

    Attributes:
        family: "amoebanet" (genotype D) or "transformer" (Transformer-L).
        sizes: (L, D), or (L,).
        costs: FLOPs of each layer's forward: products, convolutions, attention, plus one per output number.
        bytes_behind: bytes of the tensors that each layer puts out, in fp32.
    """

    family: str
    sizes: tuple[int, ...]
    costs: Sequence[float]
    bytes_behind: Sequence[int]

    @property
    def name(self) -> str:
        shown = ",".join(map(str, self.sizes))
        return f"AmoebaNet-D ({shown})" if self.family == "amoebanet" else f"Transformer-{shown}"

    def cut(self, cells: int) -> list[int]:
        """Returns the number of layers of each cell, by the partitioner's exact min_max."""
        return partition(self.costs, cells, "min_max")

    def boundaries(self, cells: int) -> list[int]:
        """Returns the bytes of one example in front of each cell; 0 in front of the first."""
        return [0, *(self.bytes_behind[layers.start - 1] for layers in cell_layers(self.cut(cells))[1:])]


class GridTable(NamedTuple):
    """Describes how tables 2 and 3 differ.

    Attributes:
        sizes: arguments of each family's model.
        paper: the paper's figures by family.
        linked: messages take time.
    """

    title: str
    sizes: dict[str, tuple[int, ...]]
    paper: dict[str, Throughputs]
    M: tuple[int, ...]
    linked: bool


SIZES_2, SIZES_3 = {"amoebanet": (18, 256), "transformer": (48,)}, {"amoebanet": (18, 128), "transformer": (24,)}
TABLES = {
    2: GridTable("normalised throughput", SIZES_2, TABLE_2, (1, 4, 32), False),
    3: GridTable("normalised throughput without fast links", SIZES_3, TABLE_3, (32,), True),
}


@dataclass(frozen=True)
class Setting:
    """Describes one model at one K and M.

    Attributes:
        linked: messages take time, too.
    """

    costs: ModelCosts
    K: int
    M: int
    options: BenchOptions
    linked: bool

    @property
    def serial_seconds(self) -> float:
        """Returns the seconds of forward and backward of the mini-batch on one emulated device."""
        seconds = QUICK_SERIAL_SECONDS if self.options.quick else SERIAL_SECONDS
        return self.options.seconds or seconds.get(self.M, max(seconds.values()))

    @property
    def seconds(self) -> list[float]:
        """Returns the seconds of each layer's forward of a micro-batch."""
        forward = self.serial_seconds / (1 + BACKWARD) / self.M
        return [cost / sum(self.costs.costs) * forward for cost in self.costs.costs]

    @property
    def link(self) -> dict[str, Any] | None:
        """Returns the seconds of the emulation that a message in front of each cell occupies its link, and travels."""
        if not self.linked:
            return None
        options, examples = self.options, BATCH[self.costs.family]
        whole = sum(self.costs.costs) * (1 + BACKWARD) * examples
        scale = self.serial_seconds * options.device_flops / whole  # seconds of the emulation for one of the device
        sizes = [size * examples // self.M for size in self.costs.boundaries(self.K)]
        return {"carry": [size / options.bandwidth * scale for size in sizes], "latency": options.latency * scale}

    def contenders(self) -> dict[str, tuple[str, list[int], str]]:
        """Returns kind of schedule, cut and policy of the contenders by name, ours first."""
        kinds: dict[str, str] = {kind: kind for kind in self.options.schedules}
        if not self.linked:
            kinds |= {name: name.removeprefix(TORCH) for name in (PEERS[:1] if self.options.quick else PEERS)}
        cells = {name: cells_of(kind, self.K) for name, kind in kinds.items()}
        fitting = [name for name in kinds if cells[name] <= len(self.costs.costs) or name not in PEERS]
        return {name: (kinds[name], self.costs.cut(cells[name]), self.options.remat) for name in fitting}

    def limit(self, kind: str) -> float:
        """Returns the seconds of the shortest possible step: the instruction lists simulated, without overhead."""
        cells = cells_of(kind, self.K)
        placement = tuple(cell % self.K for cell in range(cells))
        link, own = self.link, cell_layers(self.costs.cut(cells))
        costs = [sum(self.seconds[layer] for layer in layers) for layers in own]

        def on_the_way(send: Instruction) -> float:
            front = send.cell + 1 if send.op is Op.SEND_ACTIVATION else send.cell
            return link["carry"][front] + link["latency"] if link else 0.0

        lists = schedule(kind, placement, self.M, kept_graphs(self.options.remat, cells, self.M))
        return simulate(lists, placement, cost_durations(costs), on_the_way).span

    def config(self) -> dict[str, Any]:
        """Returns the setting as worker processes receive it."""
        return {"seconds": self.seconds, "M": self.M, "contenders": self.contenders(), "link": self.link}


def cells_of(kind: str, workers: int) -> int:
    """Returns the number of cells that a kind of schedule has in these measurements."""
    return 2 * workers if kind.startswith("interleaved") or kind == "zbv" else workers


def measure(configs: Sequence[Mapping[str, Any]], K: int, repetitions: int, realtime: bool) -> list[Seconds]:
    """Lets the contenders of each setting take turns on K processes; returns the seconds of `contenders.worker`."""
    config = {"settings": configs, "repetitions": repetitions, "realtime": realtime}
    found: list[Seconds] = run_workers("gpipe_cli.benchmarks.tables.contenders:worker", K, config)
    return found


def cost_durations(cell_costs: Sequence[float], backward: float = BACKWARD) -> Callable[[Instruction], float]:
    """Returns durations in the unit of the costs: C_k for forward and recompute, ``backward`` times C_k for backward.

    A backward computes the gradients of the input and of the weights, each about as expensive as the forward; of a
    backward in two halves, each takes half the time.
    """
    factors = {Op.BACKWARD: backward, Op.INPUT_GRADIENT: backward / 2, Op.WEIGHT_GRADIENT: backward / 2}

    def duration(instruction: Instruction) -> float:
        return cell_costs[instruction.cell] * factors.get(instruction.op, 1.0)

    return duration
