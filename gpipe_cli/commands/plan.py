"""gpipe-plan: shows how a run would be cut, what each device would hold, the bubble, and the time of a step.
It needs no hardware, data or weights, and takes seconds; searches (best, fit, grow) up to minutes: Ctrl-C
ends them with the best so far.

    gpipe-plan model=transformer_lm model.L=1663 pipeline.K=128 pipeline.M=32
    gpipe-plan plan.best=true plan.devices=4 plan.device=rtx-4090    the fastest pipeline on these four cards
    gpipe-plan model=amoebanet plan.fit=16GB                the fewest devices that hold it, and the fastest pipeline
    gpipe-plan model=transformer_lm plan.grow=model.L plan.best=true plan.devices=8     the largest on eight cards

Every key of gpipe-train (gpipe-train --help), and:

    plan.device=NAME        h100, a100-80gb, rtx-4090, tpu-v3 and more (conf/plan.yaml), this (measured here), or
                            {flops: 1e13, memory: 16GB, bandwidth: 5e11, link: 1e10}
    plan.efficiency=0.5     share of the device's FLOP/s that is reached
    plan.memory=16GB        most bytes a device may hold; as given, or that of the device
    plan.longest=true       sequences as long as the data allows: the largest memory
    plan.format=json        one JSON object on standard output; lists: what pipeline.schedule=FILE reads

--config-dir DIR adds YAML files of your own. Every key: conf/plan.yaml; more: docs/planning.md.

It writes nothing but, under `plan.device=this`, the profile that a run would write.
"""  # --help prints this

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gpipe_cli.disk import write_whole
from gpipe_cli.errors import Problems
from gpipe_cli.jobs.page import PLAN, beside_rivals, words_of
from gpipe_cli.schedule.own_lists import as_text, is_file
from gpipe_cli.schedule.picture import draw_text, legend
from gpipe_cli.schedule.simulate import simulate, unit_durations
from gpipe_cli.terminal.command import OF_PLANS, read_words, run_command, show
from gpipe_cli.terminal.document import Block, Document, Facts, Grid, Lines
from gpipe_cli.terminal.runs import read_run
from gpipe_cli.terminal.text import number, percent, plural, seconds_text, size_text
from gpipe_cli.typed_section import shown

if TYPE_CHECKING:
    from gpipe_cli.config import Settings
    from gpipe_cli.planner.options import Options
    from gpipe_cli.planner.plan import Plan

WIDEST_PICTURE = 120  # characters
MOST_ROWS = 32


class Request(NamedTuple):
    """Holds one configuration to plan."""

    settings: Settings
    options: Options


def show_progress(line: str) -> None:
    """Prints a line of progress over the last one, on a terminal; a file gets none."""
    if sys.stderr.isatty():
        print(line, end="\x1b[K\r", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 0, or 2 for a wrong call or when nothing fits."""
    return run_command("gpipe-plan", arguments, __doc__, _run)


def _run(words: Sequence[str]) -> int:
    line = read_words(words, options=OF_PLANS, runs=False)
    settings, options = make_request(line.overrides, line.folder)
    from gpipe_cli.planner.search import Listener, find_plan  # imports torch

    searches = options.best or options.fit or options.grow or settings.pipeline.auto
    with stopping_on_signals() if searches else nullcontext(lambda: False) as stopped:
        plan = find_plan(settings, options, Listener(show_progress, stopped))
    if options.format == "lists":
        show(as_text(plan.lists).rstrip())
    else:
        show(json.dumps(plan.to_json()) if options.format == "json" else report(plan))
    return 0


@contextmanager
def stopping_on_signals() -> Iterator[Callable[[], bool]]:
    """Lets Ctrl-C and SIGTERM end a search with the best so far; yields a function that returns whether one came.

    A second one ends the command.
    """
    came: list[int] = []

    def note(number: int, frame: object) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)
        print("stopping with the best so far; once more to end at once", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def make_request(overrides: Sequence[str], folder: str | None = None) -> Request:
    """Composes and checks the configuration.

    Args:
        overrides: keys of gpipe-train and gpipe-plan, as typed.
        folder: the value of `--config-dir`.

    Raises:
        ConfigurationError: it has one line for each mistake.
    """
    from gpipe_cli.config import Settings
    from gpipe_cli.jobs.configuration import composed, most_workers, plain
    from gpipe_cli.jobs.trust import look_here, targets
    from gpipe_cli.planner.options import Options

    problems = Problems()
    config = plain(composed("plan", overrides, folder))
    options = Options.read(config.pop("plan"), problems)
    settings = Settings.from_config(config, problems)
    look_here(targets(config))
    if options.device is None:
        most = 1 if settings.launch.inline else most_workers(settings.pipeline)[0]
        options = replace(options, most_workers=most)
    return Request(settings, options)


def advise(folder: str, trusted: Sequence[str]) -> None:
    """Plans a run that has ended, as it was, on the present machine, and searches for its fastest pipeline.

    The search keeps M and measures the run's layers. Both plans are written to the run's file `PLAN`, the first before
    the search.

    Args:
        trusted: the user's own `_target_`s that the run's words may call.

    Raises:
        ConfigurationError: a word is wrong by now, or calls something else.
    """
    from gpipe_cli.jobs.configuration import composed, plain
    from gpipe_cli.jobs.trust import refuse_foreign
    from gpipe_cli.planner.planner import Planner
    from gpipe_cli.planner.search import FREE, Search

    run, plan_file = read_run(Path(folder)), Path(folder) / PLAN
    workers = run.summary.get("workers") or 1
    # No run notes words about Hydra, which could bring in any file.
    words = [word for word in run.words if not word.lstrip("+~").startswith(("checkpoint.", "hydra"))]
    refuse_foreign(plain(composed("plan", words)), trusted, Path(folder))
    planner = Planner(*make_request([*words, f"pipeline.workers={workers}", "plan.device=this"]))
    plans: dict[str, Any] = {"own": planner.plan().to_json()}
    write_whole(plan_file, json.dumps(plans) + "\n")
    free = [key for key in FREE if key not in ("M", "replicas")]
    plans["best"] = Search(planner, free).fastest(workers).to_json()
    write_whole(plan_file, json.dumps(plans) + "\n")


# -- the report ------------------------------------------------------------------------------------------------------


def report(plan: Plan) -> str:
    """Returns the report of one plan: what a search has found, the next best, cells, memory, time, schedule, notes."""
    found = Lines([f"found after {plan.tried} plans: {words_of(plan.found)}"] if plan.found else [])
    rivals: list[Block] = [beside_rivals(plan.to_json())] if plan.rivals else []
    blocks: list[Block] = [Lines(_head(plan)), _cells(plan), Facts(_facts(plan)), Lines(_picture(plan))]
    return Document("", [found, *rivals, *blocks, Lines([f"note: {note}" for note in plan.notes])]).text()


def _head(plan: Plan) -> list[str]:
    """Returns two lines: the pipeline, and its micro-batch."""
    replicas = f" × {plan.replicas} replicas" if plan.replicas > 1 else ""
    kept = f", remat {plan.remat}" if plan.keep is None else f", keep {shown(plan.keep)}"
    kept = "" if is_file(plan.schedule) else kept
    return [
        f"{plan.parameters:,} parameters in {plural(plan.K, 'cell')} on {plural(plan.workers, 'device')}{replicas} "
        f"({plan.device.name}), M={plan.M}, {plan.schedule}{kept}",
        f"a micro-batch: {', '.join(plan.micro_batch)}; a mini-batch: {plan.examples:,} examples",
    ]


def _cells(plan: Plan) -> Grid:
    """Returns a table with one row per cell and the bytes of each kind."""
    kinds = ["weights", "gradients", "optimizer", "average", "inputs", "working", "total"]
    if not any(cell.average for cell in plan.cells):
        kinds.remove("average")
    rows = list[list[object]]()
    for cell in plan.cells:
        facts = (cell.cell, cell.worker, cell.layers, cell.first, cell.last, cell.parameters, percent(cell.share))
        rows.append([*facts, *(size_text(getattr(cell, kind)) for kind in kinds)])
    return Grid(["cell", "device", "layers", "from", "to", "parameters", "time", *kinds], rows)


def _facts(plan: Plan) -> list[tuple[str, object]]:
    """Returns the figures of a plan: memory, balance, messages, bubble, time and its bound."""
    fullest = max(plan.workers_plan, key=lambda worker: worker.total / worker.limit)
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    largest = sorted(fullest.by_kind.items(), key=lambda pair: -pair[1])[:3]
    kinds = ", ".join(f"{kind.replace('_', '-')} {size_text(size)}" for kind, size in largest if size)
    step, update = map(seconds_text, (plan.step_seconds, plan.update_seconds))
    held = "weights, gradients, optimizer" + (", average" if any(cell.average for cell in plan.cells) else "")
    return [
        (
            "memory",
            f"{size_text(plan.memory)} on device {fullest.worker}, of {size_text(plan.limit)}: {verdict} "
            f"({held} {size_text(fullest.model)}, activations {size_text(fullest.activations)}"
            + (f": {kinds}" if kinds else "")
            + (f", its process {size_text(fullest.process)})" if fullest.process else ")"),
        ),
        *([("elsewhere", _elsewhere(plan))] if plan.offload else []),
        ("busiest", f"device computes {percent(plan.busiest_over_mean)} longer than the mean"),
        ("sent", f"{size_text(plan.sent_bytes)} between devices in a step"),
        ("bubble", f"{percent(plan.bubble)} of the simulated step"),
        ("step", f"{step}, {number(plan.examples_per_second, 3)} examples/s (of these the update {update})"),
        ("bound", _bound(plan)),
    ]


def _elsewhere(plan: Plan) -> str:
    """Returns in words the bytes on disk or, for GPUs, in the host's memory, and those that travel in a step."""
    weights, gradients, rest = (
        sum(n) for n in zip(*((c.weights, c.gradients, c.optimizer + c.average) for c in plan.cells), strict=True)
    )
    if plan.device.kernels != "cpu":
        travels = f"a step copies up to {size_text(2 * weights)} to the GPUs and {size_text(gradients)} back"
        return f"{size_text(weights + gradients + rest)} of all cells in the hosts' memory; {travels}, not timed"
    read, written = size_text(3 * weights + gradients + rest), size_text(weights + gradients + rest)
    said = f"a step reads up to {read} and writes {written}, whose time is not planned"
    return f"{size_text(weights + gradients + rest)} of all cells; {said}"


def _bound(plan: Plan) -> str:
    """Returns the shortest time of a step that any schedule could reach, with this cut and with any cut."""
    if plan.bound_of_any_cut_seconds is None:
        return "no schedule fits, whatever the cut"
    any_cut = f"of any cut {seconds_text(plan.bound_of_any_cut_seconds)}"
    if plan.bound_seconds is None:
        return f"no schedule of this cut fits, {any_cut}"
    gap = f" (gap {percent(max(0.0, plan.step_seconds / plan.bound_seconds - 1))})" if plan.fits else ""
    return f"no schedule of this cut that fits can take less than {seconds_text(plan.bound_seconds)}{gap}, {any_cut}"


def _picture(plan: Plan) -> list[str]:
    """Returns the schedule with one column per instruction, where a terminal is wide enough."""
    lines = draw_text(simulate(plan.lists, plan.timeline.placement, unit_durations)).splitlines()
    fits = len(lines) <= MOST_ROWS and max(map(len, lines)) <= WIDEST_PICTURE
    return [*lines, legend(plan.timeline)] if fits else []


if __name__ == "__main__":
    sys.exit(main())
