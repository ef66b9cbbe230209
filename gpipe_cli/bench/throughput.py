"""Defines what tables 2 and 3 measure: the models' costs, each model at one K and M, and the rows that come of it.

Imports no torch: models are counted by a worker process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gpipe_cli.partition.partition import cell_costs, cell_layers, partition
from gpipe_cli.schedule.instruction import Instruction, Op, ScheduleError
from gpipe_cli.schedule.schedule import kept_graphs, schedule
from gpipe_cli.schedule.simulate import cost_durations, simulate
from gpipe_cli.terminal.runs import ideal_throughput

from .options import BenchOptions
from .paper import TABLE_2, TABLE_3, Throughputs
from .workers import run_workers

BACKWARD = 2.0  # a backward takes so many forwards: the gradients of the input and of the weights
TORCH = "torch "  # before the name of a schedule
PEERS = (f"{TORCH}gpipe", f"{TORCH}1f1b", f"{TORCH}interleaved")
PLAIN = "plain"
SERIAL_SECONDS = {1: 1.0, 4: 2.0, 32: 6.0}  # by M: sleeps should last a millisecond, short steps are mostly overhead
QUICK_SERIAL_SECONDS = {1: 0.4, 4: 0.8, 32: 3.0}
BATCH = {"amoebanet": 128, "transformer": 32}
Row = dict[str, Any]


@dataclass(frozen=True)
class PaperModel:
    """Names one of the paper's models.

    Attributes:
        family: "amoebanet" (genotype D) or "transformer" (Transformer-L).
        sizes: (L, D), or (L,).
    """

    family: str
    sizes: tuple[int, ...]

    @property
    def name(self) -> str:
        word = f"AmoebaNet-D {self.sizes}" if self.family == "amoebanet" else f"Transformer-{self.sizes[0]}"
        return word.replace(", ", ",")


@dataclass(frozen=True)
class ModelCosts:
    """Holds what a model costs for one example, counted without running it.

    Attributes:
        costs: FLOPs of each layer's forward: products, convolutions, attention, plus one per output number.
        bytes_behind: bytes of the tensors that each layer puts out, in fp32.
    """

    model: PaperModel
    costs: tuple[float, ...]
    bytes_behind: tuple[int, ...]

    def cut(self, cells: int) -> list[int]:
        """Returns the number of layers of each cell, by the partitioner's exact min_max."""
        return partition(self.costs, cells, "min_max")

    def cell_shares(self, cells: int) -> list[float]:
        """Returns the share of the forward that each cell takes."""
        whole = sum(self.costs)
        return [cost / whole for cost in cell_costs(self.costs, self.cut(cells))]

    def boundaries(self, cells: int) -> list[int]:
        """Returns the bytes of one example in front of each cell; 0 in front of the first."""
        return [0, *(self.bytes_behind[layers.start - 1] for layers in cell_layers(self.cut(cells))[1:])]


def count_models(models: Sequence[PaperModel]) -> list[ModelCosts]:
    """Counts the models' costs on fake tensors, in a worker process."""
    found = run_workers("gpipe_cli.bench.models:costs_worker", 1, {"models": [asdict(model) for model in models]})
    return [
        ModelCosts(model, tuple(facts["costs"]), tuple(facts["bytes_behind"]))
        for model, facts in zip(models, found, strict=True)
    ]


@dataclass(frozen=True)
class GridTable:
    """Describes how tables 2 and 3 differ.

    Attributes:
        sizes: of each family's model.
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
    def place(self) -> tuple[int, int]:
        """Returns the row and column in the table: (K, M)."""
        return self.K, self.M

    @property
    def serial_seconds(self) -> float:
        """Returns the seconds of forward and backward of the mini-batch on one emulated device."""
        seconds = QUICK_SERIAL_SECONDS if self.options.quick else SERIAL_SECONDS
        return self.options.seconds or seconds.get(self.M, max(seconds.values()))

    @property
    def examples(self) -> int:
        """Returns the number of examples in a mini-batch."""
        return self.options.batch or BATCH[self.costs.model.family]

    @property
    def link(self) -> dict[str, Any] | None:
        """Returns the seconds of the emulation that a message in front of each cell occupies its link, and travels."""
        if not self.linked:
            return None
        options, whole = self.options, sum(self.costs.costs) * (1 + BACKWARD) * self.examples
        scale = self.serial_seconds * options.device_flops / whole  # seconds of the emulation for one of the device
        sizes = [size * self.examples // self.M for size in self.costs.boundaries(self.K)]
        return {"carry": [size / options.bandwidth * scale for size in sizes], "latency": options.latency * scale}

    def contenders(self) -> list[str]:
        """Returns the names of the contenders, ours first."""
        kinds = [kind for kind in self.options.schedules if self.limit(kind) is not None]
        if self.linked or not self.options.peers:
            return kinds
        plain = [PLAIN] if min(self.options.grid_K) == self.K else []
        return [*kinds, *(PEERS[:1] if self.options.quick else PEERS), *plain]

    def limit(self, kind: str) -> float | None:
        """Returns the seconds of the shortest possible step: the instruction lists simulated, without overhead.

        None where the schedule refuses the setting.
        """
        cells = 2 * self.K if kind.startswith("interleaved") else self.K  # two a worker
        placement = tuple(cell % self.K for cell in range(cells))
        forward, link = self.serial_seconds / (1 + BACKWARD) / self.M, self.link

        def on_the_way(send: Instruction) -> float:
            front = send.cell + 1 if send.op is Op.SEND_ACTIVATION else send.cell
            return link["carry"][front] + link["latency"] if link else 0.0

        try:
            lists = schedule(kind, placement, self.M, kept_graphs(self.options.remat, cells, self.M))
        except ScheduleError:
            return None
        durations = cost_durations([share * forward for share in self.costs.cell_shares(cells)], BACKWARD)
        return simulate(lists, placement, durations, on_the_way).span

    def config(self) -> dict[str, Any]:
        """Returns the setting as worker processes receive it."""
        costs = self.costs.costs
        forward = self.serial_seconds / (1 + BACKWARD) / self.M
        return {
            "seconds": [cost / sum(costs) * forward for cost in costs],
            "cuts": {str(cells): self.costs.cut(cells) for cells in (self.K, 2 * self.K) if cells <= len(costs)},
            "M": self.M,
            "remat": self.options.remat,
            "contenders": self.contenders(),
            "link": self.link,
        }


def make_rows(settings: Sequence[Setting], measured: Sequence[Row], protocol: GridTable) -> list[Row]:
    """Returns one row per setting, with throughput in units of the reference of each model.

    The reference is the setting with the smallest K, then M, in which our first schedule was measured.

    Args:
        measured: of each setting the seconds of a step by contender, as ``seconds``.
    """
    rows = []
    for setting, found in zip(settings, measured, strict=True):
        kind, model = setting.options.schedules[0], setting.costs.model
        pairs = [pair for pair in zip(settings, measured, strict=True) if pair[0].costs is setting.costs]
        known = [pair for pair in pairs if pair[1]["seconds"].get(kind) is not None]
        reference, at_reference = min(known or pairs, key=lambda pair: pair[0].place)
        unit = _speed(reference, at_reference["seconds"].get(kind))
        limit, limit_unit = setting.limit(kind), _speed(reference, reference.limit(kind))
        normalised = {name: _quotient(_speed(setting, taken), unit) for name, taken in found["seconds"].items()}
        rows.append(
            {
                "model": model.name,
                "K": setting.K,
                "M": setting.M,
                "paper": protocol.paper[model.family].get(setting.place),
                "ours": normalised.get(kind),
                "ideal": ideal_throughput(*setting.place, reference.place),
                "simulated": _quotient(_speed(setting, limit), limit_unit),
                "of_limit": _quotient(limit, found["seconds"].get(kind)),
                "limit_seconds": limit,
                "serial_seconds": setting.serial_seconds,
                "reference": reference.place,
                "seconds": found["seconds"],
                "normalised": normalised,
            }
        )
    return rows


def _speed(setting: Setting, seconds: float | None) -> float | None:
    """Returns mini-batches of one second's serial work per second."""
    return _quotient(setting.serial_seconds, seconds)


def _quotient(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other
