"""Defines the entry points of gpipe-eval's and gpipe-predict's workers: one evaluation of a checkpoint."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..disk import write_whole
from ..errors import ConfigurationError
from ..launch.context import Context
from ..metrics.metrics_file import json_safe
from ..metrics.records import Evaluation, Sample
from ..metrics.translation_scores import languages_of
from ..trainer.assembly import Assembly, assemble_evaluator, assemble_from_checkpoint

REPORT = "evaluation.json"


def main(context: Context, config: dict[str, Any]) -> dict[str, Any] | None:
    """Evaluates the checkpoint; the entry point of a worker.

    Args:
        context: this worker's place in the job; its run directory is the evaluation's own.
        config: keys of `assemble_from_checkpoint`, and "about": facts of the command that the report repeats.

    Returns:
        On rank 0 the report, as in evaluation.json; None elsewhere.

    Raises:
        ConfigurationError: the checkpoint is of another model, or something in the configuration that shows only now.
        LayerFailed: an exception in a layer.
    """
    assembly = assemble_from_checkpoint(context, config)
    result = assemble_evaluator(assembly).evaluate(final=True)
    if assembly.world.rank != 0:
        return None
    made = {**config["about"], **report(assembly, result)}
    write_whole(context.run_dir / REPORT, json.dumps(made, indent=2, ensure_ascii=False) + "\n")
    write_languages(made, context.run_dir / "languages.csv")
    write_translations(result.translations, context.run_dir / "translations")
    if result.samples:
        context.emit({"kind": "samples", "rows": [vars(sample) for sample in result.samples]})
    return made


def predict(context: Context, config: dict[str, Any]) -> list[tuple[str, float]] | None:
    """Classifies images; the entry point of a worker.

    Args:
        context: this worker's place in the job.
        config: keys of `assemble_from_checkpoint`.

    Returns:
        On rank 0 the class and its probability for each file, in their order; None elsewhere.

    Raises:
        ConfigurationError: the run's task does not classify, or an image is broken.
    """
    assembly = assemble_from_checkpoint(context, config)
    if not assembly.pipeline.task.predicts:
        raise ConfigurationError(f"task._target_={assembly.settings.task['_target_']} of this run predicts no classes")
    found = assemble_evaluator(assembly).evaluate(final=True).classes
    if assembly.world.rank != 0:
        return None
    return [(found["names"][label], probability) for label, probability in found["predicted"]]


def report(assembly: Assembly, result: Evaluation) -> dict[str, Any]:
    """Returns the evaluation's results as they stand in evaluation.json, without the facts of the command."""
    generation = assembly.pipeline.task.generation
    search = {} if generation is None else {**result.effort, "length_exponent": generation.length_exponent}
    search |= {} if generation is None else {"fewest_sentences": generation.fewest_sentences}
    return {
        "parameters": assembly.pipeline.cut.parameters,
        "K": assembly.settings.pipeline.K,
        "averaged_weights": assembly.settings.trainer.average is not None,
        **search,
        "signature": result.signature,
        "numbers": json_safe(result.numbers),
        "sizes": dict(result.sizes),
        "sentences": Counter(of.language for of in result.translations),
        "copying": dict(result.copying),
    }


def write_languages(report: Mapping[str, Any], path: Path) -> None:
    """Writes a CSV table with a row for each language: its sentences, BLEU, and BLEU of the untranslated source.

    Writes nothing if no language has a score.
    """
    scores = languages_of(report["numbers"])
    if scores:
        rows = [
            f"{code},{report['sentences'][code]},{bleu},{report['copying'][code]}\n" for code, bleu in scores.items()
        ]
        write_whole(path, "".join(["language,sentences,bleu,bleu_copying\n", *rows]))


def write_translations(translations: Sequence[Sample], folder: Path) -> None:
    """Writes LANGUAGE.txt: source, reference and output of each sentence, with tabs between, one sentence a line.

    Files of languages that were evaluated here before are removed.
    """
    if translations or folder.exists():
        folder.mkdir(exist_ok=True)
    for old in folder.glob("*.txt"):
        old.unlink()
    lines: dict[str, list[str]] = {}
    for of in translations:
        texts = (" ".join(text.split()) for text in (of.source, of.reference, of.output))
        lines.setdefault(of.language, []).append("\t".join(texts) + "\n")
    for language, of_language in lines.items():
        write_whole(folder / f"{language}.txt", "".join(of_language))
