"""gpipe-eval: evaluates a checkpoint as its run did after the last step, and compares runs.

    gpipe-eval RUN                                          its newest checkpoint
    gpipe-eval RUN step=best split=test pipeline.K=4
    gpipe-eval compare=[RUN1,RUN2] baseline=[RUN3,RUN4]     table and pictures of runs evaluated before

checkpoint=PATH   a run directory, or one checkpoint: RUN/checkpoints/step_00000100; `checkpoint=` can be left out
step=N            of a run: the checkpoint of step N; step=best: the one with the lowest loss; step=last (default)
test=PATH         a test set of your own, FILE or FOLDER, with the run's vocabulary: pairs of sentences in any form that
                  data=parallel_text reads (TMX, PO, CSV, pairs of files, .gz …), text, or class folders of images
split=test        translation: held-out sentences by which no run has chosen its checkpoint; default: dev
output=DIR        the report goes to DIR; default: RUN/evaluations/<step>_<split>; with translations/LANG.txt:
                  source, reference and output of each sentence, with tabs between
trust=[NAMES]     code of your own that the checkpoint may call, such as trust=[my_module.layers], and keys whose files
                  it may read, such as trust=[data.root]
compare=[RUNS]    shows quality over languages (the paper's figure 3) and levels of resource, from the newest report
                  of each run, also as output=DIR/report.html (default: comparison). A sweep stands for its runs;
                  RUN/evaluations/NAME chooses one report
baseline=[RUNS]   bilingual runs: the page also shows the differences to them

Keys of gpipe-train change the run's configuration: pipeline.K and pipeline.workers (the figures stay the same),
task.generation.beam, task.generation.per_language_at_end, precision=bf16. More: docs/translation.md.
"""  # --help prints this

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gpipe_cli.errors import ConfigurationError
from gpipe_cli.json_files import read_json
from gpipe_cli.svg import Curve, Drawing, plot, running_means
from gpipe_cli.terminal.command import read_words, run_command, show
from gpipe_cli.terminal.document import Document, Grid

if TYPE_CHECKING:
    from gpipe_cli.jobs.reopen import Reopened

OWN = {"checkpoint": str, "step": str, "trust": list[str], "split": Literal["dev", "test"], "test": str, "output": str}
COMPARED = {"compare": list[str], "baseline": list[str], "output": str}
REPORT = "evaluation.json"  # written by inference/evaluate.py
TEXT = ("test_sets.TextOfRun", ("batch_size", "document", "json_key", "end_token", "sequence_length", "pad_id"))
# Beginnings of a run's data._target_: the source that reads a test set for it, and the keys of data that it takes.
TEST_SETS = {
    "gpipe_cli.data.images.": ("images.source.ImagesOfRun", ("batch_size", "image_size", "evaluation_crop")),
    "gpipe_cli.data.text.": TEXT,
    "gpipe_cli.data.cldr.source.TextSource": TEXT,
    "gpipe_cli.data.": ("test_sets.PairsOfRun", ("target", "languages", "columns", "max_length")),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 0, 1 when a worker failed, 2 for a wrong call, 130 after Ctrl-C."""
    return run_command("gpipe-eval", arguments, __doc__, _run, needs_words=True)


def _run(words: Sequence[str]) -> int:
    is_comparison = any(word.startswith(("compare=", "baseline=")) for word in words)
    return compare(words) if is_comparison else evaluate(words)


def evaluate(words: Sequence[str]) -> int:
    """Evaluates one checkpoint in workers of its own.

    Raises:
        ConfigurationError: there is no such checkpoint, or a key is wrong.
        WorkerFailed: a worker failed.
    """
    from gpipe_cli.jobs.reopen import open_run
    from gpipe_cli.jobs.run_directory import require_writable
    from gpipe_cli.terminal.console import Console

    line = read_words(words, OWN)
    split = line.own.get("split", "dev")
    if split != "dev":
        line.overrides.append(f"++data.evaluation_split={split}")
    run = open_run(line.run("gpipe-eval"), line)
    settings, test = run.prepared.config, line.own.get("test")
    if test is None:
        run.require_named_paths()
    else:
        settings, split = with_test_set(run, test), re.sub(r"\W+", "_", Path(test).name)
    default = run.info.run_dir / "evaluations" / f"{run.info.path.name}_{split}"
    folder = Path(line.own.get("output", default))
    if "output" not in line.own and default.resolve() != run.info.run_dir.resolve() / "evaluations" / default.name:
        raise ConfigurationError(f"{default} is a link to another place: name one by output=DIR")
    require_writable("output", folder)
    name = run.prepared.settings.name or run.info.run_dir.name
    about = {"name": name, "run": str(run.info.run_dir.absolute()), "step": run.info.step, "split": split}
    began = time.monotonic()
    with Console(1, "auto") as console:
        console.warn(*run.warnings)
        console.say(f"{run.info.path}, step {run.info.step}, {split}; {run.prepared.line}")
        found = dict(run.launch("gpipe_cli.inference.evaluate:main", settings, folder, console, about=about) or {})
        console.say("\n".join(["", *as_text(found), "", f"{time.monotonic() - began:.0f} s; report: {folder}"]))
    return 0


def with_test_set(run: Reopened, test: str) -> dict[str, Any]:
    """Returns the run's configuration for an evaluation on the whole of a test set of the user's, a file or folder.

    Raises:
        ConfigurationError: there is no such file, or the run's data are of no kind that can be read.
    """
    place, data, task = Path(test).expanduser().absolute(), run.prepared.config["data"], run.prepared.config["task"]
    if not place.exists():
        raise ConfigurationError(f"test={test}: there is no such file or folder")
    reader = next((TEST_SETS[begin] for begin in TEST_SETS if data["_target_"].startswith(begin)), None)
    if reader is None:
        raise ConfigurationError(f"test={test}: data._target_={data['_target_']} is of your own, so its files are too")
    language = {"languages": [data["pair"]]} if data.get("pair") else {}
    settings = run.with_data(f"gpipe_cli.data.{reader[0]}", reader[1], test=str(place), **language)
    if task.get("generation") and "task.generation.per_language_at_end" not in run.named:
        settings["task"] = {**task, "generation": {**task["generation"], "per_language_at_end": None}}
    return settings


def as_text(report: Mapping[str, Any]) -> list[str]:
    """Returns the report as lines: tables of all figures, and of the BLEU of every language, most pairs first."""
    from gpipe_cli.metrics.translation_scores import languages_of
    from gpipe_cli.terminal.evaluated import by_language

    numbers, sentences = report["numbers"], report["sentences"]
    lines = [figures_table([report]).text()]
    if report["signature"]:
        lines.append(f"sacreBLEU {report['signature']}")
    few = sorted(sentences, key=sentences.__getitem__)[: int(numbers.get("languages_with_few_sentences") or 0)]
    if scores := languages_of(numbers):
        lines += ["", by_language(scores, report, few).text()]
    if few:
        lines.append(f"* in no mean: below task.generation.fewest_sentences={report['fewest_sentences']}")
    return lines


def figures_table(reports: Sequence[Mapping[str, Any]]) -> Grid:
    """Returns a table of parameters and figures, a column for each report, without those of single languages."""
    figures = [{"parameters": report["parameters"], **report["numbers"]} for report in reports]
    names = dict.fromkeys(name for found in figures for name in found if not name.startswith("bleu/"))
    columns = ["figure", *(str(report["name"]) for report in reports)]
    return Grid(columns, [[name, *(found.get(name) for found in figures)] for name in names])


# -- comparing evaluated runs ------------------------------------------------------------------------------------------


def compare(words: Sequence[str]) -> int:
    """Prints tables of several runs, and writes them with pictures as a page.

    Raises:
        ConfigurationError: a word is wrong, a run has not been evaluated, or evaluations cannot be compared.
    """
    from gpipe_cli.jobs.run_directory import require_writable
    from gpipe_cli.metrics.translation_scores import languages_of

    given = read_words(words, COMPARED, runs=False, overrides=False).own
    runs, baselines, output = given.get("compare"), given.get("baseline", []), Path(given.get("output", "comparison"))
    if not runs:
        raise ConfigurationError("compare= names no run; for example: gpipe-eval compare=[RUN1,RUN2] baseline=[RUN3]")
    reports, single = ([read_report(path) for run in given for path in expand(run)] for given in (runs, baselines))
    require_alike([*reports, *single])
    name_apart(reports)
    require_writable("output", output)
    scores = {str(report["name"]): languages_of(report["numbers"]) for report in reports}
    sizes = {code: size for report in reports for code, size in report["sizes"].items()}
    tables, pictures = [figures_table(reports)], [_draw_languages(scores, sizes)]
    if single:
        bleu: dict[str, float] = {}
        for report in single:
            if len(found := languages_of(report["numbers"])) != 1:
                raise ConfigurationError(
                    f"baseline: {report['folder']} is of {len(found)} languages; give bilingual runs"
                )
            bleu |= found
        tables.append(_difference_table(scores, sizes, bleu))
        pictures.append(_draw_languages(scores, sizes, bleu))
    page = Document("Translation quality", [*tables, *pictures])
    show(page.text())
    page.save(output / "report.html")
    show(f"\nat one look: {output / 'report.html'}")
    return 0


def _draw_languages(
    scores: Mapping[str, Mapping[str, float]], sizes: Mapping[str, int], baselines: Mapping[str, float] | None = None
) -> Drawing:
    """Draws BLEU over languages, most training data first; a curve of running means for each model.

    Args:
        baselines: BLEU of bilingual models; if given, the picture shows the differences to them.
    """
    known = set(sizes).intersection(*scores.values(), *([] if baselines is None else [baselines]))
    if not known:
        raise ConfigurationError("compare: there is no language that all runs have")
    codes = sorted(known, key=lambda code: (-sizes[code], code))
    named = "BLEU" if baselines is None else "BLEU, difference to the bilingual model"
    curves = []
    for name, of_model in scores.items():
        values = [of_model[code] - (baselines or {}).get(code, 0.0) for code in codes]
        curves.append(Curve("", name, "peer", list(enumerate(running_means(values, 0.1), 1))))
    title = f"{named}, from the language with the most training data to the one with the least"
    return plot(curves, ("language", "BLEU"), title, from_zero=baselines is None)


def expand(run: str) -> list[Path]:
    """Returns the evaluated runs of a sweep, or the run itself."""
    path = Path(run).expanduser()
    jobs = sorted({report.parents[2] for report in path.glob(f"*/evaluations/*/{REPORT}")})
    return jobs or [path]


def read_report(path: Path) -> dict[str, Any]:
    """Reads the report in an evaluation's folder, or the newest report of a run.

    Raises:
        ConfigurationError: there is none, or it is not about translations.
    """
    reports = sorted(path.glob(f"evaluations/*/{REPORT}"), key=lambda report: report.stat().st_mtime)
    found = [path / REPORT] if (path / REPORT).is_file() else reports
    if not found:
        raise ConfigurationError(f"{path} has not been evaluated yet: gpipe-eval checkpoint={path}")
    report = read_json(found[-1], dict[str, Any])
    if not any(name.startswith("bleu/") for name in report["numbers"]):
        raise ConfigurationError(f"{found[-1]} has no BLEU of languages: only translations can be compared")
    return {**report, "folder": str(found[-1].parent)}


def require_alike(reports: Sequence[Mapping[str, Any]]) -> None:
    """Refuses to compare evaluations that were made in different ways.

    Raises:
        ConfigurationError: it names what differs.
    """
    for key in ("split", "beam", "length_exponent", "sentences_per_language", "signature"):
        if len({str(report.get(key)) for report in reports}) > 1:
            where = ", ".join(f"{report['folder']}: {report.get(key)}" for report in reports)
            raise ConfigurationError(f"the evaluations differ in {key} ({where}): evaluate again with the same")


def name_apart(reports: Sequence[dict[str, Any]]) -> None:
    """Adds the run directory to the name of reports that share a name, such as runs with several seeds."""
    names = [report["name"] for report in reports]
    for report in reports:
        if names.count(report["name"]) > 1:
            report["name"] = f"{report['name']} ({Path(report['folder']).parent.parent.name})"


def _difference_table(
    scores: Mapping[str, Mapping[str, float]], sizes: Mapping[str, int], baselines: Mapping[str, float]
) -> Grid:
    """Returns a table: each language with a baseline, its pairs, the bilingual BLEU, every model's difference."""
    rows: list[list[object]] = []
    for code in sorted(baselines, key=lambda code: -sizes.get(code, 0)):
        differences = [f"{of[code] - baselines[code]:+.1f}" if code in of else None for of in scores.values()]
        rows.append([code, sizes.get(code), f"{baselines[code]:.1f}", *differences])
    return Grid(["language", "pairs", "bilingual", *scores], rows)


if __name__ == "__main__":
    sys.exit(main())
