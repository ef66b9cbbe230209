"""A plan in words and tables, for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gpipe_cli.commands.text import number, percent, text_table
from gpipe_cli.pipeline.picture import draw_text, legend
from gpipe_cli.pipeline.simulate import BUBBLE_FORMULAS, simulate, unit_durations

if TYPE_CHECKING:
    from gpipe_cli.planner.answer import Answer
    from gpipe_cli.planner.plan import Plan

WIDEST_PICTURE = 120  # characters
MOST_ROWS = 32


def describe(plan: Plan) -> str:
    """Everything worth reading of one plan."""
    return "\n".join([*_head(plan), "", cells_table(plan), "", *_facts(plan), *_picture(plan), *_notes(plan)])


def _head(plan: Plan) -> list[str]:
    replicas = f" × {plan.replicas} replicas" if plan.replicas > 1 else ""
    return [
        f"{plan.parameters:,} parameters in {plan.K} cells on {plan.workers} devices{replicas} ({plan.device.name}), "
        f"M={plan.M}, {plan.schedule}, remat {plan.remat}",
        f"a micro-batch: {', '.join(plan.micro_batch)}; a mini-batch: {plan.examples:,} examples",
    ]


def cells_table(plan: Plan) -> str:
    """One row a cell, with the bytes of each kind."""
    average = any(cell.average for cell in plan.cells)
    columns = ["cell", "device", "layers", "from", "to", "parameters", "GFLOP", "time"]
    columns += ["weights", "gradients", "optimizer", *(["average"] if average else []), "inputs", "working", "total"]
    rows: list[list[object]] = []
    for cell in plan.cells:
        sizes = [cell.weights, cell.gradients, cell.optimizer, *([cell.average] if average else [])]
        rows.append(
            [
                *(cell.cell, cell.worker, cell.layers, cell.first, cell.last, cell.parameters),
                *(round(cell.flops / 1e9, 3), percent(cell.share)),
                *(size_text(size) for size in (*sizes, cell.inputs, cell.working, cell.total)),
            ]
        )
    return text_table(columns, rows)


def _facts(plan: Plan) -> list[str]:
    fullest = max(plan.workers_plan, key=lambda worker: worker.total)
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    lines = [
        f"memory      {size_text(plan.memory)} on device {fullest.worker}, of {size_text(plan.limit)}: {verdict} "
        f"(weights, gradients, optimizer {size_text(fullest.model)}, activations {size_text(fullest.activations)})",
        f"slowest     cell is {percent(plan.slowest_over_mean)} above the mean",
        f"sent        {size_text(plan.sent_bytes)} between devices in a step",
        f"bubble      {percent(plan.bubble)} simulated{_by_formula(plan)}",
        f"step        {seconds_text(plan.step_seconds)}, {number(plan.examples_per_second, 3)} examples/s",
    ]
    if plan.better_cut is not None:
        sizes = ",".join(map(str, plan.better_cut))
        gain = percent(plan.better_cut_gain)
        lines.insert(2, f"better cut  pipeline.partition=[{sizes}] makes the slowest cell {gain} faster")
    return lines


def _by_formula(plan: Plan) -> str:
    if plan.bubble_formula is None:
        return ""
    return f", {percent(plan.bubble_formula)} by {BUBBLE_FORMULAS[plan.schedule]}"


def _picture(plan: Plan) -> list[str]:
    """The order of work, each instruction one column wide, where a terminal can show it."""
    timeline = simulate(plan.lists, plan.timeline.placement, unit_durations)
    text = draw_text(timeline)
    lines = text.splitlines()
    if len(lines) > MOST_ROWS or max(map(len, lines)) > WIDEST_PICTURE:
        return ["", "the schedule is too large for a terminal: plan.picture=FILE.svg draws it"]
    return ["", text, legend(timeline)]


def _notes(plan: Plan) -> list[str]:
    return [f"note: {note}" for note in plan.notes]


def sweep_table(typed: Sequence[Mapping[str, str]], answers: Sequence[Answer]) -> str:
    """One row a plan: the keys that differ, those that were looked for, and what comes of them.

    Args:
        typed: of each job, the values of the keys that are swept over.
        answers: of each job.
    """
    keys = list(dict.fromkeys(key for given in (*typed, *(answer.found for answer in answers)) for key in given))
    columns = [key.removeprefix("pipeline.") for key in keys]
    columns += ["parameters", "memory", "fits", "bubble", "formula", "slowest", "sent", "step", "examples/s"]
    rows = [[*(_value(key, *row) for key in keys), *_figures(row[1].plan)] for row in zip(typed, answers, strict=True)]
    return text_table(columns, rows)


def _value(key: str, typed: Mapping[str, str], answer: Answer) -> object:
    """What was found; else what was typed; else, where only other jobs looked for it, the plan's."""
    if key in answer.found:
        return answer.found[key]
    return typed.get(key, getattr(answer.plan, key.removeprefix("pipeline."), None))


def _figures(plan: Plan) -> list[object]:
    return [
        plan.parameters,
        size_text(plan.memory),
        "yes" if plan.fits else "no",
        *(percent(plan.bubble), percent(plan.bubble_formula), f"+{percent(plan.slowest_over_mean)}"),
        *(size_text(plan.sent_bytes), seconds_text(plan.step_seconds), number(plan.examples_per_second, 3)),
    ]


def sweep_notes(typed: Sequence[Mapping[str, str]], answers: Sequence[Answer]) -> list[str]:
    """The notes of all plans, each once; with the jobs that it belongs to, unless these are all."""
    jobs: dict[str, list[str]] = {}
    for given, answer in zip(typed, answers, strict=True):
        for note in dict.fromkeys(answer.plan.notes):
            jobs.setdefault(note, []).append(" ".join(f"{key}={value}" for key, value in given.items()))
    return [
        f"note: {note}" if len(whose) == len(answers) else f"note on {', '.join(whose)}: {note}"
        for note, whose in jobs.items()
    ]


def size_text(size: float) -> str:
    """Bytes in units of a thousand: 12.3 GB."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            return f"{size:.3g} {unit}" if unit != "B" else f"{size:.0f} B"
        size /= 1000
    raise AssertionError


def seconds_text(seconds: float) -> str:
    """12.3 ms, 4.56 s."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"
