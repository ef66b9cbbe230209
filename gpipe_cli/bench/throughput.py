"""Defines what tables 2 and 3 measure: the models' costs, each model at one K and M, and the rows that come of it.

Imports no torch: models are counted by a worker process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gpipe_cli.partition.partition import cell_costs, cell_layers, partition
from gpipe_cli.schedule.instruction import Instruction, Op, ScheduleError
from gpipe_cli.schedule.schedule import schedule
from gpipe_cli.schedule.simulate import cost_durations, simulate

from .options import BenchOptions
from .paper import TABLE_2, TABLE_3, Throughputs, ideal_throughput
from .workers import run_workers

BACKWARD = 2.0  # a backward takes so many forwards: the gradients of the input and of the weights
TORCH = "torch "  # before the name of a schedule
PEERS = (f"{TORCH}gpipe", f"{TORCH}1f1b", f"{TORCH}interleaved")
QUICK_PEERS = PEERS[:1]
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
        small: narrow, for tests: the lists of layers stay, their widths do not.
    """

    family: str
    sizes: tuple[int, ...]
    small: bool = False

    @property
    def name(self) -> str:
        word = f"AmoebaNet-D {self.sizes}" if self.family == "amoebanet" else f"Transformer-{self.sizes[0]}"
        return word.replace(", ", ",") + (", small" if self.small else "")


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

    number: int
    title: str
    sizes: dict[str, tuple[int, ...]]
    paper: dict[str, Throughputs]
    M: tuple[int, ...]
    linked: bool


SIZES_2, SIZES_3 = {"amoebanet": (18, 256), "transformer": (48,)}, {"amoebanet": (18, 128), "transformer": (24,)}
TABLES = {
    2: GridTable(2, "normalised throughput", SIZES_2, TABLE_2, (1, 4, 32), False),
    3: GridTable(3, "normalised throughput without fast links", SIZES_3, TABLE_3, (32,), True),
}


@dataclass(frozen=True)
class Setting:
    """Describes one model at one K and M.

    Attributes:
        serial_seconds: forward and backward of the mini-batch on one emulated device.
        linked: messages take time, too.
        real: layers compute, on this machine's devices; a mini-batch is then a unit of work of its own.
    """

    costs: ModelCosts
    K: int
    M: int
    serial_seconds: float
    options: BenchOptions
    linked: bool
    real: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """Returns the row and column in the table: (K, M)."""
        return self.K, self.M

    @property
    def examples(self) -> int:
        """Returns the number of examples in a mini-batch."""
        return self.options.batch or BATCH[self.costs.model.family]

    @property
    def scale(self) -> float:
        """Returns the seconds of the emulation for one second of the device whose link is emulated."""
        device_seconds = sum(self.costs.costs) * (1 + BACKWARD) * self.examples / self.options.device_flops
        return self.serial_seconds / device_seconds

    @property
    def message_bytes(self) -> list[int]:
        """Returns the bytes of a micro-batch in front of each cell."""
        return [size * self.examples // self.M for size in self.costs.boundaries(self.K)]

    @property
    def carry(self) -> list[float]:
        """Returns the seconds of the emulation that a message in front of each cell occupies its link."""
        return [size / self.options.bandwidth * self.scale for size in self.message_bytes]

    @property
    def latency(self) -> float:
        """Returns the seconds of the emulation that a message travels, beside its bytes."""
        return self.options.latency * self.scale

    def contenders(self) -> list[str]:
        """Returns the names of the contenders, ours first."""
        kinds = [kind for kind in self.options.schedules if self.limit(kind) is not None]
        if self.linked or not self.options.peers:
            return kinds
        plain = [PLAIN] if min(self.options.grid_K) == self.K else []
        return [*kinds, *(QUICK_PEERS if self.options.quick else PEERS), *plain]

    def limit(self, kind: str) -> float | None:
        """Returns the seconds of the shortest possible step: the instruction lists simulated, without overhead.

        None where the schedule refuses the setting.
        """
        cells = 2 * self.K if kind.startswith("interleaved") else self.K  # two a worker
        placement = tuple(cell % self.K for cell in range(cells))
        forward = self.serial_seconds / (1 + BACKWARD) / self.M
        carry, latency = self.carry, self.latency

        def on_the_way(send: Instruction) -> float:
            front = send.cell + 1 if send.op is Op.SEND_ACTIVATION else send.cell
            return carry[front] + latency if self.linked else 0.0

        try:
            lists = schedule(kind, placement, self.M, self.options.remat)
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
            "model": asdict(self.costs.model),
            "examples": self.examples,
            "link": {"carry": self.carry, "latency": self.latency} if self.linked else None,
        }


def serial_seconds(M: int, options: BenchOptions) -> float:
    """Returns the seconds of forward and backward of an emulated mini-batch."""
    seconds = QUICK_SERIAL_SECONDS if options.quick else SERIAL_SECONDS
    return options.seconds or seconds.get(M, max(seconds.values()))


@dataclass(frozen=True)
class Measured:
    """Holds what the workers measured in one setting.

    Attributes:
        seconds: of a step, by contender; None where one refuses the setting, or was too large.
        cells: of each worker the seconds of a step by kind of computation, of the first contender.
        too_large: contenders that ran out of a device's memory.
    """

    seconds: dict[str, float | None]
    cells: Sequence[dict[str, float]] = ()
    too_large: tuple[str, ...] = ()


def make_rows(settings: Sequence[Setting], measured: Sequence[Measured], protocol: GridTable) -> list[Row]:
    """Returns one row per setting, with throughput in units of the reference of each model.

    The reference is the setting with the smallest K, then M, in which our first schedule was measured; where none was,
    as when nothing fits into a device's memory, the smallest of all.
    """
    rows = []
    for setting, found in zip(settings, measured, strict=True):
        kind = setting.options.schedules[0]
        pairs = [pair for pair in zip(settings, measured, strict=True) if pair[0].costs is setting.costs]
        known = [pair for pair in pairs if pair[1].seconds.get(kind) is not None]
        reference, at_reference = min(known or pairs, key=lambda pair: pair[0].place)
        unit, limit_unit = _speed(reference, at_reference.seconds.get(kind)), _speed(reference, reference.limit(kind))
        limit, seconds = setting.limit(kind), found.seconds.get(kind)
        normalised = {name: _quotient(_speed(setting, taken), unit) for name, taken in found.seconds.items()}
        model = setting.costs.model
        rows.append(
            {
                "model": model.name,
                "family": model.family,
                "K": setting.K,
                "M": setting.M,
                "paper": None if model.small else protocol.paper[model.family].get(setting.place),
                "ours": normalised.get(kind),
                "ideal": ideal_throughput(*setting.place, reference.place),
                "simulated": _quotient(_speed(setting, limit), limit_unit),
                "of_limit": None if setting.real else _quotient(limit, seconds),
                "limit_seconds": limit,
                "serial_seconds": setting.serial_seconds,
                "reference": reference.place if known else None,
                "seconds": found.seconds,
                "normalised": normalised,
                "too_large": found.too_large,
                "cell_shares": setting.costs.cell_shares(setting.K),
                "message_bytes": setting.message_bytes[1:],
            }
        )
    return rows


def _speed(setting: Setting, seconds: float | None) -> float | None:
    """Returns mini-batches of one second's serial work per second."""
    return _quotient(setting.serial_seconds, seconds)


def _quotient(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other
