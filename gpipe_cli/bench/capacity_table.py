"""Table 1: the largest models that fit, by the planner for the paper's devices, and by real steps on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from .capacity_search import GB, LARGEST_L, NARROW, measure, read_memory
from .options import BenchOptions
from .paper import TABLE_1, Capacity
from .tables import Curve, Say, Table

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
BYTES_PER_PARAMETER = 12  # the paper's, with RMSProp: weight, mean square, momentum
MICRO_BATCHES = {"amoebanet": 128, "transformer": 32}  # not stated: a micro-batch of one example, as in torchgpipe's
GROWN = {"amoebanet": "D", "transformer": "L"}


class PlanFailed(RuntimeError):
    """gpipe-plan ended with an error; the message is its own."""


@dataclass(frozen=True)
class Planned:
    """One column of the paper's table.

    Attributes:
        at_paper: the plan of the paper's own size.
        largest: the plan of the largest size that fits; None with ``quick``.
    """

    family: str
    column: Capacity
    at_paper: dict[str, Any]
    largest: dict[str, Any] | None

    def facts(self) -> dict[str, Any]:
        return {
            "family": self.family,
            "K": self.column.K,
            "naive": self.column.naive,
            "paper": {"sizes": self.column.sizes, "parameters": self.column.parameters},
            "at_paper": summary(self.at_paper),
            "largest": None if self.largest is None else summary(self.largest),
        }


def capacity_table(number: int, options: BenchOptions, say: Say) -> Table:
    """Rows by the planner, then rows by real steps.

    Raises:
        ConfigurationError: a memory budget that is no size.
        WorkerFailed: a real step failed, and not for want of memory.
        PlanFailed: gpipe-plan refused.
    """
    budgets = read_memory(options.memory)
    planned = [
        plan_column(family, column, options.quick, say) for family in options.models for column in TABLE_1[family]
    ]
    measured = [row for budget in budgets for row in measure(budget, options, say)]
    columns = ["model", "devices", "how", "paper: size", "paper: parameters", "its GB a device", "of", "fits"]
    columns += ["ours: size", "ours: parameters"]
    rows = [planned_row(row) for row in planned] + [measured_row(row) for row in measured]
    facts = {"planned": [row.facts() for row in planned], "measured": measured}
    return Table(
        "table1",
        "Table 1: the largest models that fit",
        columns,
        rows,
        notes(options, measured),
        facts,
        curves=curves_of(planned, measured),
        axes=("devices", "parameters"),
        logarithmic=True,
    )


def plan_column(family: str, column: Capacity, quick: bool, say: Say) -> Planned:
    words = words_of(family, column)
    at_paper = plan([*words, f"model.{GROWN[family]}={column.sizes[-1]}"], say)
    if quick:
        return Planned(family, column, at_paper, None)
    start = f"model.{GROWN[family]}={column.sizes[-1]}"
    return Planned(family, column, at_paper, plan([*words, start, f"plan.grow=model.{GROWN[family]}"], say))


def words_of(family: str, column: Capacity) -> list[str]:
    """For gpipe-plan: the paper's model, device and way to train."""
    M, remat = (1, "never") if column.naive else (MICRO_BATCHES[family], "always")
    L = [f"model.L={column.sizes[0]}"] if family == "amoebanet" else []
    return [
        *(*WORDS[family], *L, f"plan.bytes_per_parameter={BYTES_PER_PARAMETER}"),
        *(f"pipeline.K={column.K}", f"pipeline.M={M}", f"pipeline.remat={remat}"),
    ]


def plan(words: list[str], say: Say) -> dict[str, Any]:
    """What gpipe-plan answers.

    Raises:
        PlanFailed: it refuses.
    """
    say(f"gpipe-plan {' '.join(words)}")
    command = [sys.executable, "-m", "gpipe_cli.commands.plan", *words, "plan.format=json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PlanFailed(f"gpipe-plan {' '.join(words)} ended with {done.returncode}:\n{done.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def summary(plan: dict[str, Any]) -> dict[str, Any]:
    names = ("K", "M", "remat", "parameters", "memory", "limit", "fits", "found", "weight_bytes", "activation_bytes")
    return {name: plan[name] for name in names}


def planned_row(row: Planned) -> list[object]:
    column, at_paper, largest = row.column, row.at_paper, row.largest
    key = f"model.{GROWN[row.family]}"
    size = None if largest is None else size_text(row.family, (*column.sizes[:-1], largest["found"][key]))
    return [
        *(row.family, column.K, "naive" if column.naive else "pipeline", size_text(row.family, column.sizes)),
        *(big(column.parameters), f"{at_paper['memory'] / GB:.2f}", f"{at_paper['limit'] / GB:.2f}"),
        *("yes" if at_paper["fits"] else "no", size, None if largest is None else big(largest["parameters"])),
    ]


def measured_row(row: dict[str, Any]) -> list[object]:
    found = row["found"]
    more = " or more" if found is not None and found["or_more"] else ""
    size = "not even L=1" if found is None else f"L={found['L']}{more}"
    return [
        *(f"{_width(row)} transformer, measured", row["K"], "naive" if row["naive"] else "pipeline", None, None),
        *(None if found is None else f"{found['peak'] / GB:.3f}", f"{row['budget'] / GB:.3f}", None, size),
        None if found is None else big(found["parameters"]) + more,
    ]


def _width(row: dict[str, Any]) -> str:
    return "narrow" if row["width"] == NARROW else "wide"


def curves_of(planned: list[Planned], measured: list[dict[str, Any]]) -> list[Curve]:
    """Parameters over devices: the paper's, ours by the planner, and of real steps; naive ones as single points.

    Where larger models than the largest that was tried may fit there is no point.
    """
    points: dict[tuple[str, str, str], list[tuple[float, float]]] = {}

    def add(panel: str, label: str, role: str, naive: bool, K: int, parameters: float) -> None:
        place = (panel, f"{label}, naive", "peer" if role == "ours" else "limit") if naive else (panel, label, role)
        points.setdefault(place, []).append((float(K), float(parameters)))

    for plan in planned:
        column = plan.column
        add(plan.family, "paper", "paper", column.naive, column.K, column.parameters)
        if plan.largest is not None:
            add(plan.family, "ours, planned", "ours", column.naive, column.K, plan.largest["parameters"])
    for budget in sorted({row["budget"] for row in measured}):
        for row in measured:
            if row["budget"] == budget and row["found"] is not None and not row["found"]["or_more"]:
                panel = f"{_width(row)}, {budget / GB:.3g} GB a worker"
                add(panel, "ours, measured", "ours", row["naive"], row["K"], row["found"]["parameters"])
    return [Curve(panel, label, role, found) for (panel, label, role), found in points.items()]


def size_text(family: str, sizes: tuple[int, ...]) -> str:
    return f"({sizes[0]},{sizes[1]})" if family == "amoebanet" else f"L={sizes[0]}"


def big(parameters: float) -> str:
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"


def notes(options: BenchOptions, measured: list[dict[str, Any]]) -> list[str]:
    said = [
        f"Planned by gpipe-plan for the paper's devices with {BYTES_PER_PARAMETER} bytes a parameter, mini-batches of "
        "32 texts of 1,024 tokens or 128 images of 224². naive: M=1, nothing recomputed; pipeline: remat always, "
        "micro-batches of one example.",
        "its GB a device: what the paper's own size needs by this plan, on the fullest device. ours: the largest that "
        "fits; of AmoebaNet the width D grows at the paper's L.",
        *(_how_measured(row) for row in measured if row["K"] > 1),
    ]
    if options.quick:
        said.append("quick: the largest sizes by the planner were not looked for.")
    return said


def _how_measured(row: dict[str, Any]) -> str:
    """Of the rows of one budget, of which this is the only one with several workers."""
    return (
        f"Measured, {row['budget'] / GB:.3g} GB a worker: a real step with an update by RMSProp (16 bytes a parameter "
        f"with the gradient) of a Transformer-L with d_model {row['width']} and H {4 * row['width']}, {row['texts']} "
        f"texts of {row['tokens']} tokens, M={row['M']} where pipelined. All bytes of tensors alive count, on the "
        "fullest worker; a tensor beyond the budget is refused. No deeper model than "
        f"L={LARGEST_L} is tried: where that fits, the row says `or more`."
    )
