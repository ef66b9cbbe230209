"""Lists what the shipped models, data and tasks are for, and refuses those that do not belong together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

KINDS = {
    "gpipe_cli.models.transformer.transformer": "translation",
    "gpipe_cli.data.cldr.source.TranslationSource": "translation",
    "gpipe_cli.data.parallel.source.ParallelTextSource": "translation",
    "gpipe_cli.tasks.translation.TranslationTask": "translation",
    "gpipe_cli.models.transformer_lm.transformer_lm": "text",
    "gpipe_cli.data.cldr.source.TextSource": "text",
    "gpipe_cli.data.text.source.TextFilesSource": "text",
    "gpipe_cli.tasks.language_model.LanguageModelTask": "text",
    "gpipe_cli.models.amoebanet.amoebanet": "images",
    "gpipe_cli.data.images.digits.DigitsSource": "images",
    "gpipe_cli.data.images.source.ImageSource": "images",
    "gpipe_cli.tasks.classification.ClassificationTask": "images",
}
OURS = {  # of models, data and tasks
    *KINDS,
    "gpipe_cli.data.torch_datasets.DatasetSource",
    "gpipe_cli.models.traced.layers.layers",
    "gpipe_cli.tasks.own_loss.OwnLossTask",
}
OPTIONS = {  # for each kind of examples: options of the groups model, data and task
    "translation": {"model": "transformer", "data": "cldr", "task": "translation"},
    "text": {"model": "transformer_lm_small", "data": "cldr_text", "task": "language_model"},
    "images": {"model": "amoebanet", "data": "digits", "task": "classification"},
}


def other_kinds(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields a line if the sections model, data and task are for different things; a user's own may be for anything."""
    kinds = {name: KINDS[values["_target_"]] for name, values in sections.items() if values.get("_target_") in KINDS}
    if kinds.get("task") == "text" and "translation" in kinds.values():
        del kinds["task"]  # the loss of a translation's target side
    if len(set(kinds.values())) > 1:
        chosen = kinds.get("data") or kinds["model"]
        said = ", ".join(f"{name} is for {kind}" for name, kind in kinds.items())
        fitting = " ".join(f"{name}={OPTIONS[chosen][name]}" for name in kinds if kinds[name] != chosen)
        yield f"{said}: all must be for the same, here {fitting}"
