"""``gpipe-eval``: evaluate a run's checkpoint, and compare evaluated runs. The command process never imports torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpipe_cli.errors import ConfigurationError
from gpipe_cli.terminal.frame import answer, exit_code

HELP = """\
gpipe-eval: evaluates a checkpoint as its run did after the last step, and compares runs.

    gpipe-eval checkpoint=RUN                               its newest checkpoint
    gpipe-eval checkpoint=RUN step=best split=test pipeline.K=4
    gpipe-eval compare=[RUN1,RUN2] baseline=[RUN3,RUN4]     table and pictures over runs evaluated before

checkpoint=PATH   a run directory, or one checkpoint: RUN/checkpoints/step_00000100
step=N            of a run: the checkpoint of step N; step=best that of the lowest loss, step=last (default) the newest
split=test        translation: held-out sentences that no run has chosen its checkpoint by; dev is the default
output=DIR        where the report goes; RUN/evaluations/<step>_<split> is the default
trust=[NAMES]     code of your own that the checkpoint may have called, such as trust=[my_module.layers]
compare=[RUNS]    draws quality over languages (the paper's figure 3) and over parameters, of the newest report of each
                  run (a sweep means its runs; or name reports: RUN/evaluations/NAME), into output=DIR, ./comparison
baseline=[RUNS]   bilingual runs: the picture then shows the differences to them

Every key of gpipe-train can be given too: pipeline.K and pipeline.workers (the figures stay the same),
task.generation.beam, task.generation.per_language_at_end, precision=bf16. More: docs/translation.md.
"""
OWN = ("checkpoint", "step", "split", "output", "trust")
EXAMPLE = "gpipe-eval checkpoint=runs/NAME"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 1 when a worker failed, 2 for a wrong call, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    code = answer(words, HELP, "gpipe-eval", needs_words=True)
    return exit_code("gpipe-eval", partial(_run, words)) if code is None else code


def _run(words: Sequence[str]) -> int:
    if any(word.startswith(("compare=", "baseline=")) for word in words):
        from gpipe_cli.commands.comparison import compare

        return compare(words)
    return evaluate(words)


def evaluate(words: Sequence[str]) -> int:
    """One evaluation, by workers as gpipe-train starts them.

    Raises:
        ConfigurationError: no such checkpoint, or a wrong key, of which a worker may be the first to know.
        WorkerFailed: what a worker died of.
    """
    from gpipe_cli.jobs.checkpointed import open_run, split_words
    from gpipe_cli.jobs.job import EntryPoint, launch_program
    from gpipe_cli.terminal.console import Console

    chosen, overrides = split_words(words, OWN, EXAMPLE)
    split = chosen.get("split", "dev")
    overrides += split_overrides(split)
    run = open_run(chosen["checkpoint"], overrides, chosen.get("step", "last"), chosen.get("trust", ""))
    folder = (
        Path(chosen["output"]) if "output" in chosen else run.run_dir / "evaluations" / f"{run.info.path.name}_{split}"
    )
    folder.mkdir(parents=True, exist_ok=True)
    name = run.prepared.settings.name or run.run_dir.name
    about = {"name": name, "run": str(run.run_dir.absolute()), "step": run.info.step, "split": split}
    config = {"settings": run.config, "checkpoint": str(run.info.path.absolute()), "about": about}
    began = time.monotonic()
    with Console(1, "auto") as console:
        for warning in run.warnings:
            console.warn(warning)
        console.say(f"{run.info.path}, step {run.info.step}, {split}; workers: {run.workers}")
        program = EntryPoint("gpipe_cli.trainer.evaluate:main")
        found = dict(launch_program(program, config, folder, console) or {})
        console.say("\n".join(["", *as_text(found), "", f"{time.monotonic() - began:.0f} s; report: {folder}"]))
    return 0


def split_overrides(split: str) -> list[str]:
    """What `split=` means for the data.

    Raises:
        ConfigurationError: there is no such split.
    """
    if split not in ("dev", "test"):
        raise ConfigurationError(f"split={split}: use dev or test")
    return [] if split == "dev" else [f"++data.evaluation_split={split}"]


def as_text(report: Mapping[str, Any]) -> list[str]:
    """The report as tables: the figures, BLEU by resource and script, and BLEU of every language."""
    from gpipe_cli.terminal.text import text_table

    numbers = report["numbers"]
    lines = [text_table(["figure", "value"], [[name, value] for name, value in numbers.items() if "/" not in name])]
    if report["signature"]:
        lines.append(f"sacreBLEU {report['signature']}")
    levels = level_rows([report])
    if levels:
        lines += ["", text_table(["resource", "languages", "BLEU", "Latin script", "other scripts"], levels)]
        lines += ["", text_table(["language", "pairs", "BLEU"] * 3, language_rows(report))]
    return lines


def level_rows(reports: Sequence[Mapping[str, Any]]) -> list[list[object]]:
    """One row a level of resource and report: languages, BLEU, and BLEU by script with the number of languages."""
    from gpipe_cli.metrics.translation_scores import (
        LATIN,
        LEVELS,
        OTHER,
        by_script_and_level,
        languages_of,
        resource_levels,
    )

    rows: list[list[object]] = []
    for level, report in ((level, report) for level in LEVELS for report in reports):
        numbers = report["numbers"]
        if f"bleu_{level}" not in numbers:
            continue
        codes, sizes = languages_of(numbers), report["sizes"]
        counts = by_script_and_level(codes, sizes, report["scripts"])
        cells = []
        for script in (LATIN, OTHER):
            bleu = numbers.get(f"bleu_{level}/{script}")
            cells.append(None if bleu is None else f"{bleu:.1f} ({counts[script, level]})")
        total = list(resource_levels({code: sizes[code] for code in codes if code in sizes}).values()).count(level)
        label = level if len(reports) == 1 else f"{level}, {report['name']}"
        rows.append([label, total, f"{numbers[f'bleu_{level}']:.1f}", *cells])
    return rows


def language_rows(report: Mapping[str, Any]) -> list[list[object]]:
    """The three levels side by side, each from the most to the least data."""
    from gpipe_cli.metrics.translation_scores import LEVELS, languages_of, resource_levels

    scores, sizes = languages_of(report["numbers"]), report["sizes"]
    levels = resource_levels({code: sizes[code] for code in scores if code in sizes})
    columns = [[code for code in scores if levels.get(code) == level] for level in LEVELS]
    rows: list[list[object]] = []
    for place in range(max(map(len, columns))):
        row: list[object] = []
        for column in columns:
            known = place < len(column)
            code = column[place] if known else ""
            row += [code, sizes[code] if known else "", f"{scores[code]:.1f}" if known else ""]
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
