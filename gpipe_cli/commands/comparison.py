"""``gpipe-eval compare=[…]``: evaluated runs in one table, and the paper's two pictures of them. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from gpipe_cli.commands.evaluate import level_rows
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.metrics.language_pictures import ModelScores, draw_capacity, draw_languages
from gpipe_cli.metrics.translation_scores import languages_of
from gpipe_cli.terminal.hydra_errors import KNOWN
from gpipe_cli.terminal.output import show
from gpipe_cli.terminal.text import text_table

EXAMPLE = "gpipe-eval compare=[RUN1,RUN2] baseline=[RUN3]"
REPORT = "evaluation.json"  # as the worker calls it


def compare(words: Sequence[str]) -> int:
    """Table on the console, languages.png and capacity.png in the output folder.

    Raises:
        ConfigurationError: a word is not understood, a run has not been evaluated, or evaluations do not compare.
    """
    runs, baselines, output = parse(words)
    reports, single = ([read_report(path) for run in given for path in expand(run)] for given in (runs, baselines))
    require_alike([*reports, *single])
    tell_apart(reports)
    output.mkdir(parents=True, exist_ok=True)
    columns = ["resource, model", "languages", "BLEU", "Latin script", "other scripts"]
    models = [ModelScores(str(r["name"]), r["parameters"], languages_of(r["numbers"])) for r in reports]
    sizes = {code: size for report in reports for code, size in report["sizes"].items()}
    try:
        draw_languages(models, sizes, output / "languages.png")
        draw_capacity(models, sizes, output / "capacity.png")
        show(text_table(columns, level_rows(reports)))
        if single:
            bleu = {code: value for report in single for code, value in _one_language(report).items()}
            draw_languages(models, sizes, output / "differences.png", bleu)
            show("\n" + text_table(*difference_table(reports, bleu)))
    except ValueError as error:
        raise ConfigurationError(f"compare: {error}") from error
    show(f"\npictures: {output}")
    return 0


def parse(words: Sequence[str]) -> tuple[list[str], list[str], Path]:
    """Runs, baselines and output folder.

    Raises:
        ConfigurationError: a word is not understood, or there is no run to compare.
    """
    try:
        overrides = OverridesParser.create().parse_overrides(list(words))
    except KNOWN as error:
        raise ConfigurationError(f"{str(error).splitlines()[0]}; for example: {EXAMPLE}") from error
    given: dict[str, Any] = {}
    for override in overrides:
        if override.key_or_group not in ("compare", "baseline", "output"):
            raise ConfigurationError(f"{override.input_line}: with compare there are only baseline= and output=")
        given[override.key_or_group] = override.value()
    runs, baselines = (_as_list(given.get(key, [])) for key in ("compare", "baseline"))
    if not runs:
        raise ConfigurationError(f"compare= names no run; for example: {EXAMPLE}")
    return runs, baselines, Path(str(given.get("output", "comparison")))


def expand(run: str) -> list[Path]:
    """The run itself; or, of a sweep, the runs in it that have been evaluated."""
    path = Path(run).expanduser()
    jobs = sorted({report.parents[2] for report in path.glob(f"*/evaluations/*/{REPORT}")})
    return jobs or [path]


def read_report(path: Path) -> dict[str, Any]:
    """Of an evaluation's folder, or the newest one of a run.

    Raises:
        ConfigurationError: there is none, or it is not of translations.
    """
    found = [path / REPORT] if (path / REPORT).is_file() else sorted(path.glob(f"evaluations/*/{REPORT}"), key=_age)
    if not found:
        raise ConfigurationError(f"{path} has not been evaluated yet: gpipe-eval checkpoint={path}")
    try:
        report: dict[str, Any] = json.loads(found[-1].read_text(encoding="utf-8"))
        report["folder"] = str(found[-1].parent)
        if not languages_of(report["numbers"]):
            raise ConfigurationError(f"{found[-1]} has no BLEU of languages: only translations can be compared")
    except (ValueError, KeyError) as error:
        raise ConfigurationError(f"{found[-1]} is no report of gpipe-eval ({error}): evaluate again") from error
    return report


def require_alike(reports: Sequence[Mapping[str, Any]]) -> None:
    """What was counted in another way does not belong in one picture.

    Raises:
        ConfigurationError: naming what differs.
    """
    for key in ("split", "beam", "length_exponent", "sentences_per_language", "signature"):
        values = {str(report.get(key)) for report in reports}
        if len(values) > 1:
            where = ", ".join(f"{report['folder']}: {report.get(key)}" for report in reports)
            raise ConfigurationError(f"the evaluations differ in {key} ({where}): evaluate again with the same")


def tell_apart(reports: Sequence[dict[str, Any]]) -> None:
    """Reports of one name, such as runs with several seeds, are named by their run directory too."""
    names = [report["name"] for report in reports]
    for report in reports:
        if names.count(report["name"]) > 1:
            report["name"] = f"{report['name']} ({Path(report['folder']).parent.parent.name})"


def difference_table(
    reports: Sequence[Mapping[str, Any]], baselines: Mapping[str, float]
) -> tuple[list[str], list[list[object]]]:
    """Columns and rows: each language with a baseline, its pairs, the bilingual BLEU, and every model's difference."""
    sizes = {code: size for report in reports for code, size in report["sizes"].items()}
    columns = ["language", "pairs", "bilingual", *(str(report["name"]) for report in reports)]
    rows: list[list[object]] = []
    for code in sorted(baselines, key=lambda code: -sizes.get(code, 0)):
        scores = [languages_of(report["numbers"]).get(code) for report in reports]
        differences = [None if score is None else f"{score - baselines[code]:+.1f}" for score in scores]
        rows.append([code, sizes.get(code), f"{baselines[code]:.1f}", *differences])
    return columns, rows


def _one_language(report: Mapping[str, Any]) -> dict[str, float]:
    found = languages_of(report["numbers"])
    if len(found) != 1:
        raise ConfigurationError(f"baseline: {report['folder']} is of {len(found)} languages; give bilingual runs")
    return found


def _as_list(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def _age(path: Path) -> float:
    return path.stat().st_mtime
