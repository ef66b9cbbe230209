"""Makes table 1: the largest models that fit, by gpipe-plan for the paper's devices, and by real steps on this machine.

Imports no torch. Each real trial has processes of its own: one that runs out of memory ends its workers, which may wait
for each other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from gpipe_cli.launch.report import WorkerOutOfMemory
from gpipe_cli.planner.devices import parse_bytes

from ...svg import Curve
from ..options import BenchOptions
from ..paper import TABLE_1, Capacity
from ..workers import run_command, run_workers
from .table import Say, Table

WORKER = "gpipe_cli.bench.capacity:worker"
GB = 1e9
MEASURED_M = 8
ROWS = ((1, True), (1, False), (2, False))  # (K, naive) of the real steps
NARROW, WIDE, WIDE_FROM = 128, 1024, GB  # d_model, and the budget from which on it is the wider one
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
COLUMNS = dict.fromkeys(("model", "devices", "how", "paper: size", "paper: parameters"), "")
COLUMNS |= {"its GB a device": ".3f", "of": ".3f", "fits": "", "ours: size": "", "ours: parameters": ""}


def capacity_table(number: int, options: BenchOptions, say: Say) -> Table:
    """Makes rows by the planner, then rows by real steps.

    Raises:
        ConfigurationError: a memory budget that is no size.
        WorkerFailed: a real step failed, and not for want of memory.
        CommandFailed: gpipe-plan refused.
    """
    budget = options.memory and parse_bytes(options.memory, "memory")
    planned = [
        plan_column(family, column, options.quick, say) for family in options.models for column in TABLE_1[family]
    ]
    measured = measure(budget, options, say) if budget else []
    return Table(
        "table1",
        "Table 1: the largest models that fit",
        COLUMNS,
        [*map(planned_row, planned), *map(measured_row, measured)],
        notes(measured),
        {"planned": planned, "measured": measured},
        curves_of(planned, measured),
        axes=("devices", "parameters"),
        logarithmic=True,
    )


# -- by the planner ----------------------------------------------------------------------------------------------------


def plan_column(family: str, column: Capacity, quick: bool, say: Say) -> dict[str, Any]:
    """Plans one column of the paper's table: the paper's own size, and unless ``quick`` the largest that fits."""
    key = f"model.{GROWN[family]}"
    M, remat = (1, "never") if column.naive else (MICRO_BATCHES[family], "always")
    words = [
        *(*WORDS[family], *([f"model.L={column.sizes[0]}"] if family == "amoebanet" else [])),
        *(f"plan.bytes_per_parameter={BYTES_PER_PARAMETER}", f"{key}={column.sizes[-1]}"),
        *(f"pipeline.K={column.K}", f"pipeline.M={M}", f"pipeline.remat={remat}"),
    ]
    return {
        "family": family,
        "K": column.K,
        "naive": column.naive,
        "paper": {"sizes": column.sizes, "parameters": column.parameters},
        "at_paper": plan(words, say),
        "largest": None if quick else plan([*words, f"plan.grow={key}"], say),
    }


def plan(words: list[str], say: Say) -> dict[str, Any]:
    """Returns the figures of gpipe-plan that table 1 needs."""
    say(f"gpipe-plan {' '.join(words)}")
    found = json.loads(run_command("gpipe-plan", [*words, "plan.format=json"]))
    names = ("K", "M", "remat", "parameters", "memory", "limit", "fits", "found", "weight_bytes", "activation_bytes")
    return {name: found[name] for name in names}


def planned_row(row: dict[str, Any]) -> dict[str, Any]:
    """Returns one row by the planner: the paper's own size, and the largest that fits."""
    family, paper, at_paper, largest = row["family"], row["paper"], row["at_paper"], row["largest"]
    shown = {"model": family, "devices": row["K"], "how": how(row), "paper: size": size_text(family, paper["sizes"])}
    shown |= {"paper: parameters": big(paper["parameters"]), "fits": "yes" if at_paper["fits"] else "no"}
    shown |= {"its GB a device": at_paper["memory"] / GB, "of": at_paper["limit"] / GB}
    if largest:
        sizes = (*paper["sizes"][:-1], largest["found"][f"model.{GROWN[family]}"])
        shown |= {"ours: size": size_text(family, sizes), "ours: parameters": big(largest["parameters"])}
    return shown


# -- by real steps -----------------------------------------------------------------------------------------------------


def measure(budget: int, options: BenchOptions, say: Say) -> list[dict[str, Any]]:
    """Measures one row for each of `ROWS` with so many bytes for each worker."""
    texts, width = options.batch or 32, NARROW if budget < WIDE_FROM else WIDE
    rows = []
    for K, naive in ROWS:
        M, remat = (1, "never") if naive else (min(MEASURED_M, texts), "always")
        say(f"real steps on this machine, {budget / GB:.3g} GB a worker, K={K}, {'naive' if naive else 'pipeline'}")
        trial = {"width": width, "texts": texts, "M": M, "remat": remat, "budget": budget}
        rows.append({"K": K, "naive": naive, **trial, "found": search(K, trial, say)})
    return rows


def search(K: int, trial: dict[str, Any], say: Say) -> dict[str, Any] | None:
    """Returns ``L``, ``peak`` and ``parameters`` of the largest model that fits; None where not even L=1 does."""
    found: dict[int, dict[str, int]] = {}

    def fits(L: int) -> bool:
        try:
            found[L] = run_workers(WORKER, K, {**trial, "L": L}, ("gpipe_cli.bench.capacity",))
        except WorkerOutOfMemory:
            say(f"  L={L}: does not fit")
            return False
        say(f"  L={L}: {found[L]['peak'] / GB:.3f} GB")
        return True

    L = largest(fits)
    return {"L": L, **found[L]} if L else None


def largest(fits: Callable[[int], bool]) -> int:
    """Returns the largest number that fits, 0 where 1 does not; where a number fits, so do all smaller ones."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def measured_row(row: dict[str, Any]) -> dict[str, Any]:
    """Returns one row by real steps."""
    found = row["found"]
    shown = {"model": measured_name(row), "devices": row["K"], "how": how(row), "of": row["budget"] / GB}
    if not found:
        return {**shown, "ours: size": "not even L=1"}
    largest = {"ours: size": f"L={found['L']}", "ours: parameters": big(found["parameters"])}
    return {**shown, "its GB a device": found["peak"] / GB, **largest}


def measured_name(row: dict[str, Any]) -> str:
    return f"transformer, d_model {row['width']}, measured"


# -- both --------------------------------------------------------------------------------------------------------------


def curves_of(planned: Sequence[dict[str, Any]], measured: Sequence[dict[str, Any]]) -> list[Curve]:
    """Returns parameters over devices: the paper's, planned and measured ones, naive ones as single points."""
    points = [(row, row["family"], "paper", "paper", row["paper"]) for row in planned]
    points += [(row, row["family"], "ours, planned", "ours", row["largest"]) for row in planned]
    for row in measured:
        points.append((row, measured_name(row), "ours", "ours", row["found"]))
    lines: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for row, panel, label, role, figures in points:
        if figures is not None:
            naive = (f"{label}, naive", "peer" if role == "ours" else "limit")
            place = (panel, *(naive if row["naive"] else (label, role)))
            lines.setdefault(place, []).append((float(row["K"]), float(figures["parameters"])))
    return [Curve(panel, label, role, found) for (panel, label, role), found in lines.items()]


def how(row: dict[str, Any]) -> str:
    return "naive" if row["naive"] else "pipeline"


def size_text(family: str, sizes: Sequence[int]) -> str:
    return f"({sizes[0]},{sizes[1]})" if family == "amoebanet" else f"L={sizes[0]}"


def big(parameters: float) -> str:
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"


def notes(measured: Sequence[dict[str, Any]]) -> list[str]:
    said = [
        f"Planned by gpipe-plan for the paper's devices with {BYTES_PER_PARAMETER} bytes a parameter. naive: M=1, "
        "nothing recomputed; pipeline: remat always, micro-batches of one example. docs/tables.md says more.",
        "its GB a device: memory that the paper's own size needs by this plan, on the fullest device. ours: the "
        "largest that fits; of AmoebaNet the width D grows at the paper's L.",
    ]
    if measured:
        row = measured[-1]
        said.append(
            f"Measured, {row['budget'] / GB:.3g} GB a worker: a real step with an update by RMSProp (16 bytes a "
            f"parameter with the gradient) of a Transformer-L with d_model {row['width']}, {row['texts']} texts, "
            f"M={row['M']} where pipelined. All bytes of tensors alive count; a tensor beyond the budget is refused."
        )
    return said
