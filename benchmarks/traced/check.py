"""Compares one traced module with the module itself, and its cells of several cuts with each other."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.common import Row
from benchmarks.traced.modules import Subject
from gpipe_cli import LayerBuilder, Pipeline
from gpipe_cli.comparison.module_itself import Given, SameNoise, by_kind, compare, maker_of
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.micro_batch import MicroBatch, Tensors
from gpipe_cli.models.traced.layers import layers
from gpipe_cli.models.traced.module import example_of

SEED, M, EXAMPLES = 3, 2, 3
COLUMNS = {"module": "", "layers": "d", "verdict": "", "cuts": "", "seconds": ".1f", "where": ""}
CASES = [(1, "never"), (2, "always"), (4, "always")]
Values = dict[str, Tensor]  # of a step, by kind and name, as "gradient of fc.weight"


@dataclass(frozen=True)
class Finding:
    """Describes how a module compares with itself.

    Attributes:
        layers: number of layers that it became; 0 where it is refused.
        seconds: processor time that tracing took.
        difference: largest relative difference from the module itself; infinite: more than rounding.
        same_cuts: True if all `CASES` have the same bits.
        where: the largest differences; why it is refused.
    """

    layers: int = 0
    seconds: float = 0.0
    difference: float = math.inf
    same_cuts: bool = False
    where: str = ""

    @property
    def verified(self) -> bool:
        return self.same_cuts and math.isfinite(self.difference)

    def row(self, name: str) -> Row:
        """Returns the row of the table."""
        verdict = "refused" if not self.layers else f"{self.difference:.0e}" if self.difference else "same bits"
        verdict = verdict if verdict != "inf" else "DIFFERENT"
        row = {"module": name, **vars(self), "verdict": verdict}
        return row | {"cuts": "same bits" if self.same_cuts else "DIFFERENT"}


def find(subject: Subject, cases: Sequence[tuple[int, str]] = CASES) -> Finding:
    """Traces a module, compares its layers with it as a start does, and the steps of the cells of all cases."""
    torch.manual_seed(0)
    given = Given([(subject.inputs(EXAMPLES), (torch.zeros(EXAMPLES),)) for _ in range(M)], _loss, torch.optim.AdamW)
    began = time.process_time()
    try:
        builders = layers(subject.constructor, example_of(given.micro_batches[0][0]), SEED, **subject.call)
    except ConfigurationError as refusal:
        return Finding(where=str(refusal))
    seconds = time.process_time() - began
    runs = [_of_cells(builders, K, remat, given.micro_batches) for K, remat in cases if len(builders) >= K]
    compared = compare(builders, given).found
    where = "; ".join(map(str, compared.beyond[:3])) or (f"at {compared.worst}" if compared.relative else "")
    same = all(torch.equal(run[name], value) for run in runs[1:] for name, value in runs[0].items())
    return Finding(len(builders), seconds, math.inf if compared.beyond else compared.relative, same, where)


def _loss(outputs: Tensors, targets: object) -> Tensor:
    """Returns a mean to which every output counts differently."""
    weights = torch.linspace(0.5, 1.5, outputs[0][0].numel(), dtype=outputs[0].dtype).view(outputs[0].shape[1:])
    return (outputs[0].square() * weights).sum() / EXAMPLES


def _of_cells(builders: Sequence[LayerBuilder], K: int, remat: str, given: Sequence[MicroBatch]) -> Values:
    """Returns what a step of K cells gives in this process, and their outputs in evaluation."""
    inputs, targets = (tuple(map(torch.cat, zip(*side, strict=True))) for side in zip(*given, strict=True))
    # Compared elsewhere: without its mark as a traced layer's maker no case compares again.
    unmarked = [replace(builders[0], build=maker_of(builders[0]).__call__), *builders[1:]]
    pipeline = Pipeline.of(
        unmarked, lambda output, _: _loss((output,), _), given[0], K=K, M=M, remat=remat, seed=SEED, device="cpu"
    )
    with SameNoise(0):
        loss = pipeline.step(inputs, targets)
        outputs = [outputs[0] for outputs, _ in pipeline.forward(inputs, targets)]
    named: dict[str, Tensor] = {}
    for layer in reversed(pipeline.layers):  # the first has the gradient of what is tied
        held = maker_of(builders[layer.index]).segment.held
        named |= {held[path]: t for path, t in (*layer.module.named_parameters(), *layer.module.named_buffers())}
    values = {f"{kind} of {name}": t.detach() for kind, of in by_kind(named).items() for name, t in of.items()}
    return {"loss": torch.tensor(loss), **values} | {f"output {n}": output for n, output in enumerate(outputs)}
