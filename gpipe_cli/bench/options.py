"""Defines the types and limits of ``gpipe-bench``'s options; the defaults stand in ``conf/bench.yaml``."""

from dataclasses import dataclass
from typing import Literal

from gpipe_cli.typed_section import Count, Positive

Family = Literal["amoebanet", "transformer"]


@dataclass(frozen=True)
class BenchOptions:
    """Holds the options; ``conf/bench.yaml`` describes each of them."""

    table: Literal[1, 2, 3, 4] | None
    quick: bool
    output: str
    models: list[Family]
    K: list[Count] | None
    M: list[Count] | None
    remat: Literal["always", "except_last", "never"]
    schedules: list[str]
    peers: bool
    repetitions: Count | None
    seconds: Positive | None
    realtime: bool
    batch: Count | None
    device_flops: Positive
    bandwidth: Positive
    latency: float
    train: list[str]

    @property
    def timed_steps(self) -> int:
        """Returns the number of timed steps of each contender."""
        return self.repetitions or (1 if self.quick else 3)

    @property
    def grid_K(self) -> list[int]:
        """Returns the numbers of cells of tables 2 and 3."""
        return self.K or [2, 4, 8]
