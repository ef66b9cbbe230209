"""Compares one traced module with the module itself: its layers, and their cells on several processes."""

from __future__ import annotations

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
from gpipe_cli.difference import NO_LAYER, judge_tensors, measure
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.factory.module_itself import (
    ROUNDING,
    Given,
    SameNoise,
    averaged_over_a_mini_batch,
    compare,
    example_of,
    maker_of,
)
from gpipe_cli.layers import own_name
from gpipe_cli.micro_batch import Tensors
from gpipe_cli.models.traced.layers import layers
from gpipe_cli.models.traced.module import Called, TracedFrom
from gpipe_cli.models.traced.recording import plainly, quiet, seeded

SEED, M, EXAMPLES, PROCESSES = 3, 2, 3, 3
COLUMNS = {"module": "", "layers": "d", "verdict": "", "cuts": "", "seconds": ".1f", "where": ""}
CASES = [(K, remat) for K in (1, 2, 4) for remat in ("always", "never")]
Values = dict[str, Tensor]  # of a step, by kind and name, as "gradient of fc.weight"


@dataclass(frozen=True)
class Finding:
    """Describes how a module compares with itself.

    Attributes:
        layers: how many it became.
        seconds: of the processor, that tracing took.
        equal: whether outputs, gradients, buffers and what is trained are the module's own, but for rounding.
        difference: largest relative difference from them; 0: the same bits.
        same_cuts: whether all `CASES` have the same bits.
        where: the largest differences; why it is refused.
    """

    layers: int = 0
    seconds: float = 0.0
    equal: bool = False
    difference: float = 1.0
    same_cuts: bool = False
    where: str = ""

    @property
    def verified(self) -> bool:
        return self.equal and self.same_cuts


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
        """Returns what K processes make together, or all where they are fewer; on others nothing."""
        self.calls += 1
        if self.rank >= (size := min(K, PROCESSES)):
            return {}
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(f"group {self.calls}", self.store), rank=self.rank, world_size=size
        )
        everyone: list[Values] = [{}] * size
        dist.all_gather_object(everyone, make())
        dist.destroy_process_group()
        return {name: value for part in everyone for name, value in part.items()}


def find(subject: Subject, cases: Sequence[tuple[int, str]] = CASES, member: Member | None = None) -> Finding:
    """Traces a module, compares its layers with it as gpipe-verify does, and a step of the cells of each case.

    Args:
        member: of the processes that call it, each with its own; the first returns what was found. None: there is one.
    """
    torch.manual_seed(0)
    given = [subject.inputs(EXAMPLES) for _ in range(M)]
    began = time.process_time()
    try:
        builders = layers(subject.constructor, example_of(given[0]), SEED, **subject.call)
    except ConfigurationError as refusal:
        return Finding(where=str(refusal))
    seconds = time.process_time() - began
    # Compared below: without its mark as a traced layer's maker no case compares again.
    unmarked = [replace(builders[0], build=maker_of(builders[0]).__call__), *builders[1:]]
    runs = []
    for K, remat in cases:
        if len(builders) >= K:
            step = partial(_values, unmarked, K, remat, given)
            runs.append(member.values(K, step) if member else step())
    if member and member.rank > 0:
        return Finding()
    compared = compare(builders, Given([(inputs, ()) for inputs in given], _loss, torch.optim.AdamW))
    itself = _itself(maker_of(builders[0]).traced_from, given)
    gaps = [((NO_LAYER, name), measure(run.get(name), own)) for run in runs for name, own in itself.items()]
    cells = judge_tensors("cells", gaps, ROUNDING, kind=lambda key: key[1].partition(" ")[0])
    found, in_float32 = compared.all, compared.float32
    same = all(torch.equal(run[name], value) for run in runs[1:] for name, value in runs[0].items())
    said = [*map(str, (*found.beyond, *cells.beyond)[:3])]
    said += [f"in float64; in float32 {in_float32}"] if in_float32 else []
    worst = max(found, cells, key=lambda quantity: quantity.relative)
    where = "; ".join(said) or (f"at {worst.worst}" if worst.relative else "")
    return Finding(len(builders), seconds, not (found.beyond or cells.beyond), worst.relative, same, where)


def _loss(outputs: Tensors, targets: object) -> Tensor:
    """Returns a mean to which every output counts differently."""
    weights = torch.linspace(0.5, 1.5, outputs[0][0].numel(), dtype=outputs[0].dtype).view(outputs[0].shape[1:])
    return (outputs[0].square() * weights).sum() / EXAMPLES


def _itself(traced_from: TracedFrom, given: Sequence[Tensors]) -> Values:
    """Returns what a step of the module itself gives in a plain loop, and its outputs in evaluation."""
    with quiet(), plainly(), seeded(traced_from.seed):
        called = Called(module := traced_from.constructor(), traced_from.call).train()
        with averaged_over_a_mini_batch(called), SameNoise(0):
            loss = torch.stack([_loss((called(*map(Tensor.clone, inputs)),), None) for inputs in given]).mean()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        values = {"loss": loss.detach(), **{f"state {name}": value for name, value in module.state_dict().items()}}
        named = module.named_parameters()
        values |= {f"gradient of {name}": weight.grad for name, weight in named if weight.grad is not None}
        called.eval()
        with torch.no_grad(), SameNoise(0):
            return values | {f"output {number}": called(*inputs) for number, inputs in enumerate(given)}


def _values(builders: Sequence[LayerBuilder], K: int, remat: str, given: Sequence[Tensors]) -> Values:
    """Returns what a step gives in this process, by kind and name, and outputs in evaluation."""
    whole, labels = tuple(map(torch.cat, zip(*given, strict=True))), torch.zeros(M * EXAMPLES)
    pipeline = Pipeline.of(
        builders, lambda output, _: _loss((output,), _), (given[0], labels[:EXAMPLES]), K=K, M=M, remat=remat,
        seed=SEED, device="cpu",
    )  # fmt: skip
    with SameNoise(0):
        values = {"loss": torch.tensor(pipeline.step(whole, labels))}
    values |= {f"state {name}": value.clone() for name, value in pipeline.state_dict().items()}
    for layer in pipeline.layers:
        named = layer.module.named_parameters()
        values |= {f"gradient of {own_name(layer.name, name)}": p.grad for name, p in named if p.grad is not None}
    with SameNoise(0):
        outputs = enumerate(pipeline.forward(whole, labels))
    return values | {f"output {number}": outputs[0].clone() for number, (outputs, _) in outputs}


def print_table(rank: int, folder: str, names: Sequence[str], output: Path | None) -> None:
    """Compares all modules as one of the processes; the first prints a row for each, and ends with 1 if one differs."""
    torch.set_num_threads(1)
    member = Member(rank, dist.FileStore(f"{folder}/store", PROCESSES))
    member.store.set_timeout(timedelta(hours=1))  # while the first compares
    if rank > 0:
        for name in names:
            find(subject(name), member=member)
        return
    wrong = []

    def rows() -> Iterator[Row]:
        for name in names:
            found = find(subject(name), member=member)
            verdict = "DIFFERENT" if found.layers else "refused"
            if found.equal:
                verdict = f"{found.difference:.0e}" if found.difference else "same bits"
            cuts = "same bits" if found.same_cuts else "DIFFERENT"
            wrong.extend([] if found.verified else [name])
            yield {"module": name, **vars(found), "verdict": verdict, "cuts": cuts}

    report(COLUMNS, rows(), output, lambda rows: [f"verified: {len(rows) - len(wrong)} of {len(rows)}"])
    sys.exit(bool(wrong))
