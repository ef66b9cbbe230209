"""gpipe-plan: shows how a run would be cut, what each device would hold, the bubble, and the time of a step.
It needs no hardware, data or weights, and takes seconds for any size of model.

    gpipe-plan model=transformer_lm model.L=1663 pipeline.K=128 pipeline.M=32
    gpipe-plan plan.best=true plan.devices=4 plan.device=rtx-4090    the fastest pipeline on these four cards
    gpipe-plan model=amoebanet plan.fit=16GB                the fewest devices that hold it, and the fastest pipeline
    gpipe-plan model=transformer_lm plan.grow=model.L       the largest model that fits

Every key of gpipe-train (gpipe-train --help), and:

    plan.device=NAME        h100, a100-80gb, rtx-4090, tpu-v3 and more (conf/plan.yaml), this (measured now), or
                            {flops: 1e13, memory: 16GB, bandwidth: 5e11, link: 1e10}
    plan.efficiency=0.5     share of the device's FLOP/s that is reached; plan.bandwidth_efficiency likewise
    plan.memory=16GB        most bytes a device may hold; as given, or that of the device
    plan.longest=true       sequences as long as the data allows: the largest memory
    plan.format=json        one JSON object on standard output
    plan.page=FILE.html     writes the plan as a page, too

--config-dir DIR adds YAML files of your own. Every key: conf/plan.yaml; more: docs/planning.md.

It writes nothing but `plan.page` and, under `plan.device=this`, the profile that a run would write.
"""  # --help prints this

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpipe_cli.disk import writing
from gpipe_cli.errors import Problems
from gpipe_cli.terminal.command import run_command, show
from gpipe_cli.terminal.words import OF_PLANS, read_words

if TYPE_CHECKING:
    from gpipe_cli.config import Settings
    from gpipe_cli.planner.options import Options
    from gpipe_cli.planner.plan import Plan


@dataclass(frozen=True)
class Request:
    """Holds one configuration to plan.

    Attributes:
        notes: changes that were necessary to plan it.
    """

    settings: Settings
    options: Options
    notes: list[str]

    def plan(self) -> Plan:
        """Returns its plan, with the notes; prints on standard error what takes long.

        Raises:
            ConfigurationError: it cannot be planned, or nothing fits.
        """
        from gpipe_cli.planner.search.search import find_plan

        plan = find_plan(self.settings, self.options, _show_progress)
        return replace(plan, notes=[*self.notes, *plan.notes])


def _show_progress(line: str) -> None:
    """Prints a line on standard error, over the last one, if it is a terminal."""
    if sys.stderr.isatty():
        print(f"{line}\x1b[K", end="\r", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 0, or 2 for a wrong call or when nothing fits."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_command("gpipe-plan", words, __doc__, partial(_run, words))


def _run(words: Sequence[str]) -> int:
    line = read_words(words, options=OF_PLANS, runs=False)
    request = make_request(line.overrides, line.folder)
    from gpipe_cli.commands.plan_report import document

    plan = request.plan()
    report = document(plan)
    show(json.dumps(plan.to_json()) if request.options.format == "json" else report.text())
    if request.options.page is not None:
        with writing(page := Path(request.options.page).expanduser()):
            report.save(page)
    return 0


def make_request(overrides: Sequence[str], folder: str | None = None) -> Request:
    """Composes and checks the configuration.

    Args:
        overrides: as typed.
        folder: of `--config-dir`.

    Raises:
        ConfigurationError: it has one line for each mistake.
    """
    from gpipe_cli.config import Settings
    from gpipe_cli.jobs.configuration import composed, plain
    from gpipe_cli.jobs.machine import most_workers
    from gpipe_cli.jobs.trust import look_here, targets
    from gpipe_cli.planner.options import Options, with_enough_examples, with_free_cut

    problems = Problems()
    config = plain(composed("plan", overrides, folder))
    options = Options.read(config.pop("plan"), problems)
    enough, notes = with_enough_examples(config)
    if not problems:
        enough, on_cut = with_free_cut(enough, options)
        notes += on_cut
    settings = Settings.from_config(enough, problems)
    look_here(targets(config))
    if options.device is None:
        most = 1 if settings.launch.inline else most_workers(settings.pipeline)[0]
        options = replace(options, most_workers=most)
    return Request(settings, options, notes)


if __name__ == "__main__":
    sys.exit(main())
