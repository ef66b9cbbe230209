"""Defines the types and limits of ``gpipe-bench``'s options; the defaults stand in ``conf/bench.yaml``."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from gpipe_cli.typed_section import Count, Positive

Family = Literal["amoebanet", "transformer"]
Kind = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
Cells = Annotated[int, Field(ge=2)]  # a pipeline to measure has two at least


@dataclass(frozen=True)
class BenchOptions:
    """Holds the options; ``conf/bench.yaml`` describes each of them."""

    table: Literal[1, 2, 3, 4] | None
    quick: bool
    output: str
    models: Annotated[list[Family], Field(min_length=1)]
    K: Annotated[list[Cells], Field(min_length=1)] | None
    M: list[Count] | None
    remat: Literal["always", "except_last", "never"]
    schedules: Annotated[list[Kind], Field(min_length=1)]
    repetitions: Count | None
    seconds: Positive | None
    realtime: bool
    device_flops: Positive
    bandwidth: Positive
    latency: float
    train: list[str]

    @property
    def timed_steps(self) -> int:
        """Returns the number of timed steps of each contender."""
        return self.repetitions or (1 if self.quick else 3)
