"""Measures what it saves to cast weights once a step, and not in every micro-batch as autocast does.

One step of a Transformer with precision=bf16, K=1 and one process; both ways take turns. Seconds are the processor's:
they are right on a busy machine, too. The median of the pairs' ratios is shown, with their quartiles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch

from benchmarks.common import WARM_UP, Row, parser, report, slower_by
from benchmarks.overhead import SIZES, build_modules, prepare, random_micro_batches
from gpipe_cli.bench.steps import EngineStep, engine_step, make_cell
from gpipe_cli.bench.timing import take_turns
from gpipe_cli.pipeline.weight_casts import WeightCasts
from gpipe_cli.tasks.translation import TranslationTask


def timed(step: EngineStep, once: bool) -> float:
    began = time.process_time()
    if once:
        step()
    else:
        with patch.object(WeightCasts, "begin_step", WeightCasts.end_step):  # no casts to use: autocast makes them
            step()
    return time.process_time() - began


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--size", choices=SIZES, default="default")
    options.add_argument("--M", type=int, nargs="+", default=[4, 16], help="default: 4 16")
    arguments = prepare(options)

    def rows() -> Iterator[Row]:
        for M in arguments.M:
            vocabulary = SIZES[arguments.size]["vocabulary"]
            batch = random_micro_batches(vocabulary, arguments.examples, arguments.tokens, M)
            cell = make_cell(0, build_modules(SIZES[arguments.size]))
            step = engine_step([cell], (0,), 0, None, batch, "1f1b", loss=TranslationTask().loss)
            step.engine.autocast = partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False)
            turns = {name: partial(timed, replace(step), name == "once") for name in ("once", "always")}
            seconds = take_turns(turns, arguments.repetitions, WARM_UP)
            slower, quartiles = slower_by(seconds["always"], seconds["once"])
            medians = {f"{name}, s": statistics.median(taken) for name, taken in seconds.items()}
            yield {"M": M, **medians, "always is slower by": slower, "quartiles": quartiles}

    columns = {"M": "d", "once, s": ".4f", "always, s": ".4f", "always is slower by": "+.1%", "quartiles": ""}
    report(columns, rows(), arguments.output)


if __name__ == "__main__":
    main()
