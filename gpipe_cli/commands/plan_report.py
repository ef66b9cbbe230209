"""Formats plans as text and tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpipe_cli.jobs.workers import plural
from gpipe_cli.schedule.picture import draw_text, legend
from gpipe_cli.schedule.simulate import BUBBLE_FORMULAS, simulate, unit_durations
from gpipe_cli.terminal.text import number, percent, text_table
from gpipe_cli.typed_section import shown

if TYPE_CHECKING:
    from gpipe_cli.planner.plan import Plan

WIDEST_PICTURE = 120  # characters
MOST_ROWS = 32


def found_lines(plan: Plan) -> list[str]:
    """Returns what a search has found, as words to type, and the next best; nothing for a plain plan."""
    if not plan.found:
        return []
    lines = [f"found after {plan.tried} plans: {words_of(plan.found)}"]
    if plan.rivals:
        rows = [[seconds_text(plan.step_seconds), size_text(plan.memory), "", _in_short(plan.found)]]
        for rival in plan.rivals:
            more = rival.step_seconds / plan.step_seconds - 1
            slower = f"{percent(more)} slower: {rival.why}" if more >= 0 else rival.why
            rows.append([seconds_text(rival.step_seconds), size_text(rival.memory), slower, _in_short(rival.keys)])
        lines += ["", text_table(["step", "memory", "", "pipeline"], rows)]
    return ["\n".join(lines)]


def _in_short(keys: Mapping[str, Any]) -> str:
    """Returns what distinguishes one pipeline from another; the cut follows from it."""
    short = {key.removeprefix("pipeline."): value for key, value in keys.items() if key != "pipeline.partition"}
    return f"{short.pop('schedule', '')} {words_of(short)}".strip()


def words_of(keys: Mapping[str, Any]) -> str:
    """Returns keys and values as they are typed."""
    return " ".join(f"{key}={str(value).replace(' ', '')}" for key, value in keys.items())


def describe(plan: Plan) -> str:
    """Returns the report of one plan: cells, memory, time, schedule, notes."""
    return "\n".join([*_head(plan), "", cells_table(plan), "", *_facts(plan), *_picture(plan), *_notes(plan)])


def _head(plan: Plan) -> list[str]:
    replicas = f" × {plan.replicas} replicas" if plan.replicas > 1 else ""
    return [
        f"{plan.parameters:,} parameters in {plural(plan.K, 'cell')} on {plural(plan.workers, 'device')}{replicas} "
        f"({plan.device.name}), M={plan.M}, {plan.schedule}, "
        + (f"remat {plan.remat}" if plan.keep is None else f"keep {shown(plan.keep)}"),
        f"a micro-batch: {', '.join(plan.micro_batch)}; a mini-batch: {plan.examples:,} examples",
    ]


def cells_table(plan: Plan) -> str:
    """Returns a table with one row per cell and the bytes of each kind."""
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
    fullest = max(plan.workers_plan, key=lambda worker: worker.total / worker.limit)
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    largest = sorted(fullest.by_kind.items(), key=lambda pair: -pair[1])[:3]
    kinds = ", ".join(f"{kind.replace('_', '-')} {size_text(size)}" for kind, size in largest if size)
    held = "weights, gradients, optimizer" + (", average" if any(cell.average for cell in plan.cells) else "")
    return [
        f"memory      {size_text(plan.memory)} on device {fullest.worker}, of {size_text(plan.limit)}: {verdict} "
        f"({held} {size_text(fullest.model)}, activations {size_text(fullest.activations)}"
        + (f": {kinds})" if kinds else ")"),
        f"busiest     device computes {percent(plan.busiest_over_mean)} longer than the mean",
        f"sent        {size_text(plan.sent_bytes)} between devices in a step",
        f"bubble      {percent(plan.bubble)} simulated{_by_formula(plan)}",
        f"step        {seconds_text(plan.step_seconds)}, {number(plan.examples_per_second, 3)} examples/s",
        f"bound       {_bound(plan)}",
    ]


def _bound(plan: Plan) -> str:
    if plan.bound_of_any_cut_seconds is None:
        return "no schedule fits, whatever the cut"
    any_cut = f"of any cut {seconds_text(plan.bound_of_any_cut_seconds)}"
    if plan.bound_seconds is None:
        return f"no schedule of this cut fits, {any_cut}"
    gap = f" (gap {percent(max(0.0, plan.step_seconds / plan.bound_seconds - 1))})" if plan.fits else ""
    return f"no schedule of this cut that fits can take less than {seconds_text(plan.bound_seconds)}{gap}, {any_cut}"


def _by_formula(plan: Plan) -> str:
    if plan.bubble_formula is None:
        return ""
    return f", {percent(plan.bubble_formula)} by {BUBBLE_FORMULAS[plan.schedule]}"


def _picture(plan: Plan) -> list[str]:
    """Returns the schedule drawn with one column per instruction, if it fits a terminal."""
    timeline = simulate(plan.lists, plan.timeline.placement, unit_durations)
    text = draw_text(timeline)
    lines = text.splitlines()
    if len(lines) > MOST_ROWS or max(map(len, lines)) > WIDEST_PICTURE:
        return []
    return ["", text, legend(timeline)]


def _notes(plan: Plan) -> list[str]:
    return [f"note: {note}" for note in plan.notes]


def size_text(size: float) -> str:
    """Returns bytes in units of a thousand: 12.3 GB."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            return f"{size:.3g} {unit}" if unit != "B" else f"{size:.0f} B"
        size /= 1000
    raise AssertionError


def seconds_text(seconds: float) -> str:
    """Returns seconds as 12.3 ms or 4.56 s."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"
