"""Compares one traced module with the module itself: its layers, and their cells on several processes."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import Row, report
from benchmarks.traced.modules import Subject, subject
from gpipe_cli import LayerBuilder, Pipeline
from gpipe_cli.comparison.module_itself import Given, SameNoise, by_kind, compare, example_of, maker_of
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.micro_batch import MicroBatch, Tensors
from gpipe_cli.models.traced.layers import layers

SEED, M, EXAMPLES, PROCESSES = 3, 2, 3, 3
COLUMNS = {"module": "", "layers": "d", "verdict": "", "cuts": "", "seconds": ".1f", "where": ""}
CASES = [(1, "never"), (2, "always"), (4, "always")]
Values = dict[str, Tensor]  # of a step, by kind and name, as "gradient of fc.weight"


@dataclass(frozen=True)
class Finding:
    """Describes how a module compares with itself.

    Attributes:
        layers: how many it became; 0 where it is refused.
        seconds: processor time that tracing took.
        difference: largest relative difference from the module itself; infinite: more than rounding.
        same_cuts: whether all `CASES` have the same bits.
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


@dataclass
class Member:
    """Holds the place of this process among `PROCESSES`.

    Attributes:
        store: that all of them have.
        calls: how often they have met in it.
    """

    rank: int
    store: dist.Store
    calls: int = 0

    def values(self, K: int, make: Callable[[], Values]) -> Values:
        """Returns in the first process what K make together, or all where they are fewer; in others nothing."""
        self.calls += 1
        if self.rank >= (size := min(K, PROCESSES)):
            return {}
        store = dist.PrefixStore(f"group {self.calls}", self.store)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=size)
        everyone: list[Values] = [{}] * size
        dist.gather_object(make(), everyone if self.rank == 0 else None)
        dist.destroy_process_group()
        return {name: value for part in everyone for name, value in part.items()}


def find(subject: Subject, cases: Sequence[tuple[int, str]] = CASES, member: Member | None = None) -> Finding:
    """Traces a module, compares its layers with it as a start does, and the steps of the cells of all cases.

    Args:
        member: of the processes that call it, each with its own; the first returns what was found. None: there is one.
    """
    torch.manual_seed(0)
    given = Given([(subject.inputs(EXAMPLES), (torch.zeros(EXAMPLES),)) for _ in range(M)], _loss, torch.optim.AdamW)
    began = time.process_time()
    try:
        builders = layers(subject.constructor, example_of(given.micro_batches[0][0]), SEED, **subject.call)
    except ConfigurationError as refusal:
        return Finding(where=str(refusal))
    seconds = time.process_time() - began
    runs = []
    for K, remat in cases:
        if len(builders) >= K:
            step = partial(_of_cells, builders, K, remat, given.micro_batches)
            runs.append(member.values(K, step) if member else step())
    if member and member.rank > 0:
        return Finding()
    compared = compare(builders, given).found
    worst, beyond = compared.worst, compared.beyond
    where = "; ".join(map(str, beyond[:3])) or (f"at {worst}" if compared.relative else "")
    same = all(torch.equal(run[name], value) for run in runs[1:] for name, value in runs[0].items())
    return Finding(len(builders), seconds, math.inf if beyond else compared.relative, same, where)


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
        held = maker_of(builders[layer.index]).held
        named |= {held[path]: t for path, t in (*layer.module.named_parameters(), *layer.module.named_buffers())}
    values = {f"{kind} of {name}": t.detach() for kind, of in by_kind(named).items() for name, t in of.items()}
    return {"loss": torch.tensor(loss), **values} | {f"output {n}": output for n, output in enumerate(outputs)}


def print_table(rank: int, folder: str, names: Sequence[str], output: Path | None) -> None:
    """Compares all modules as one of the processes; the first prints a row for each, and ends with 1 if one differs."""
    torch.set_num_threads(1)
    member = Member(rank, dist.FileStore(f"{folder}/store", PROCESSES))
    member.store.set_timeout(timedelta(hours=1))  # while the first compares
    verified = []

    def rows() -> Iterator[Row]:
        for name in names:
            found = find(subject(name), member=member)
            verified.append(found.verified)
            yield found.row(name)

    if rank > 0:
        list(rows())
        return
    report(COLUMNS, rows(), output, lambda rows: [f"verified: {sum(verified)} of {len(rows)}"])
    sys.exit(not all(verified))
