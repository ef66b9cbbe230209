"""The models of the throughput tables as numbers: what each layer costs and what passes behind it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from gpipe_cli.partition.partition import cell_costs, cell_layers, partition

from .workers import run_workers

BACKWARD = 2.0  # a backward takes so many forwards: the gradients of the input and of the weights


@dataclass(frozen=True)
class Model:
    """One of the paper's models.

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
class Profile:
    """What is known of a model without running it, for one example.

    Attributes:
        costs: of each layer's forward, in FLOPs: products, convolutions, attention, plus one per number put out.
        bytes_behind: of the tensors that pass behind each layer, in fp32.
        parameters: of the whole model.
    """

    model: Model
    costs: tuple[float, ...]
    bytes_behind: tuple[int, ...]
    parameters: int

    def cut(self, cells: int) -> list[int]:
        """Layers of each cell: the partitioner's exact min_max."""
        return partition(self.costs, cells, "min_max")

    def cell_shares(self, cells: int) -> list[float]:
        """The share of the forward that each cell takes."""
        whole = sum(self.costs)
        return [cost / whole for cost in cell_costs(self.costs, self.cut(cells))]

    def boundaries(self, cells: int) -> list[int]:
        """Bytes of one example in front of each cell; 0 in front of the first."""
        return [0, *(self.bytes_behind[layers.start - 1] for layers in cell_layers(self.cut(cells))[1:])]

    def serial_seconds(self, flops: float) -> float:
        """Forward and backward of one example on a device of so many FLOP/s."""
        return sum(self.costs) * (1 + BACKWARD) / flops


def profile_models(models: Sequence[Model]) -> list[Profile]:
    """Counts on fake tensors, in a worker process, so that the command stays without torch."""
    found = run_workers("gpipe_cli.bench.models:profile_worker", 1, {"models": [asdict(model) for model in models]})
    return [
        Profile(model, tuple(facts["costs"]), tuple(facts["bytes_behind"]), facts["parameters"])
        for model, facts in zip(models, found, strict=True)
    ]
