"""Trains small AmoebaNets with the engine, in one process, and as a plain module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from plain_amoebanet import PlainAmoebaNet
from small_models import build_all, descend, engine_of, seen_after, train_step
from torch.nn import functional as F

from gpipe_cli.micro_batch import MicroBatch
from gpipe_cli.models.amoebanet import amoebanet, spatial_sizes
from gpipe_cli.pipeline.batchnorm import finish_batchnorm
from gpipe_cli.pipeline.cell import BuiltLayer
from gpipe_cli.tasks.classification import ClassificationTask

CLASSES, STEPS = 5, 2
CLOSE = 1e-8, 1e-10  # relative, absolute
SMALL = {"L": 3, "D": 16, "classes": CLASSES, "dropout": 0.0, "drop_path_keep": 1.0}


@dataclass(frozen=True)
class Case:
    """Describes one way to train a small AmoebaNet for `STEPS` steps."""

    K: int
    M: int
    remat: str
    genotype: str = "D"
    image_size: int = 79
    auxiliary: bool = True
    examples: int = 7

    def layers(self) -> list[BuiltLayer]:
        model = {"genotype": self.genotype, "image_size": self.image_size, "auxiliary_head": self.auxiliary}
        return build_all(amoebanet(**(SMALL | model)))

    def parts(self, step: int) -> list[MicroBatch]:
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(self.examples, 3, self.image_size, self.image_size, generator=generator)
        labels = torch.randint(0, CLASSES, (self.examples,), generator=generator)
        pairs = zip(images.tensor_split(self.M), labels.tensor_split(self.M), strict=True)
        return [((some,), (theirs,)) for some, theirs in pairs]


def run_engine(case: Case) -> list[dict[str, Any]]:
    """Returns the losses of each step and, by name, the gradients and buffers; trains by gradient descent."""
    layers = case.layers()
    engine = engine_of(layers, [len(part) for part in torch.arange(len(layers)).tensor_split(case.K)])
    engine.loss = ClassificationTask(0.1).loss
    cells, seen = list(engine.cells.values()), []
    for step in range(STEPS):
        record = train_step(engine, "gpipe", case.remat, case.parts(step), step, case.examples)
        finish_batchnorm([b for cell in cells for b in cell.batchnorms], None)
        seen.append(seen_after(cells, record))
        descend((parameter for cell in cells for _, parameter in cell.parameters()), 0.05)
    return seen


def plain_twin(case: Case) -> tuple[PlainAmoebaNet, list[str]]:
    """Returns the plain module with the layer list's weights, and the list's names in the order of its parameters."""
    named = [(f"{x.name}.{name}", value) for x in case.layers() for name, value in x.module.named_parameters()]
    auxiliary_map = (spatial_sizes(case.image_size)["stack_2"] - 5) // 3 + 1 if case.auxiliary else 0
    plain = PlainAmoebaNet(SMALL["L"], SMALL["D"], CLASSES, case.genotype, auxiliary_map)  # type: ignore[arg-type]
    with torch.no_grad():
        for theirs, (name, mine) in zip(plain.in_order(), named, strict=True):
            assert theirs.shape == mine.shape, name
            theirs.copy_(mine)
    return plain.train(), [name for name, _ in named]


def run_plain(case: Case) -> list[dict[str, Any]]:
    """Returns, for each step, the mini-batch's loss and, by the layer list's names, the gradients."""
    plain, names = plain_twin(case)
    seen = []
    for step in range(STEPS):
        total = 0.0
        for (images,), (labels,) in case.parts(step):
            logits, auxiliary = plain(images)
            loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1)
            if auxiliary is not None:
                loss = loss + 0.4 * F.cross_entropy(auxiliary, labels, reduction="sum", label_smoothing=0.1)
            (loss / case.examples).backward()
            total += loss.item()
        parameters = plain.in_order()
        gradients = {name: p.grad.clone() for name, p in zip(names, parameters, strict=True) if p.grad is not None}
        seen.append({"loss": total, "gradients": gradients})
        descend(parameters, 0.05)
    return seen
