"""Trains the golden losses (12 steps of three models); run as a script, rewrites them in tests/golden/."""

import json
import sys
import tempfile
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from inline_run import train_inline
from processes import command, succeeded

FOLDER = Path(__file__).parents[1] / "golden"
# The schedules of a group add up the gradients of micro-batches in the same order, and so make the same losses: gpipe's
# from the last micro-batch to the first, the others from the first to the last. Files are named after the first ones.
GROUPS = {"gpipe": ["gpipe", "breadth_first"], "1f1b": ["1f1b", "interleaved_1f1b", "zero_bubble"]}
STEPS = 12
# debug=tiny makes them small; what is drawn at random (dropout, drop path) is on in all of them.
DROPOUT = ["model.dropout=0.1", "model.input_dropout=0.1", "model.attention_dropout=0.1"]
ADAM = ["task.generation=null", "optimizer=adam", "optimizer.lr=0.003"]
MODELS = {
    "transformer": [*DROPOUT, "model.positions=sinusoids", *ADAM],
    "transformer_lm": DROPOUT,
    "amoebanet": ["model.dropout=0.2", "model.drop_path_keep=0.7"],
}


class Step(NamedTuple):
    """Holds the recorded figures of a step, written as decimals that read back as the same float64."""

    loss: float
    gradient_norm: float


def made_with() -> str:
    """Returns the line of releases and processor that decide the last bits, the corpus and its vocabulary."""
    releases = ", ".join(f"{package} {version(package)}" for package in ("torch", "babel", "sentencepiece"))
    return f"# made with {releases} on {torch.backends.cpu.get_cpu_capability()}"


def trained(model: str, schedule: str, cells: int) -> list[Step]:
    """Trains as gpipe-train does, four cells on two workers, and returns the steps of its metrics.jsonl."""
    keys = [f"model={model}", "debug=tiny", *MODELS[model], f"trainer.steps={STEPS}", f"pipeline.K={cells}"]
    keys += [f"pipeline.schedule={schedule}", "logging.every=1", "logging.tensorboard=false"]
    keys += ["trainer.evaluate_first=false", "trainer.evaluate_every=null", "checkpoint.every=null"]
    with tempfile.TemporaryDirectory() as run:
        if cells < 4:  # one worker, in this process: importing torch anew takes longer than the steps
            train_inline(Path(run), "pipeline.workers=1", *keys)
        else:
            succeeded(command("train", "pipeline.workers=2", f"hydra.run.dir={run}", *keys))
        lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return [Step(line["loss"], line["grad_norm"]) for line in lines]


def written(model: str, group: str) -> tuple[str, list[Step]]:
    """Reads a golden file: its line of releases and processor, and its steps."""
    lines = golden_file(model, group).read_text().splitlines()
    steps = [line.split() for line in lines if not line.startswith("#")]
    assert [int(number) for number, _, _ in steps] == list(range(1, STEPS + 1))
    return lines[1], [Step(float(loss), float(norm)) for _, loss, norm in steps]


def golden_file(model: str, group: str) -> Path:
    return FOLDER / f"{model}_{group}.txt"


def rewrite(model: str, group: str) -> None:
    head = [f"# python tests/helpers/golden_losses.py {model} {group}", made_with(), "# step, loss, gradient norm"]
    rows = [f"{i:2}  {step.loss!r:20} {step.gradient_norm!r}" for i, step in enumerate(trained(model, group, 1), 1)]
    golden_file(model, group).write_text("\n".join([*head, *rows]) + "\n")
    print(golden_file(model, group))


if __name__ == "__main__":
    for chosen in [sys.argv[1:]] if sys.argv[1:] else product(MODELS, GROUPS):
        rewrite(*chosen)
