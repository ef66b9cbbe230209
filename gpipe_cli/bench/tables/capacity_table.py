"""Makes table 1: the largest models that fit, by gpipe-plan for the paper's devices, and by real steps on this machine.

Imports no torch. Each real trial has processes of its own: one that runs out of memory ends its workers, which may wait
for each other.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from gpipe_cli.launch.report import WorkerOutOfMemory
from gpipe_cli.planner.devices import parse_bytes

from ..options import BenchOptions
from ..paper import TABLE_1, Capacity
from ..workers import run_workers
from .table import Curve, Say, Table

WORKER, MEMORY = "gpipe_cli.bench.capacity:worker", "gpipe_cli.bench.capacity:device_memory"
PRELOAD = ("gpipe_cli.bench.capacity",)
DEVICE = "device"  # in place of a size
GB = 1e9
MEASURED_M = 8
LARGEST_L = 512  # no larger one is tried; at width 128 it takes three minutes on a core
ROWS = ((1, True), (1, False), (2, False))  # (K, naive)
NARROW, WIDE, WIDE_FROM = 128, 1024, GB  # d_model, and the budget from which on it is the wider one
SHORT, LONG = 64, 1024  # tokens of a text; the paper's where a GPU's own memory is filled
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
    """Raised when gpipe-plan ends with an error; the message is its own."""


def capacity_table(number: int, options: BenchOptions, say: Say) -> Table:
    """Makes rows by the planner, then rows by real steps.

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
    titles = [*("model", "devices", "how", "paper: size", "paper: parameters", "its GB a device", "of", "fits")]
    titles += ["ours: size", "ours: parameters"]
    rows = [*map(planned_row, planned), *map(measured_row, measured)]
    return Table(
        "table1",
        "Table 1: the largest models that fit",
        dict.fromkeys(titles, ""),
        [dict(zip(titles, row, strict=True)) for row in rows],
        notes(options, measured),
        {"planned": planned, "measured": measured},
        curves_of(planned, measured),
        axes=("devices", "parameters"),
        logarithmic=True,
    )


def plan_column(family: str, column: Capacity, quick: bool, say: Say) -> dict[str, Any]:
    """Plans one column of the paper's table: the paper's own size, and unless ``quick`` the largest that fits."""
    key = f"model.{GROWN[family]}"
    words = [*words_of(family, column), f"{key}={column.sizes[-1]}"]
    at_paper = plan(words, say)
    return {
        "family": family,
        "K": column.K,
        "naive": column.naive,
        "paper": {"sizes": column.sizes, "parameters": column.parameters},
        "at_paper": at_paper,
        "largest": None if quick else plan([*words, f"plan.grow={key}"], say),
    }


def words_of(family: str, column: Capacity) -> list[str]:
    """Returns the words for gpipe-plan: the paper's model, device and way to train."""
    M, remat = (1, "never") if column.naive else (MICRO_BATCHES[family], "always")
    L = [f"model.L={column.sizes[0]}"] if family == "amoebanet" else []
    return [
        *(*WORDS[family], *L, f"plan.bytes_per_parameter={BYTES_PER_PARAMETER}"),
        *(f"pipeline.K={column.K}", f"pipeline.M={M}", f"pipeline.remat={remat}"),
    ]


def plan(words: list[str], say: Say) -> dict[str, Any]:
    """Returns the figures of gpipe-plan that table 1 needs.

    Raises:
        PlanFailed: gpipe-plan refuses.
    """
    say(f"gpipe-plan {' '.join(words)}")
    command = [sys.executable, "-m", "gpipe_cli.commands.plan", *words, "plan.format=json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PlanFailed(f"gpipe-plan {' '.join(words)} ended with {done.returncode}:\n{done.stderr.strip()[-2000:]}")
    found = json.loads(done.stdout)
    names = ("K", "M", "remat", "parameters", "memory", "limit", "fits", "found", "weight_bytes", "activation_bytes")
    return {name: found[name] for name in names}


def planned_row(row: dict[str, Any]) -> list[object]:
    """Returns the values of one column of the paper's table, in the order of the titles."""
    family, paper, at_paper, largest = row["family"], row["paper"], row["at_paper"], row["largest"]
    size = largest and size_text(family, (*paper["sizes"][:-1], largest["found"][f"model.{GROWN[family]}"]))
    return [
        *(family, row["K"], "naive" if row["naive"] else "pipeline", size_text(family, paper["sizes"])),
        *(big(paper["parameters"]), f"{at_paper['memory'] / GB:.2f}", f"{at_paper['limit'] / GB:.2f}"),
        *("yes" if at_paper["fits"] else "no", size, largest and big(largest["parameters"])),
    ]


def measured_row(row: dict[str, Any]) -> list[object]:
    """Returns the values of one measured row, in the order of the titles."""
    found = row["found"]
    more = " or more" if found is not None and found["or_more"] else ""
    size = "not even L=1" if found is None else f"L={found['L']}{more}"
    return [
        *(f"{_width(row)} transformer, measured", row["K"], "naive" if row["naive"] else "pipeline", None, None),
        *(found and f"{found['peak'] / GB:.3f}", f"{row['budget'] / GB:.3f}", None, size),
        found and big(found["parameters"]) + more,
    ]


def _width(row: dict[str, Any]) -> str:
    return "narrow" if row["width"] == NARROW else "wide"


def curves_of(planned: Sequence[dict[str, Any]], measured: Sequence[dict[str, Any]]) -> list[Curve]:
    """Returns parameters over devices: the paper's, planned and measured ones, naive ones as single points.

    There is no point where larger models than the largest that was tried may fit.
    """
    points = [(row, row["family"], "paper", "paper", row["paper"]) for row in planned]
    points += [(row, row["family"], "ours, planned", "ours", row["largest"]) for row in planned]
    for row in sorted(measured, key=lambda row: row["budget"]):
        panel, found = f"{_width(row)}, {row['budget'] / GB:.3g} GB a worker", row["found"]
        points.append((row, panel, "ours, measured", "ours", None if found and found["or_more"] else found))
    lines: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for row, panel, label, role, figures in points:
        if figures is not None:
            naive = (f"{label}, naive", "peer" if role == "ours" else "limit")
            place = (panel, *(naive if row["naive"] else (label, role)))
            lines.setdefault(place, []).append((float(row["K"]), float(figures["parameters"])))
    return [Curve(panel, label, role, found) for (panel, label, role), found in lines.items()]


def size_text(family: str, sizes: Sequence[int]) -> str:
    return f"({sizes[0]},{sizes[1]})" if family == "amoebanet" else f"L={sizes[0]}"


def big(parameters: float) -> str:
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"


def notes(options: BenchOptions, measured: Sequence[dict[str, Any]]) -> list[str]:
    said = [
        f"Planned by gpipe-plan for the paper's devices with {BYTES_PER_PARAMETER} bytes a parameter, mini-batches of "
        "32 texts of 1,024 tokens or 128 images of 224². naive: M=1, nothing recomputed; pipeline: remat always, "
        "micro-batches of one example.",
        "its GB a device: memory that the paper's own size needs by this plan, on the fullest device. ours: the "
        "largest that fits; of AmoebaNet the width D grows at the paper's L.",
        *(_how_measured(row) for row in measured if row["K"] > 1),
    ]
    if options.quick:
        said.append("quick: the largest sizes by the planner were not searched.")
    return said


def _how_measured(row: dict[str, Any]) -> str:
    """Describes the rows of one budget; ``row`` is the one with several workers."""
    return (
        f"Measured, {row['budget'] / GB:.3g} GB a worker: a real step with an update by RMSProp (16 bytes a parameter "
        f"with the gradient) of a Transformer-L with d_model {row['width']} and H {4 * row['width']}, {row['texts']} "
        f"texts of {row['tokens']} tokens, M={row['M']} where pipelined. All bytes of tensors alive count, on the "
        "fullest worker; a tensor beyond the budget is refused. No deeper model than "
        f"L={LARGEST_L} is tried: where that fits, the row says `or more`."
    )


def read_memory(words: Sequence[str]) -> list[int | None]:
    """Returns budgets in bytes; None stands for the memory of this machine's device.

    Raises:
        ConfigurationError: a word is neither a size nor `device`.
    """
    return [None if word == DEVICE else parse_bytes(word, "memory") for word in words]


def measure(typed: int | None, options: BenchOptions, say: Say) -> list[dict[str, Any]]:
    """Measures one row for each of `ROWS`.

    Args:
        typed: budget of a worker in bytes; None: the memory of this machine's device.
    """
    texts = options.batch or 32
    budget, tokens = (typed, SHORT) if typed is not None else device_budget()
    model = {"width": NARROW if budget < WIDE_FROM else WIDE, "tokens": tokens, "texts": texts}
    rows = []
    for K, naive in ROWS:
        M, remat = (1, "never") if naive else (min(MEASURED_M, texts), "always")
        say(f"real steps on this machine, {budget / GB:.3g} GB a worker, K={K}, {'naive' if naive else 'pipeline'}")
        trial = {**model, "M": M, "remat": remat, "budget": budget}
        rows.append({"K": K, "naive": naive, **trial, "found": search(K, trial, say)})
    return rows


def device_budget() -> tuple[int, int]:
    """Returns the bytes that this machine's device has for each worker, and the tokens of the texts to fill it with."""
    found = run_workers(MEMORY, 1, {"workers": max(K for K, _ in ROWS)}, PRELOAD)
    return found["budget"], LONG if found["kind"] == "cuda" else SHORT


def search(K: int, trial: dict[str, Any], say: Say, most: int = LARGEST_L) -> dict[str, Any] | None:
    """Returns ``L``, ``peak`` and ``parameters`` of the largest model that fits; None where not even L=1 does.

    ``or_more``: larger ones were not tried, and may fit too.
    """
    found: dict[int, dict[str, int]] = {}

    def peak_of(L: int) -> int | None:
        try:
            found[L] = run_workers(WORKER, K, {**trial, "L": L}, PRELOAD)
        except WorkerOutOfMemory:
            say(f"  L={L}: does not fit")
            return None
        say(f"  L={L}: {found[L]['peak'] / GB:.3f} GB")
        return found[L]["peak"]

    L = largest(peak_of, trial["budget"], most)
    return {"L": L, **found[L], "or_more": most == L} if L else None


def largest(peak_of: Callable[[int], int | None], budget: int, most: int) -> int:
    """Returns the largest number from 1 to ``most`` that fits; 0 where 1 does not.

    Args:
        peak_of: tries a number; returns the bytes that it took, None where they were more than the budget. Called once
            for any number; where a number fits, so do all smaller ones.
        budget: bytes.
    """
    peaks: list[tuple[int, int]] = []
    low, high, failures = 0, most + 1, 0
    while high - low > 1:
        guess = _guess(peaks, budget, low, high)
        if failures:  # the line was too optimistic: back from the failed number, farther each time
            guess = min(guess, high - 2 ** (failures - 1))
        guess = max(low + 1, min(guess, high - 1))
        peak = peak_of(guess)
        if peak is None:
            high, failures = guess, failures + 1
        else:
            low, failures = guess, 0
            peaks.append((guess, peak))
    return low


def _guess(peaks: list[tuple[int, int]], budget: int, low: int, high: int) -> int:
    """Returns where the line through the first and the last trial meets the budget, else doubles or halves.

    After one trial the line starts at the origin, so that the guess is rather too small than too large.
    """
    blind = min(2 * low, (low + high) // 2)
    if not peaks:
        return blind
    (a, peak_a), (b, peak_b) = peaks[0] if len(peaks) > 1 else (0, 0), peaks[-1]
    slope = (peak_b - peak_a) / (b - a)
    return int(b + (budget - peak_b) / slope) if slope > 0 else blind
