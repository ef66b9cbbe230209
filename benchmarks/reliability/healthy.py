"""Runs gpipe-verify on healthy configurations drawn at random, and reports those for which it raises an alarm.

    python -m benchmarks.reliability.healthy                        500 configurations, about half an hour
    python -m benchmarks.reliability.healthy --first 17 --count 1   number 17, with what gpipe-verify said

A configuration is drawn from its number and --seed: model, K, M, schedule, rematerialization, cut, replicas, workers,
precision, optimizer, learning rate schedule, clipping, averages, frozen layers, uneven micro-batches. One in eight runs
in several processes, the others in this one. Columns: alarms, configurations said to be DIFFERENT; failed, those that
ended with an error.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import Row, parser, report
from benchmarks.reliability.planted_faults.run import verified

COLUMNS = {"model": "", "configurations": "", "alarms": "", "failed": "", "seconds each": ".1f"}
SOURCES = ("subject", "subject", "subject", "transformer", "transformer_lm_small", "amoebanet")
OPTIMIZERS = ("adafactor", "adafactor_momentum", "adam", "adamw", "rmsprop", "rmsprop_tf", "sgd")
LR_SCHEDULES = ("constant", "linear_warmup", "inverse_sqrt", "cosine", "exponential", "step")
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")


@dataclass(frozen=True)
class Drawn:
    """Holds one configuration as words of the command line.

    Attributes:
        family: of the model.
    """

    family: str
    words: list[str]


def drawn(number: int, seed: int) -> Drawn:
    """Draws configuration ``number``."""
    dice = random.Random(f"{seed}/{number}")
    family = dice.choice(SOURCES)
    layers, words = MODELS[family](dice)
    words += _pipeline(dice, layers) + _training(dice)
    if "precision=bf16" in words:
        # On CPUs torch's gradient of a convolution in bfloat16 with stride 2 and one pixel of input is memory that was
        # never written; images of 16 pixels come down to one.
        words = ["data.image_size=32" if word == "data.image_size=16" else word for word in words]
    return Drawn(family, [*words, f"seed={dice.randrange(10**6)}", f"verify.steps={dice.choice((1, 2, 2, 2, 3))}"])


# -- models: (number of layers, words) ---------------------------------------------------------------------------------


def _subject(dice: random.Random) -> tuple[int, list[str]]:
    auxiliary, odd = dice.random() < 0.7, dice.choice(("", "", "", "fading", "overflow"))
    words = [
        f"model.batchnorm={_yes(dice, 0.6)}",
        f"model.dropout={dice.choice((0.0, 0.2))}",
        f"model.auxiliary={str(auxiliary).lower()}",
        f"model.frozen={_yes(dice, 0.2)}",
        *([f"model.odd={odd}"] if odd else []),
    ]
    return 6 + auxiliary, words


def _transformer(dice: random.Random) -> tuple[int, list[str]]:
    depth, dropout = dice.randint(1, 3), dice.choice((0.0, 0.1))
    return 5 * depth + 5, [
        *("debug=tiny", "model=transformer", f"model.L={depth}", f"model.dropout={dropout}"),
        *(f"model.attention_dropout={dropout}", f"model.depth_scaled_init={_yes(dice, 0.5)}"),
        f"task.label_smoothing={dice.choice((0.0, 0.1))}",
    ]


def _language_model(dice: random.Random) -> tuple[int, list[str]]:
    depth, dropout = dice.randint(1, 4), dice.choice((0.0, 0.1))
    return 2 * depth + 2, [
        *("debug=tiny", "model=transformer_lm_small", f"model.L={depth}", f"model.dropout={dropout}"),
        *(f"model.attention_dropout={dropout}", f"model.final_norm={_yes(dice, 0.5)}"),
    ]


def _amoebanet(dice: random.Random) -> tuple[int, list[str]]:
    return 9, [
        *("debug=tiny", "model=amoebanet", "model.L=3", "model.D=16", f"model.genotype={dice.choice('ABCD')}"),
        *(f"model.drop_path_keep={dice.choice((0.7, 1.0))}", f"model.dropout={dice.choice((0.0, 0.3))}"),
        *(f"model.channels_last={_yes(dice, 0.5)}", f"data.image_size={dice.choice((16, 32))}"),
    ]


MODELS: dict[str, Callable[[random.Random], tuple[int, list[str]]]] = {
    "subject": _subject,
    "transformer": _transformer,
    "transformer_lm_small": _language_model,
    "amoebanet": _amoebanet,
}

# -- the rest ----------------------------------------------------------------------------------------------------------


def _pipeline(dice: random.Random, layers: int) -> list[str]:
    K, M, schedule = dice.randint(1, min(layers, 8)), dice.randint(1, 6), dice.choice(SCHEDULES)
    words = [f"pipeline.K={K}", f"pipeline.M={M}", f"pipeline.schedule={schedule}"]
    words += [f"pipeline.remat={dice.choice(('always', 'except_last', 'never'))}"]
    words += [f"pipeline.partition={dice.choice(('min_max', 'min_variance'))}"]
    words += [f"pipeline.cost={dice.choice(('flops', 'parameters'))}"]
    replicas = 1
    if dice.random() < 1 / 8:
        replicas = dice.choice((1, 2, 2, 3))
        workers = [number for number in (1, 2, 3, 4) if number <= K and (K % number == 0 or schedule[0] != "i")]
        words += [f"pipeline.workers={dice.choice(workers if replicas == 1 else workers[:2])}"]
        words += [f"pipeline.replicas={replicas}"]
    uneven = dice.choice((0, 0, 1, M - 1))
    return [
        *words,
        f"pipeline.sync_batchnorm={_yes(dice, 0.3)}",
        f"data.batch_size={replicas * M * dice.randint(2, 4) + uneven}",
    ]


def _training(dice: random.Random) -> list[str]:
    optimizer, precision = dice.choice(OPTIMIZERS), dice.choice(("fp32", "fp32", "fp32", "fp32", "bf16"))
    words = [f"optimizer={optimizer}", f"lr_schedule={dice.choice(LR_SCHEDULES)}", "trainer.steps=100"]
    words += [f"precision={precision}"]
    if precision == "fp32" and dice.random() < 0.2:
        words.append("verify.dtype=float64")
    if dice.random() < 0.4:
        words += [f"optimizer.weight_decay={dice.choice((0.01, 0.3))}"]
        words += [f"optimizer.decay_only={dice.choice(('null', 'matrices'))}"]
    words.append(f"trainer.gradient_clip={dice.choice(('null', 0.05, 1.0))}")
    return [*words, f"trainer.average={dice.choice(('null', 'null', 0.9))}"]


def _yes(dice: random.Random, share: float) -> str:
    return "true" if dice.random() < share else "false"


# -- the command -------------------------------------------------------------------------------------------------------


def alarm(chosen: Drawn, folder: Path) -> tuple[str, list[str]]:
    """Returns "", "alarms" or "failed", and what gpipe-verify said."""
    try:
        found = verified(folder, *chosen.words, subject=chosen.family == "subject")
    except Exception:
        return "failed", traceback.format_exc().splitlines()
    return ("" if found["agrees"] else "alarms"), [*found["findings"], found["verdict"]]


def main() -> int:
    """Runs the command; the exit code is 1 if there was an alarm or an error."""
    line = parser(__doc__)
    line.add_argument("--seed", type=int, default=0, help="of the draw")
    line.add_argument("--first", type=int, default=0, metavar="N", help="number of the first configuration")
    line.add_argument("--count", type=int, default=500, metavar="N", help="how many (default: 500; --quick: 20)")
    given = line.parse_args()
    count = 20 if given.quick else given.count
    rows: dict[str, Row] = {name: {**dict.fromkeys(COLUMNS, 0), "model": name, "wrong": []} for name in MODELS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.first, given.first + count):
            chosen, began = drawn(number, given.seed), time.perf_counter()
            kind, said = alarm(chosen, Path(folder) / str(number))
            row = rows[chosen.family]
            row["configurations"] += 1
            row["seconds each"] += time.perf_counter() - began
            if kind or given.count == 1:
                print("\n".join([f"number {number}: {' '.join(chosen.words)}", *said]), flush=True)
            if kind:
                row[kind] += 1
                row["wrong"].append(number)

    def means() -> Iterator[Row]:
        for row in rows.values():
            yield {**row, "seconds each": row["seconds each"] / max(1, row["configurations"])}

    report(COLUMNS, means(), given.output, lambda kept: [_total(kept)])
    return int(any(row["wrong"] for row in rows.values()))


def _total(kept: Sequence[Row]) -> str:
    total = {key: sum(row[key] for row in kept) for key in ("configurations", "alarms", "failed")}
    return ", ".join(f"{number} {key}" for key, number in total.items())


if __name__ == "__main__":
    sys.exit(main())
