"""What the engine costs when there is nothing to pipeline: K=1, one process, against a plain loop.

The model is T(L,H,A) with dropout, once at the sizes of conf/model/transformer.yaml and once larger; data are random
tokens. Engine and loop use the same modules, the task's own loss and M micro-batches; nothing is re-materialized. They
take turns. With schedule 1f1b a single worker does what the loop does, F0 B0 F1 B1 …; with gpipe it keeps the graphs of
all M micro-batches, and so touches memory anew that the loop finds in the cache. The median of the pairs' ratios is
shown, with their quartiles. Seconds are the processor's: one thread that never waits, so on an idle machine they are
the wall clock's, and on a busy one they still hold.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn

from benchmarks.common import Report, parser
from gpipe_cli.bench.driver import CPU, Step, engine_step, plain_step
from gpipe_cli.models.transformer import transformer
from gpipe_cli.pipeline.cell import build_layer
from gpipe_cli.pipeline.engine import Part
from gpipe_cli.tasks.translation import TranslationTask

KINDS = ("1f1b", "gpipe")
SIZES = {
    "tiny": {"L": 1, "H": 32, "A": 1, "d_model": 32, "vocabulary": 64},
    "default": {"L": 3, "H": 512, "A": 2, "d_model": 128, "vocabulary": 8000},
    "larger": {"L": 6, "H": 2048, "A": 8, "d_model": 512, "vocabulary": 8000},
}


def build_modules(sizes: dict[str, int]) -> list[nn.Module]:
    vocabulary = sizes["vocabulary"]
    others = {name: size for name, size in sizes.items() if name != "vocabulary"}
    builders = transformer(**others, source_vocabulary=vocabulary, target_vocabulary=vocabulary)
    return [build_layer(builder, index, 0, CPU) for index, builder in enumerate(builders)]


def random_parts(vocabulary: int, examples: int, tokens: int, M: int) -> list[Part]:
    """Micro-batches of source, target input and target ids, without padding."""
    ids = torch.randint(1, vocabulary, (3, examples, tokens))
    return [
        ((source, before), (after,)) for source, before, after in zip(*(x.tensor_split(M) for x in ids), strict=True)
    ]


def seconds_of(step: Step, modules: list[nn.Module]) -> float:
    for module in modules:
        module.zero_grad()
    began = time.process_time()
    step()
    return time.process_time() - began


def measure(sizes: dict[str, int], arguments: Any) -> dict[str, list[float]]:
    """Seconds of every repetition, of the plain loop and of the engine with each kind of schedule."""
    modules = build_modules(sizes)
    parts = random_parts(sizes["vocabulary"], arguments.examples, arguments.tokens, arguments.M)
    loss = TranslationTask().loss
    engines = {kind: engine_step(modules, 0, 1, parts, kind, loss=loss) for kind in KINDS}
    steps = {"plain": plain_step(modules, parts, loss), **engines}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repetition in range(arguments.repetitions + 2):
        for name in list(steps) if repetition % 2 else list(reversed(steps)):
            taken = seconds_of(steps[name], modules)
            if repetition >= 2:
                seconds[name].append(taken)
    return seconds


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--sizes", nargs="+", choices=SIZES, default=["default", "larger"])
    options.add_argument("--M", type=int, default=4, help="default: 4")
    options.add_argument("--examples", type=int, default=64, help="in a mini-batch (default: 64)")
    options.add_argument("--tokens", type=int, default=24, help="on each side of an example (default: 24)")
    options.add_argument("--repetitions", type=int, default=31, help="pairs of steps (default: 31)")
    arguments = options.parse_args()
    if arguments.quick:
        arguments.repetitions = min(arguments.repetitions, 7)
    torch.set_num_threads(1)
    report = Report(
        {
            "model": "",
            "parameters": ",d",
            "schedule": "",
            "plain, s": ".4f",
            "engine, s": ".4f",
            "slower by": "+.2%",
            "quartiles": "",
        }
    )
    report.begin()
    for name in arguments.sizes:
        seconds = measure(SIZES[name], arguments)
        parameters = sum(p.numel() for module in build_modules(SIZES[name]) for p in module.parameters())
        for kind in KINDS:
            ratios = [engine / plain - 1 for engine, plain in zip(seconds[kind], seconds["plain"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            report.add(
                {
                    "model": name,
                    "parameters": parameters,
                    "schedule": kind,
                    "plain, s": statistics.median(seconds["plain"]),
                    "engine, s": statistics.median(seconds[kind]),
                    "slower by": middle,
                    "quartiles": f"{low:+.2%} … {high:+.2%}",
                    "seconds": seconds,
                }
            )
    report.end(arguments.output)


if __name__ == "__main__":
    main()
