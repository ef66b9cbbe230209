"""Makes table 1: the largest models that fit, by gpipe-plan for the paper's devices. Imports no torch."""

import json
from collections.abc import Sequence
from typing import Any

from .options import BenchOptions
from .paper import TABLE_1, Capacity
from .table import Say, Table
from .throughput import BATCH
from .workers import run_command

GB = 1e9
WORDS = {
    "amoebanet": (
        *("model=amoebanet", "model.genotype=D", "data=imagenet", "data.image_size=224", "data.batch_size=128"),
        "plan.device=tpu-v2",
    ),
    "transformer": (
        *("model=transformer_lm", "model.H=8192", "model.A=32", "model.d_model=2048", "data.vocabulary=32000"),
        *("data.sequence_length=1024", "data.batch_size=32", "plan.device=tpu-v3"),
    ),
}
# As the paper's RMSProp, 12 bytes a parameter: here weight, gradient and momentum.
OPTIMIZER = ("optimizer=sgd", "trainer.average=null")
GROWN = {"amoebanet": ("D", 16), "transformer": ("L", 1)}  # the size that grows, by such steps
COLUMNS = dict.fromkeys(("model", "devices", "how", "paper: size", "paper: parameters"), "")
COLUMNS |= {"its GB a device": ".3f", "of": ".3f", "fits": "", "ours: size": "", "ours: parameters": ""}


Row = dict[str, Any]


def capacity_table(number: int, options: BenchOptions, say: Say) -> Table:
    """Makes the table by the planner.

    Raises:
        CommandFailed: gpipe-plan refused.
    """
    rows = [plan_column(family, column, options.quick, say) for family in options.models for column in TABLE_1[family]]
    said = [
        "Planned by gpipe-plan for the paper's devices with 12 bytes a parameter (optimizer=sgd). naive: M=1, nothing "
        " recomputed; pipeline: remat always, micro-batches of one example. docs/measurements/tables.md says "
        "more.",
        "its GB a device: memory that the paper's own size needs by this plan, on the fullest device. ours: the "
        "largest that fits; of AmoebaNet the width D grows at the paper's L.",
    ]
    return Table("table1", "Table 1: the largest models that fit", COLUMNS, rows, said)


def plan_column(family: str, column: Capacity, quick: bool, say: Say) -> Row:
    """Plans one column of the paper's table: the paper's own size, and unless ``quick`` the largest that fits."""
    name, step = GROWN[family]
    key = f"model.{name}"
    # The paper does not state M: micro-batches of one example, as in torchgpipe's table.
    M, remat = (1, "never") if column.naive else (BATCH[family], "always")
    words = [
        *(*WORDS[family], *([f"model.L={column.sizes[0]}"] if family == "amoebanet" else [])),
        *(*OPTIMIZER, f"{key}={column.sizes[-1]}", "plan.format=json"),
        *(f"pipeline.K={column.K}", f"pipeline.M={M}", f"pipeline.remat={remat}"),
    ]
    say(f"gpipe-plan {' '.join(words)}")
    plan = json.loads(run_command("gpipe-plan", words))
    row: Row = {"model": family, "devices": column.K, "how": "naive" if column.naive else "pipeline", "planned": plan}
    row |= {"paper: size": size_text(family, column.sizes), "paper: parameters": big(column.parameters)}
    row |= {"its GB a device": plan["memory"] / GB, "of": plan["limit"] / GB, "fits": "yes" if plan["fits"] else "no"}
    if not quick:
        say(f"  and the largest {key} that fits, by steps of {step}")
        grown = json.loads(run_command("gpipe-plan", [*words, f"plan.grow={key}", f"plan.grow_by={step}"]))
        size = grown["found"][key]
        sizes = (*column.sizes[:-1], size)
        row |= {"ours: size": size_text(family, sizes), "ours: parameters": big(grown["parameters"]), "grown": grown}
    return row


def size_text(family: str, sizes: Sequence[int]) -> str:
    return f"({sizes[0]},{sizes[1]})" if family == "amoebanet" else f"L={sizes[0]}"


def big(parameters: float) -> str:
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"
