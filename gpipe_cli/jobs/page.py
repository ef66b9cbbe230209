"""Makes report.html of a run's directory: did it work, where did the time go, what would be faster, what was it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from gpipe_cli.disk import json_lines
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.jobs.configuration import composed
from gpipe_cli.terminal.document import Block, Code, Document, Facts, Grid, Heading, Lines, Picture
from gpipe_cli.terminal.runs import FinishedRun, read_run
from gpipe_cli.terminal.text import duration, number, percent, relative_paths, seconds_text, size_text
from gpipe_cli.typed_section import flat, shown, typed

PAGE, PLAN = "report.html", "plan.json"
TAIL = 1 << 20  # bytes at the end of a file of rows, which are read while it grows
SEARCH_SHARE, SEARCH_SECONDS = 0.1, (6.0, 120.0)  # of a run's time for the planner; not below, and not above
WORTH_IT = 0.02  # a plan that is less faster is none
ALT = {
    "predictions.png": "Images of the evaluation set with the predicted classes",
    "confusion.png": "Confusion matrix: how often each true class was predicted as which",
    "languages.png": "BLEU of each language, from the most to the least training data",
}
TIMES = ("forward", "recompute", "backward", "input_gradient", "weight_gradient", "waiting", "sending")


def write_page(folder: Path, warn: Callable[[str], None], running: bool = False) -> None:
    """Writes the page anew; what goes wrong is a warning, because the page must not end a run."""
    try:
        run_page(folder, running).save(folder / PAGE)
    except Exception as error:
        warn(f"{folder / PAGE} is not written ({type(error).__name__}: {error}); the run goes on without")


def ask_planner(folder: Path, seconds: float) -> bool:
    """Lets the planner search for a faster pipeline, after a run and for at most a tenth of its time.

    Args:
        seconds: that the run took.

    Returns:
        Whether it has found anything in time.
    """
    limit, quiet = min(SEARCH_SHARE * seconds, SEARCH_SECONDS[1]), subprocess.DEVNULL
    if limit >= SEARCH_SECONDS[0]:
        command = [sys.executable, "-m", "gpipe_cli.commands.advice", str(folder)]
        with suppress(OSError, subprocess.SubprocessError, KeyboardInterrupt):
            subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, timeout=limit, check=False)
    return (folder / PLAN).exists()


def run_page(folder: Path, running: bool = False) -> Document:
    """Returns the page of a run, from the files that it has left so far.

    Args:
        running: summary.json, if it is there, is that of the run which this one continues.
    """
    rows, evaluations = _first_and_last(folder / "metrics.jsonl"), _last_rows(folder / "evaluations.jsonl")
    summary = {} if running else _json(folder / "summary.json")
    run, plan = read_run(folder, running), _json(folder / PLAN)
    blocks: list[Block] = [
        *_did_it_work(folder, run, summary, rows, evaluations),
        *_where_time_went(folder, summary, rows, plan),
        *_what_would_be_faster(run, plan),
        *_what_it_was(run, summary),
    ]
    return Document(f"{folder.absolute().name}: {run.outcome}", blocks)


def _did_it_work(
    folder: Path, run: FinishedRun, summary: Mapping[str, Any], rows: Sequence[Any], evaluations: Sequence[Any]
) -> Iterator[Block]:
    yield Heading("Did it work")
    first, last = (rows[0], rows[-1]) if rows else ({}, {})
    speed = summary.get("examples_per_second", last.get("examples_per_second"))
    lost = [number(row.get("loss")) for row in (first, {**last, **summary})]
    wall, ended = summary.get("wall_seconds"), summary.get("stopped_by")
    yield Facts(
        [
            ("state", run.outcome + (f" ({ended})" if ended and ended != "steps" else "")),
            (
                "loss",
                " → ".join(lost) if rows else None,
            ),
            ("steps", summary.get("steps", last.get("step"))),
            ("time", wall and duration(wall)),
            ("speed", speed and f"{number(speed, 3)} examples/s"),
            ("skipped", summary.get("skipped_updates", last.get("skipped_updates")) or None),
            ("restarts", len(summary.get("restarts") or ()) or None),
        ]
    )
    if evaluations:
        begun, now = evaluations[0], evaluations[-1]
        names = [name for name, value in now.items() if isinstance(value, float) and "/" not in name]
        columns = [
            "evaluation",
            f"after step {begun['step']:,}",
            *([f"after step {now['step']:,}"] * (begun is not now)),
        ]
        both = [begun, *([now] * (begun is not now))]
        yield Grid(columns, [[name, *(each.get(name) for each in both)] for name in names])
    yield from _pictures(folder, "loss.svg", *ALT)
    for sample in (evaluations[-1].get("samples") or ()) if evaluations else ():
        yield Facts(list(sample.items()))


def _where_time_went(
    folder: Path, summary: Mapping[str, Any], rows: Sequence[Any], plan: Mapping[str, Any]
) -> Iterator[Block]:
    yield Heading("Where did the time go")
    last: Mapping[str, Any] = next((row for row in reversed(rows) if "cells" in row), {})
    own: Mapping[str, Any] = plan.get("own") or {}
    traced = sorted(path.name for path in (folder / "pictures").glob("step_*.svg"))
    yield from _pictures(folder, traced[-1] if traced else "step.svg", "breakdown.svg")
    measured, same = (summary.get(key, last.get(key)) for key in ("bubble", "bubble_predicted"))
    yield Facts(
        [
            ("bubble, measured", measured and percent(measured)),
            ("bubble, planned with the same durations", same and percent(same)),
            ("bubble, planned from the layers", percent(own["bubble"]) if own else None),
            ("a step, measured", seconds_text(last["seconds"]) if last else None),
            ("a step, planned from the layers", seconds_text(own["step_seconds"]) if own else None),
            ("waited for data", percent(last["waiting_for_data_share"]) if last else None),
        ]
    )
    cells = summary.get("cells") or [{"cell": k, "seconds": times} for k, times in enumerate(last.get("cells", ()))]
    yield from _cells(cells)
    yield from _memory(last.get("workers", ()), own.get("devices") or (), summary.get("device", "cpu"))


def _cells(cells: Sequence[Mapping[str, Any]]) -> Iterator[Block]:
    """Yields the table of the cells: layers, and milliseconds of a step."""
    times = [name for name in TIMES if any((cell.get("seconds") or {}).get(name) for cell in cells)]
    facts = [key for key in ("cell", "worker", "layers", "first", "last", "parameters") if cells and key in cells[0]]
    rows = [
        [*(cell[key] for key in facts), *(f"{1e3 * (cell.get('seconds') or {}).get(name, 0.0):,.1f}" for name in times)]
        for cell in cells
    ]
    if rows:
        yield Grid([*facts, *(f"{name.replace('_', ' ')} ms" for name in times)], rows)


def _memory(workers: Sequence[Mapping[str, Any]], planned: Sequence[Mapping[str, Any]], device: str) -> Iterator[Block]:
    rows = [
        [
            rank,
            *([size_text(planned[rank % len(planned)]["total"])] if planned else []),
            size_text(worker["memory_bytes"]),
        ]
        for rank, worker in enumerate(workers)
    ]
    if rows:
        yield Grid(["worker", *(["memory planned"] if planned else []), "memory used"], rows)
        if device == "cpu":
            yield Lines(
                ["Used is all that a process holds, Python's and torch's libraries included; planned is without."]
            )


def _what_would_be_faster(run: FinishedRun, plan: Mapping[str, Any]) -> Iterator[Block]:
    yield Heading("What would make it faster")
    best = plan.get("best")
    if not best:
        ask = ["gpipe-plan", *run.words, "plan.device=this", "plan.best=true", f"plan.devices={run.workers or 1}"]
        yield Lines(["The planner found nothing in its time, a tenth of the run's. To search, type:"])
        yield Code([shlex.join(ask)])
        return
    own, gain = plan["own"]["step_seconds"], 1 - best["step_seconds"] / plan["own"]["step_seconds"]
    if gain < WORTH_IT:
        yield Lines(
            [f"The planner found nothing that saves {percent(WORTH_IT)} of a step, among {best['tried']} plans."]
        )
        return
    kept = [word for word in run.words if word.partition("=")[0] not in best["found"]]
    keys = [f"{key}={typed(value)}" for key, value in best["found"].items()]
    both = f"{seconds_text(own)} now, {seconds_text(best['step_seconds'])}"
    yield Lines([f"It saves {percent(gain)} of a step, as planned ({both}), to type:"])
    yield Code([shlex.join(["gpipe-train", *kept, *keys])])
    rivals = [
        [seconds_text(each["step_seconds"]), size_text(each["memory"]), each["why"], _in_short(each["keys"])]
        for each in best["rivals"]
    ]
    if rivals:
        yield Grid(["step", "memory", "slower because of", "next best"], rivals)


def _in_short(keys: Mapping[str, Any]) -> str:
    """Returns what distinguishes one pipeline from another; the cut follows from it."""
    short = {key.removeprefix("pipeline."): typed(value) for key, value in keys.items() if key != "pipeline.partition"}
    return " ".join(f"{key}={value}" for key, value in short.items())


def _what_it_was(run: FinishedRun, summary: Mapping[str, Any]) -> Iterator[Block]:
    yield Heading("What it was")
    yield Lines(["Keys that differ from the defaults:"])
    yield Grid(["key", "value", "default"], _differences(run) or [["none", "", ""]])
    versions = summary.get("versions") or {}
    yield Facts([(name, version) for name, version in versions.items()] + [("device", summary.get("device"))])
    folder, steps = relative_paths(str(run.folder)), run.settings.get("trainer.steps")
    own = ("checkpoint.resume=", "checkpoint.init_from=", *(["trainer.steps="] if steps else []))
    longer = ["gpipe-train", *(word for word in run.words if not word.startswith(own))]
    longer += [
        f"hydra.run.dir={typed(folder)}",
        "checkpoint.resume=auto",
        *([f"trainer.steps={2 * steps}"] if steps else []),
    ]
    elsewhere = [word for word in longer if not word.startswith("pipeline.K=")] + [
        f"pipeline.K={1 if run.K == 2 else 2}"
    ]
    yield Lines(
        ["To go on for twice as long, as it was or on another number of cells; to evaluate, export and compare:"]
    )
    others = (["gpipe-eval", folder], ["gpipe-export", folder, "output=model.safetensors"], ["gpipe-report", folder])
    yield Code([shlex.join(words) for words in (longer, elsewhere, *others)])


def _differences(run: FinishedRun) -> list[list[object]]:
    """Returns keys with another value than without any words; of another `_target_` all keys."""
    try:
        defaults = flat(OmegaConf.to_container(composed("train", [])))  # type: ignore[arg-type]
    except ConfigurationError:  # in a folder with YAML files of its own
        return [[word.partition("=")[0], word.partition("=")[2], ""] for word in run.words]
    return [
        [key, shown(value), shown(defaults[key]) if key in defaults else ""]
        for key, value in run.settings.items()
        if key not in defaults or defaults[key] != value
    ]


def _pictures(folder: Path, *names: str) -> Iterator[Block]:
    for name in names:
        path = folder / "pictures" / name
        if path.is_file():
            svg = path.suffix == ".svg"
            yield Picture(path.read_text(encoding="utf-8") if svg else path.read_bytes(), ALT.get(name, name))


def _json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def _first_and_last(path: Path) -> list[dict[str, Any]]:
    """Returns the first row of a file and its last ones: it may be long."""
    with suppress(OSError), path.open("rb") as file:
        first = [row for _, row in json_lines([file.readline()]) if row]
        return [*first, *_last_rows(path)]
    return []


def _last_rows(path: Path) -> list[dict[str, Any]]:
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        return [row for _, row in json_lines(file) if row is not None]
    return []
