"""What every worker of gpipe-eval runs: one evaluation of a checkpoint through the pipeline, and what it leaves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ..distributed.exchange import Exchange
from ..launch.context import Context
from ..metrics.image_pictures import draw_classification
from ..metrics.language_pictures import ModelScores, draw_languages
from ..metrics.records import Evaluation
from ..metrics.translation_scores import languages_of
from ..metrics.whole_file import write_whole
from .assembly import Assembly, assemble_evaluator, evaluation_fields
from .from_checkpoint import assemble_from_checkpoint

REPORT = "evaluation.json"


def main(context: Context, config: dict[str, Any]) -> dict[str, Any] | None:
    """One worker's life.

    Args:
        context: its place among the workers; its run directory is the evaluation's own.
        config: as in `assemble_from_checkpoint`, and "about": what the report repeats of the command.

    Returns:
        On rank 0 the report, as in evaluation.json; None elsewhere.

    Raises:
        ConfigurationError: the checkpoint is of another model, or something in the configuration that shows only now.
        LayerFailed: an exception in a layer.
    """
    assembly = assemble_from_checkpoint(context, config)
    exchange = Exchange({**assembly.codec.fields(), **evaluation_fields(assembly)}, assembly.world.all_ranks)
    result = assemble_evaluator(assembly, exchange).evaluate(final=True)
    if assembly.world.rank != 0:
        return None
    made = {**config["about"], **report(assembly, result)}
    write_whole(context.run_dir / REPORT, json.dumps(made, indent=2, ensure_ascii=False) + "\n")
    draw(result, str(made["name"]), context.run_dir)
    if result.samples:
        context.emit({"kind": "samples", "rows": [vars(sample) for sample in result.samples]})
    return made


def report(assembly: Assembly, result: Evaluation) -> dict[str, Any]:
    """What the evaluation found, and what has to be known to compare it with another."""
    generation = getattr(assembly.task, "generation", None)
    how = {} if generation is None else {**result.effort, "length_exponent": generation.length_exponent}
    return {
        "parameters": assembly.cut.parameters,
        "K": assembly.settings.pipeline.K,
        "averaged_weights": assembly.settings.trainer.average is not None,
        **how,
        "signature": result.signature,
        "numbers": {name: value if math.isfinite(value) else None for name, value in result.numbers.items()},
        "sizes": dict(result.sizes),
        "scripts": dict(getattr(assembly.source, "scripts", {})),
    }


def draw(result: Evaluation, name: str, folder: Path) -> None:
    """languages.png of translations from several languages; of a classification, its predictions."""
    languages = languages_of(result.numbers)
    if len(languages) > 1 and result.sizes:
        draw_languages([ModelScores(name, 0, languages)], result.sizes, folder / "languages.png")
    if result.predictions is not None:
        draw_classification(result.predictions, folder)
