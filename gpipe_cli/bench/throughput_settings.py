"""What tables 2 and 3 measure: the models, and each of them at one K and M."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpipe_cli.schedule.instruction import Instruction, Op, ScheduleError
from gpipe_cli.schedule.schedule import schedule
from gpipe_cli.schedule.simulate import cost_durations, simulate

from .options import BenchOptions
from .paper import TABLE_2, TABLE_3, Throughputs
from .profiles import BACKWARD, Profile

TORCH, TORCHGPIPE = "torch ", "torchgpipe"  # the former before the name of a schedule
PEERS = (f"{TORCH}gpipe", f"{TORCH}1f1b", f"{TORCH}interleaved", TORCHGPIPE)
QUICK_PEERS = PEERS[:1]
PLAIN = "plain"
SERIAL_SECONDS = {1: 1.0, 4: 2.0, 32: 6.0}  # by M: sleeps should last a millisecond, short steps drown in overhead
QUICK_SERIAL_SECONDS = {1: 0.4, 4: 0.8, 32: 3.0}
LONGEST_SERIAL_SECONDS, LONGEST_QUICK_SERIAL_SECONDS = 6.0, 3.0  # for other M
BATCH = {"amoebanet": 128, "transformer": 32}


@dataclass(frozen=True)
class Protocol:
    """How the two tables differ.

    Attributes:
        sizes: of each family's model.
        paper: its figures.
        linked: messages take time.
    """

    number: int
    title: str
    sizes: dict[str, tuple[int, ...]]
    paper: dict[str, Throughputs]
    M: tuple[int, ...]
    linked: bool


TABLES = {
    2: Protocol(
        2,
        "normalised throughput",
        {"amoebanet": (18, 256), "transformer": (48,)},
        TABLE_2,
        (1, 4, 32),
        False,
    ),
    3: Protocol(
        3,
        "normalised throughput without fast links",
        {"amoebanet": (18, 128), "transformer": (24,)},
        TABLE_3,
        (32,),
        True,
    ),
}


@dataclass(frozen=True)
class Setting:
    """One model at one K and M.

    Attributes:
        serial_seconds: forward and backward of the mini-batch on one emulated device.
        linked: messages take time, too.
        real: layers compute, on devices that are there; a mini-batch is then a unit of work of its own.
    """

    profile: Profile
    K: int
    M: int
    serial_seconds: float
    options: BenchOptions
    linked: bool
    real: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """In the table."""
        return self.K, self.M

    @property
    def examples(self) -> int:
        return self.options.batch or BATCH[self.profile.model.family]

    @property
    def scale(self) -> float:
        return self.serial_seconds / (self.profile.serial_seconds(self.options.device_flops) * self.examples)

    @property
    def message_bytes(self) -> list[int]:
        """Of a micro-batch, in front of each cell."""
        return [size * self.examples // self.M for size in self.profile.boundaries(self.K)]

    @property
    def carry(self) -> list[float]:
        """Seconds of the emulation that a message in front of each cell keeps its link busy."""
        return [size / self.options.bandwidth * self.scale for size in self.message_bytes]

    @property
    def latency(self) -> float:
        return self.options.latency * self.scale

    def contenders(self) -> list[str]:
        kinds = [kind for kind in self.options.schedules if self.limit(kind) is not None]
        if self.linked or not self.options.peers:
            return kinds
        plain = [PLAIN] if min(self.options.grid_K) == self.K else []
        return [*kinds, *(QUICK_PEERS if self.options.quick else PEERS), *plain]

    def cells(self, kind: str) -> int:
        """Interleaved schedules have two cells a worker."""
        return 2 * self.K if kind.startswith("interleaved") else self.K

    def limit(self, kind: str) -> float | None:
        """The shortest possible step: the very lists of instructions, simulated, with nothing between them.

        None where the schedule refuses the setting.
        """
        placement = tuple(cell % self.K for cell in range(self.cells(kind)))
        forward = self.serial_seconds / (1 + BACKWARD) / self.M
        cells = [share * forward for share in self.profile.cell_shares(len(placement))]
        carry, latency = self.carry, self.latency

        def on_the_way(send: Instruction) -> float:
            front = send.cell + 1 if send.op is Op.SEND_ACTIVATION else send.cell
            return carry[front] + latency if self.linked else 0.0

        try:
            lists = schedule(kind, placement, self.M, self.options.remat)
        except ScheduleError:
            return None
        return simulate(lists, placement, cost_durations(cells, BACKWARD), on_the_way).span

    def config(self) -> dict[str, Any]:
        """What the workers are told."""
        whole = sum(self.profile.costs)
        forward = self.serial_seconds / (1 + BACKWARD) / self.M
        layers = len(self.profile.costs)
        cuts = {str(cells): self.profile.cut(cells) for cells in (self.K, 2 * self.K) if cells <= layers}
        return {
            "seconds": [cost / whole * forward for cost in self.profile.costs],
            "cuts": cuts,
            "M": self.M,
            "remat": self.options.remat,
            "contenders": self.contenders(),
            "family": self.profile.model.family,
            "sizes": self.profile.model.sizes,
            "small": self.profile.model.small,
            "examples": self.examples,
            "link": {"carry": self.carry, "latency": self.latency} if self.linked else None,
        }


@dataclass(frozen=True)
class Measured:
    """What the workers found in one setting.

    Attributes:
        seconds: of a step, by contender; None where one refuses the setting, or was too large.
        link: measured seconds of a message in front of cell 1 (``carry``) and of a free one (``host``); None without.
        too_large: contenders that found no room in a device's memory.
    """

    seconds: dict[str, float | None]
    link: dict[str, float] | None = None
    too_large: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """One row.

    Attributes:
        kind: our schedule in it.
        reference: K and M of the setting whose throughput is the unit.
        unit: throughput of the reference, in mini-batches of one second's work a second; None: nothing was measured.
        limit: shortest possible seconds of the step; of the reference ``limit_unit``, as a throughput; None where our
            schedule refuses the setting.
    """

    setting: Setting
    kind: str
    measured: Measured
    reference: tuple[int, int]
    unit: float | None
    limit: float | None
    limit_unit: float | None
    paper: float | None
    ideal: float

    def normalised(self, name: str) -> float | None:
        seconds = self.measured.seconds.get(name)
        return None if seconds is None or self.unit is None else self.setting.serial_seconds / seconds / self.unit

    @property
    def ours(self) -> float | None:
        return self.normalised(self.kind)

    @property
    def simulated(self) -> float | None:
        if self.limit is None or self.limit_unit is None:
            return None
        return self.setting.serial_seconds / self.limit / self.limit_unit

    @property
    def of_limit(self) -> float | None:
        seconds = self.measured.seconds.get(self.kind)
        return None if self.limit is None or seconds is None or self.setting.real else self.limit / seconds

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second of the emulated device's link, as measured."""
        link = self.measured.link
        return None if link is None else self.setting.message_bytes[1] / link["carry"] * self.setting.scale

    def facts(self) -> dict[str, Any]:
        """For programs."""
        setting = self.setting
        return {
            "model": setting.profile.model.name,
            "family": setting.profile.model.family,
            "K": setting.K,
            "M": setting.M,
            "paper": self.paper,
            "ours": self.ours,
            "ideal": self.ideal,
            "simulated": self.simulated,
            "limit_seconds": self.limit,
            "serial_seconds": setting.serial_seconds,
            "reference": self.reference,
            "seconds": self.measured.seconds,
            "normalised": {name: self.normalised(name) for name in self.measured.seconds},
            "too_large": self.measured.too_large,
            "cell_shares": setting.profile.cell_shares(setting.K),
            "message_bytes": setting.message_bytes[1:],
            "link": self.measured.link,
            "link_bytes_per_second": self.bandwidth,
        }


def serial_seconds(M: int, options: BenchOptions) -> float:
    """Forward and backward of an emulated mini-batch."""
    if options.seconds is not None:
        return options.seconds
    if options.quick:
        return QUICK_SERIAL_SECONDS.get(M, LONGEST_QUICK_SERIAL_SECONDS)
    return SERIAL_SECONDS.get(M, LONGEST_SERIAL_SECONDS)
