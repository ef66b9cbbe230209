"""Runs gpipe-verify on healthy configurations drawn at random, and reports those for which it raises an alarm.

    python -m benchmarks.reliability.healthy                        480 configurations, about half an hour
    python -m benchmarks.reliability.healthy --first 17 --count 1   number 17, with what gpipe-verify said

A configuration is drawn from its number: model, K, M, schedule, rematerialization, cut, replicas, workers, precision,
optimizer, learning rate schedule, clipping, averages, frozen layers, uneven micro-batches. One in eight runs in several
processes, the others in this one. `alarms` counts those said to be DIFFERENT, or ended by an error.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common import Row, parser, report
from benchmarks.reliability.planted_faults.run import verified

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
TRANSFORMER = "debug=tiny model.dropout=0.0|0.1 model.attention_dropout=0.0|0.1"
MODELS = {  # keys and their values
    "subject": """
        model.batchnorm=true|false model.auxiliary=true|false model.frozen=true|false model.dropout=0.0|0.2
        model.odd=''|''|overflow""",
    "transformer": f"""
        {TRANSFORMER} model=transformer model.L=1|2|3 model.depth_scaled_init=true|false
        task.label_smoothing=0.0|0.1""",
    "transformer_lm_small": f"{TRANSFORMER} model=transformer_lm_small model.L=2|3|4 model.final_norm=true|false",
    "amoebanet": """
        debug=tiny model=amoebanet model.L=3 model.D=16 data.image_size=32 model.genotype=A|B|C|D
        model.drop_path_keep=0.7|1.0 model.dropout=0.0|0.3 model.channels_last=true|false""",
}
TRAINING = """
    pipeline.remat=always|except_last|never pipeline.partition=min_max|min_variance pipeline.cost=flops|parameters
    precision=fp32|fp32|fp32|bf16 verify.steps=1|2|2|3
    optimizer=adafactor|adafactor_momentum|adam|adamw|rmsprop|rmsprop_tf|sgd
    optimizer.weight_decay=0.0|0.01|0.3 optimizer.decay_only=null|matrices
    lr_schedule=constant|linear_warmup|inverse_sqrt|cosine|exponential|step
    trainer.steps=100 trainer.gradient_clip=null|0.05|1.0 trainer.average=null|null|0.9"""


def drawn(model: str, number: int) -> list[str]:
    """Draws configuration ``number`` of a model, as words of the command line."""
    dice = random.Random(f"{model}/{number}")
    K, M, replicas = dice.randint(1, 6), dice.randint(1, 6), 1
    keys = (word.split("=") for word in f"{MODELS[model]} {TRAINING}".split())
    words = [f"{key}={dice.choice(values.split('|'))}" for key, values in keys]
    words += [f"pipeline.K={K}", f"pipeline.M={M}", f"pipeline.schedule={dice.choice(SCHEDULES)}"]
    if dice.random() < 1 / 8:
        replicas, workers = dice.choice((1, 2)), dice.choice([number for number in (1, 2, 3) if K % number == 0])
        words += [f"pipeline.workers={workers}", f"pipeline.replicas={replicas}"]
    uneven = dice.choice((0, 0, 1, M - 1))
    return [*words, f"data.batch_size={replicas * M * dice.randint(2, 4) + uneven}", f"seed={dice.randrange(10**6)}"]


def alarm(model: str, words: Sequence[str], folder: Path) -> list[str]:
    """Returns what gpipe-verify said where it raised an alarm or failed; nothing where it said OK."""
    try:
        found = verified(folder, *words, subject=model == "subject")
    except Exception:
        return traceback.format_exc().splitlines()
    return [] if found["agrees"] else [*found["findings"], found["verdict"]]


def main() -> int:
    """Runs the command; the exit code is 1 if there was an alarm or an error."""
    line = parser(__doc__)
    line.add_argument("--first", type=int, default=0, metavar="N", help="number of the first configuration")
    line.add_argument("--count", type=int, default=120, metavar="N", help="how many of each model (default: 120)")
    given = line.parse_args()
    numbers = range(given.first, given.first + (5 if given.quick else given.count))
    wrong: list[str] = []

    def rows() -> Iterator[Row]:
        for model in MODELS:
            before, began = len(wrong), time.perf_counter()
            for number in numbers:
                words = drawn(model, number)
                with tempfile.TemporaryDirectory() as folder:
                    said = alarm(model, words, Path(folder) / "run")
                if said:
                    wrong.append("\n".join([f"{model}, number {number}: {' '.join(words)}", *said]))
            seconds = (time.perf_counter() - began) / len(numbers)
            alarms = len(wrong) - before
            yield {"model": model, "configurations": len(numbers), "alarms": alarms, "seconds each": seconds}

    columns = {"model": "", "configurations": "", "alarms": "", "seconds each": ".1f"}
    report(columns, rows(), given.output, lambda _: wrong)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
