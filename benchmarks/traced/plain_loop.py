"""Measures what tracing and the engine cost at K=1: a traced module against a plain loop over the module itself.

ResNet-50 on images of 224 × 224, and GPT-2 small of the transformers library on random tokens, both in training mode.
The plain loop calls the module as its user would; the engine runs the layers that were traced from it, all in one cell,
with the same loss and micro-batches. Protocol and columns are those of `python -m benchmarks.overhead`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torchvision  # type: ignore[import-untyped]
from torch import nn

from benchmarks.common import Row, parser, report
from benchmarks.overhead import COLUMNS, measure, row
from gpipe_cli.bench.steps import CPU
from gpipe_cli.cpu import keep_freed_memory
from gpipe_cli.micro_batch import Loss, MicroBatch
from gpipe_cli.models.traced.layers import layers
from gpipe_cli.models.traced.module import Call, Called
from gpipe_cli.pipeline.cell import build_layer
from gpipe_cli.tasks.classification import ClassificationTask
from gpipe_cli.tasks.language_model import LanguageModelTask

M = 2


# What makes a module, what makes a micro-batch, a task's loss, the keys of model=module that say how it is called.
RealSubject = tuple[Callable[[], nn.Module], Callable[[], MicroBatch], Loss, dict[str, Any]]


def subjects(quick: bool) -> dict[str, RealSubject]:
    """Returns the modules by name; with ``quick`` small ones of the same kind."""
    size: dict[str, Any] = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 500} if quick else {}
    side, tokens = (64, 16) if quick else (224, 64)
    resnet = torchvision.models.resnet18 if quick else torchvision.models.resnet50
    texts, call = partial(_texts, 2, tokens, size.get("vocab_size", 50257)), {"inputs": ["input_ids"]}
    return {
        resnet.__name__: (resnet, partial(_images, 4, side), ClassificationTask().loss, {}),
        "gpt2": (partial(_gpt2, **size), texts, LanguageModelTask().loss, call),
    }


def _images(examples: int, side: int) -> MicroBatch:
    return (torch.randn(examples, 3, side, side),), (torch.randint(0, 1000, (examples,)),)


def _texts(examples: int, tokens: int, vocabulary: int) -> MicroBatch:
    ids = torch.randint(0, vocabulary, (examples, tokens + 1))
    return (ids[:, :-1].contiguous(),), (ids[:, 1:].contiguous(),)


def _gpt2(**size: Any) -> nn.Module:
    import transformers

    module: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size))
    return module


def rows_of(name: str, subject: RealSubject, repetitions: int) -> Iterator[Row]:
    """Measures one module with each kind of schedule."""
    constructor, make, loss, call = subject
    micro_batches = [make() for _ in range(M)]
    example = [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in micro_batches[0][0]]
    traced = [build_layer(builder, n, 0, CPU) for n, builder in enumerate(layers(constructor, example, **call))]
    plain = Called(constructor(), Call(**call)).train()
    parameters = sum(parameter.numel() for parameter in plain.parameters())
    seconds = measure([plain], traced, micro_batches, loss, repetitions)
    for kind in ("1f1b", "gpipe"):
        yield {"model": name, "parameters": parameters, **row(kind, seconds)}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repetitions", type=int, default=15, help="pairs of steps (default: 15)")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()

    def rows() -> Iterator[Row]:
        for name, subject in subjects(arguments.quick).items():
            yield from rows_of(name, subject, 3 if arguments.quick else arguments.repetitions)

    report(COLUMNS, rows(), arguments.output)


if __name__ == "__main__":
    main()
