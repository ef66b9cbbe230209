"""Replaces the names in a checkpoint's configuration that earlier releases used. This file imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SECTIONS = {"schedule": "lr_schedule"}
REMOVED = ("verify",)  # sections that only gpipe-verify reads now
# Keys of `model` that were copied into `trainer` and `pipeline` before they were recorded.
REMOVED_FROM_OUR_MODELS = ("average", "sync_batchnorm")

TARGETS = {
    "gpipe_cli.data.digits.DigitsSource": "gpipe_cli.data.images.digits.DigitsSource",
    "gpipe_cli.data.images.ImageSource": "gpipe_cli.data.images.source.ImageSource",
    "gpipe_cli.data.text.TextSource": "gpipe_cli.data.cldr.text.TextSource",
    "gpipe_cli.data.translation.TranslationSource": "gpipe_cli.data.cldr.source.TranslationSource",
    "gpipe_cli.data.parallel_text.ParallelTextSource": "gpipe_cli.data.parallel.source.ParallelTextSource",
    "gpipe_cli.trainer.adafactor.Adafactor": "gpipe_cli.optim.adafactor.Adafactor",
    "gpipe_cli.trainer.optimizers.TFRMSprop": "gpipe_cli.optim.optimizers.TFRMSprop",
    "gpipe_cli.trainer.lr_schedules.constant": "gpipe_cli.optim.lr_schedules.constant",
    "gpipe_cli.trainer.lr_schedules.cosine": "gpipe_cli.optim.lr_schedules.cosine",
    "gpipe_cli.trainer.lr_schedules.exponential": "gpipe_cli.optim.lr_schedules.exponential",
    "gpipe_cli.trainer.lr_schedules.exponential_epochs": "gpipe_cli.optim.lr_schedules.exponential_epochs",
    "gpipe_cli.trainer.lr_schedules.inverse_sqrt": "gpipe_cli.optim.lr_schedules.inverse_sqrt",
    "gpipe_cli.trainer.lr_schedules.transformer": "gpipe_cli.optim.lr_schedules.transformer",
}

# Keys that a `_target_` takes since, with today's default; whether the data differ is told by their fingerprint.
ADDED: dict[str, dict[str, Any]] = {
    "gpipe_cli.data.cldr.source.TranslationSource": {"smaller_vocabulary": False},
    "gpipe_cli.data.parallel.source.ParallelTextSource": {
        "smaller_vocabulary": False,
        "on_defect": {"nul": "drop", "byte_order_mark": "drop", "held_out": "drop", "copied": "keep"},
    },
}

# Keys of typed sections that are new since, with the value that does what was done before.
ADDED_TO_SECTIONS: dict[str, dict[str, Any]] = {
    "precision": {"boundaries": None, "loss_scale": None, "tf32": False},
    "pipeline": {"compile": False, "shard_optimizer": False},
}


def with_todays_names(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration with today's sections, keys and ``_target_``s, at any depth."""
    renamed = {SECTIONS.get(name, name): _with_todays_targets(value) for name, value in configuration.items()}
    for name in REMOVED:
        renamed.pop(name, None)
    for name, added in ADDED_TO_SECTIONS.items():
        if isinstance(renamed.get(name), Mapping):
            renamed[name] = _completed(renamed[name], added)
    model = renamed.get("model")
    if isinstance(model, dict) and str(model.get("_target_")).startswith("gpipe_cli.models."):
        renamed["model"] = {key: value for key, value in model.items() if key not in REMOVED_FROM_OUR_MODELS}
    return renamed


def _with_todays_targets(value: Any) -> Any:
    if isinstance(value, Mapping):
        renamed = {key: _with_todays_targets(inner) for key, inner in value.items()}
        if isinstance(renamed.get("_target_"), str):
            renamed["_target_"] = TARGETS.get(renamed["_target_"], renamed["_target_"])
            renamed = _completed(renamed, ADDED.get(renamed["_target_"], {}))
        return renamed
    if isinstance(value, (list, tuple)):
        return [_with_todays_targets(inner) for inner in value]
    return value


def _completed(section: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the section with the added keys that it lacks; also within its own sections."""
    completed = {**added, **section}
    for key, inner in added.items():
        if isinstance(inner, Mapping) and isinstance(completed[key], Mapping):
            completed[key] = {**inner, **completed[key]}
    return completed
