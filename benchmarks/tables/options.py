"""Defines the options of ``gpipe-bench`` with their types, limits and defaults."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from gpipe_cli.typed_section import Count, Positive

Family = Literal["amoebanet", "transformer"]
Kind = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
Cells = Annotated[int, Field(ge=2)]  # a pipeline to measure has two at least


@dataclass(frozen=True)
class BenchOptions:
    """Holds the options; ``gpipe-bench --help`` describes each of them."""

    table: Literal[1, 2, 3, 4] | None = None
    quick: bool = False
    output: str = "bench"
    models: Annotated[list[Family], Field(min_length=1)] = field(default_factory=lambda: ["amoebanet", "transformer"])
    K: Annotated[list[Cells], Field(min_length=1)] | None = None
    M: list[Count] | None = None
    remat: Literal["always", "except_last", "never"] = "always"
    schedules: Annotated[list[Kind], Field(min_length=1)] = field(default_factory=lambda: ["gpipe", "1f1b"])
    repetitions: Count | None = None
    seconds: Positive | None = None
    realtime: bool = False
    device_flops: Positive = 4.75e12
    bandwidth: Positive = 1e10
    latency: float = 1e-5
    train: list[str] = field(default_factory=lambda: ["model=amoebanet", "lr_schedule=constant"])

    @property
    def timed_steps(self) -> int:
        """Returns the number of timed steps of each contender."""
        return self.repetitions or (1 if self.quick else 3)
