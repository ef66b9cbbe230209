"""Makes report.html of a run's directory: its outcome, where its time went, a faster plan, its configuration."""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from html import unescape
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from gpipe_cli.disk import read_bytes
from gpipe_cli.jobs.trust import OURS, PATHS, SECTIONS
from gpipe_cli.json_files import DamagedJson, read_json, read_rows, skipped
from gpipe_cli.svg import Curve, Drawing, draw_shares, plot, running_means
from gpipe_cli.terminal.document import Block, Document, Facts, Grid, Image, Images, Lines
from gpipe_cli.terminal.evaluated import by_class, by_language
from gpipe_cli.terminal.runs import FinishedRun, read_run
from gpipe_cli.terminal.text import duration, number, percent, relative_paths, seconds_text, size_text
from gpipe_cli.typed_section import typed

PAGE, PLAN, CLASSES = "report.html", "plan.json", "classes.json"
WHOLE = 16 << 20  # bytes of a picture that are read at most
MOST_POINTS = 1_000  # of a curve; a picture has fewer pixels
MEASURED = 20  # last steps, for the median of their speeds
SPEEDS = ("tokens_per_second", "flops_per_second", "mfu")
WORTH_IT = 0.02  # share of a step that a faster plan must save to be shown
CELL = ("cell", "worker", "layers", "first", "last", "parameters")
TIMES = ("forward", "recompute", "backward", "input_gradient", "weight_gradient", "waiting", "sending")
Row = Mapping[str, Any]


def write_page(folder: Path, warn: Callable[[str], None], running: bool = False) -> None:
    """Writes report.html over an earlier one; an error becomes a warning, because the page must not end a run.

    Args:
        folder: the run directory.
        warn: gets the warning.
        running: True if the run has not ended.
    """
    try:
        run_page(folder, running).save(folder / PAGE)
    except Exception as error:
        warn(f"{folder / PAGE} is not written ({type(error).__name__}: {error}); the run goes on without")


def run_page(folder: Path, running: bool = False) -> Document:
    """Returns the page of a run, from the files that it has left so far.

    Args:
        running: the run has not ended, so a summary.json is that of the run which this one continues.
    """
    read = {name: read_rows(folder / name, MOST_POINTS) for name in ("metrics.jsonl", "evaluations.jsonl")}
    notes = [skipped(folder / name, damaged) for name, (_, damaged) in read.items() if damaged]
    (rows, _), (evaluations, _) = read.values()
    run, planned = read_run(folder, running), folder / PLAN
    plan: Row = {}
    with suppress(OSError, DamagedJson):  # the page then names the command that makes it anew
        plan = read_json(planned, dict[str, dict[str, Any]])
    parts = {
        "Did it work": chain(
            _did_it_work(run, rows), [Lines([] if running else notes)], _evaluated(folder, rows, evaluations)
        ),
        "Where did the time go": _where_time_went(run, rows, plan.get("own") or {}),
        "What would make it faster": _what_would_be_faster(run, plan),
        "What it was": _what_it_was(run),
    }
    blocks = [block for title, part in parts.items() for block in (Lines([title], "## "), *part)]
    return Document(f"{folder.absolute().name}: {run.outcome}", blocks)


def _did_it_work(run: FinishedRun, rows: Sequence[Row]) -> Iterator[Block]:
    """Yields the outcome: state, loss, steps, time and speed. ``rows`` are those of metrics.jsonl."""
    known = {name: value for name, value in run.summary.items() if value is not None}
    first, last = (rows[0], {**rows[-1], **known}) if rows else ({}, known)
    wall, speed, ended = (last.get(key) for key in ("wall_seconds", "examples_per_second", "stopped_by"))
    recent = {key: [row[key] for row in rows[-MEASURED:] if row.get(key)] for key in SPEEDS}
    tokens, flops, mfu = (median(values) if values else None for values in recent.values())
    yield Facts(
        [
            ("state", run.outcome + (f" ({ended})" if ended and ended != "steps" else "")),
            ("loss", f"{number(first.get('loss'))} → {number(last.get('loss'))}" if rows else None),
            ("steps", last.get("steps", last.get("step"))),
            ("time", wall and duration(wall)),
            ("speed", speed and f"{number(speed, 3)} examples/s"),
            ("", tokens and f"{number(tokens, 3)} tokens/s"),
            ("", flops and size_text(flops, "FLOP/s")),
            ("", mfu and f"MFU {percent(mfu)}"),
            ("skipped", last.get("skipped_updates") or None),
            ("restarts", len(last.get("restarts") or ()) or None),
        ]
    )


def _evaluated(folder: Path, rows: Sequence[Row], evaluations: Sequence[Row]) -> Iterator[Block]:
    """Yields the first and the last evaluation, loss, quality by language or class, and samples."""
    last = evaluations[-1] if evaluations else {}
    if last:
        shown = [*evaluations[:1], last] if len(evaluations) > 1 else [last]
        names = [name for name, value in last.items() if isinstance(value, float) and "/" not in name]
        columns = ["evaluation", *(f"after step {row['step']:,}" for row in shown)]
        yield Grid(columns, [[name, *(row.get(name) for row in shown)] for name in names])
    if rows:
        yield _draw_loss(rows, evaluations)
    bleu = {name.removeprefix("bleu/"): score for name, score in last.items() if name.startswith("bleu/")}
    if len(bleu) > 1:
        yield by_language(bleu, last)
    for sample in last.get("samples", ()):
        yield Facts(list(sample.items()))
    if (folder / CLASSES).is_file():
        yield from by_class(read_json(folder / CLASSES, dict[str, Any]))


def _draw_loss(rows: Sequence[Row], evaluations: Sequence[Row]) -> Drawing:
    """Draws the training loss of every step, a smoothed curve, and the loss of every evaluation."""
    trained = [(row["step"], row["loss"]) for row in rows if row.get("loss") is not None]
    smoothed = running_means([loss for _, loss in trained], 0.02)
    numbers = (name for row in evaluations for name, value in row.items() if isinstance(value, float))
    metric = next(numbers, "")  # the task's first metric is the loss
    points = [(row["step"], row[metric]) for row in evaluations if row.get(metric) is not None]
    curves = [
        Curve("", "training, each step", "raw", trained),
        Curve("", "training, smoothed", "smooth", list(zip((step for step, _ in trained), smoothed, strict=True))),
        *([Curve("", f"evaluation ({metric})", "paper", points)] * bool(points)),
    ]
    return plot(curves, ("step", "loss"), "Loss over the steps", from_zero=False)


def _where_time_went(run: FinishedRun, rows: Sequence[Row], own: Row) -> Iterator[Block]:
    """Yields the step as measured and as planned (``own``), the shares of its time, its cells and its memory."""
    last: Row = next((row for row in reversed(rows) if "cells" in row), {})
    summary, pictures = run.summary, run.folder / "pictures"
    for drawn in [*sorted(pictures.glob("step_*.svg"), reverse=True), *pictures.glob("step.svg")][:1]:
        svg = read_bytes(drawn, WHOLE)
        label = re.search(r' aria-label="([^"]*)"', svg.decode(errors="replace"))
        yield Images([Image(svg, unescape(label[1]) if label else drawn.stem)])
    measured, same, shares = (summary.get(key, last.get(key)) for key in ("bubble", "bubble_predicted", "breakdown"))
    if shares:
        yield draw_shares({"measured": shares}, "Where a step goes")
    compared = [
        ["bubble", percent(measured), percent(same), percent(own.get("bubble"))],
        ["a step", _time(last.get("seconds")), "", _time(own.get("step_seconds"))],
        ["its update", _time(last.get("update_seconds")), "", _time(own.get("update_seconds"))],
        ["waiting for data", percent(last.get("waiting_for_data_share")), "", ""],
    ]
    yield Grid(["", "measured", "planned with the same durations", "planned from the layers"], compared)
    cells = summary.get("cells") or [{"cell": cell, "seconds": of} for cell, of in enumerate(last.get("cells", ()))]
    spent = [cell["seconds"] or {} for cell in cells]
    times = [name for name in TIMES if any(seconds.get(name) for seconds in spent)]
    facts = [key for key in CELL if cells and key in cells[0]]
    table = [
        [*(cell[key] for key in facts), *(f"{1e3 * seconds.get(name, 0.0):,.1f}" for name in times)]
        for cell, seconds in zip(cells, spent, strict=True)
    ]
    if table:
        yield Grid([*facts, *(f"{name.replace('_', ' ')} ms" for name in times)], table)
    planned = [size_text(device["total"]) for device in own.get("devices", ())]
    memory = [
        [rank, planned[rank % len(planned)] if planned else None, size_text(worker["memory_bytes"])]
        for rank, worker in enumerate(last.get("workers", ()))
    ]
    if memory:
        yield Grid(["worker", "memory planned", "memory used"], memory)
        if summary.get("device", "cpu") == "cpu":
            yield Lines(["Both are with a process's own memory: Python, libraries; planned as half a GB."])


def _time(seconds: float | None) -> str:
    """Returns seconds in words, "-" without."""
    return seconds_text(seconds) if seconds else "-"


def _what_would_be_faster(run: FinishedRun, plan: Row) -> Iterator[Block]:
    """Yields what to type for a faster plan, or how to look for one. ``plan`` is the content of plan.json."""
    best = plan.get("best")
    if not best:
        yield Lines(["To let the planner search, type:"])
        yield Lines([shlex.join(["gpipe-report", relative_paths(str(run.folder))])], "```")
        return
    own, found = plan["own"]["step_seconds"], best["step_seconds"]
    if 1 - found / own < WORTH_IT:
        yield Lines([f"Nothing saves {percent(WORTH_IT)} of a step, among the planner's {best['tried']} plans."])
        return
    kept = [word for word in run.words if word.partition("=")[0] not in best["found"]]
    both = f"{seconds_text(own)} now, {seconds_text(found)}"
    yield Lines([f"It saves {percent(1 - found / own)} of a step, as planned ({both}), to type:"])
    yield Lines([shlex.join([*_train(run), *kept, *words_of(best["found"]).split()])], "```")
    yield beside_rivals(best)


def beside_rivals(best: Row) -> Grid:
    """Returns a grid of the pipeline that a search has found (`Plan.to_json`), and of its rivals."""
    rows = [[seconds_text(best["step_seconds"]), size_text(best["memory"]), "", _in_short(best["found"])]]
    for rival in best["rivals"]:
        more = rival["step_seconds"] / best["step_seconds"] - 1
        slower = f"{percent(more)} slower" if rival.get("fits", True) else "does not fit"
        sizes = [seconds_text(rival["step_seconds"]), size_text(rival["memory"])]
        rows.append([*sizes, slower, _in_short(rival["keys"])])
    return Grid(["step", "memory", "", "pipeline"], rows)


def _in_short(keys: Row) -> str:
    """Returns the keys that distinguish one pipeline from another, without the cut, which follows from them."""
    short = {key.removeprefix("pipeline."): value for key, value in keys.items() if key != "pipeline.partition"}
    return f"{short.pop('schedule', '')} {words_of(short)}".strip()


def words_of(keys: Row) -> str:
    """Returns keys and values as they are typed."""
    return " ".join(f"{key}={typed(value)}" for key, value in keys.items())


def _what_it_was(run: FinishedRun) -> Iterator[Block]:
    """Yields the command line, the versions, and what to type to go on, to evaluate and to export."""
    yield Lines([shlex.join([*_train(run), *run.words])], "```")
    versions = [*(run.summary.get("versions") or {}).items(), ("device", run.summary.get("device"))]
    folder = relative_paths(str(run.folder))
    yield Facts([*versions, ("every key", f"{folder}/.hydra/config.yaml")])
    if (sheet := run.folder / "pictures" / "augmented.png").is_file():
        yield Images([Image(read_bytes(sheet, WHOLE), "Images of the first step, as the network sees them")])
    yield Lines(["To go on for twice as long (at any pipeline.K), to evaluate, and to export the last checkpoint:"])
    named = {".".join(key.split(".")[:2]) for key, value in run.settings.items() if value is not None}
    trusted = [*_code_to_trust(run), *(f"data.{key}" for key in PATHS if f"data.{key}" in named)]
    evaluate = ["gpipe-eval", folder, *([f"trust=[{','.join(trusted)}]"] if trusted else [])]
    yield Lines([shlex.join(words) for words in (_longer(run, folder), evaluate, ["gpipe-export", folder])], "```")


def _train(run: FinishedRun) -> list[str]:
    """Returns the first words of the run's command: gpipe-train, and its --config-dir if there was one."""
    return ["gpipe-train", *(["--config-dir", run.config_dir] if run.config_dir else [])]


def _longer(run: FinishedRun, folder: str) -> list[str]:
    """Returns the command that continues the run for twice as many steps; the lr schedule may then change, too."""
    steps = run.settings.get("trainer.steps")
    own = ("checkpoint.resume=", "checkpoint.init_from=", *(["trainer.steps="] if steps else []))
    words = [*_train(run), *(word for word in run.words if not word.startswith(own))]
    words += [f"hydra.run.dir={typed(folder)}", "checkpoint.resume=auto"]
    if steps:
        words += [f"trainer.steps={2 * steps}", "checkpoint.allow_changes=[lr_schedule,trainer.steps]"]
    return words


def _code_to_trust(run: FinishedRun) -> list[str]:
    """Returns the names of the user's own code in the run's `_target_`s.

    A command that reads the run's checkpoint calls this code only if `trust=` names it.
    """
    found = (value for key, value in run.settings.items() if key.split(".")[0] in SECTIONS and "_target_" in key)
    return list(dict.fromkeys(str(value) for value in found if value not in OURS))
