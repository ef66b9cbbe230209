"""Replaces the names in the configuration of checkpoints of format 2 by today's. This file imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SECTIONS = {"schedule": "lr_schedule"}
REMOVED = {"verify": None, "model": "average"}  # a whole section, or a key of one
TARGETS = {
    "gpipe_cli.data.translation.TranslationSource": "gpipe_cli.data.cldr.source.TranslationSource",
    "gpipe_cli.trainer.adafactor.Adafactor": "gpipe_cli.optim.adafactor.Adafactor",
    "gpipe_cli.trainer.lr_schedules.inverse_sqrt": "gpipe_cli.optim.lr_schedules.inverse_sqrt",
}
# Keys of sections that are new since, with the value that does what was done before.
ADDED: dict[str, dict[str, Any]] = {
    "data": {"smaller_vocabulary": False},
    "precision": {"boundaries": None, "loss_scale": None, "tf32": False},
    "pipeline": {"compile": False, "shard_optimizer": False},
}


def with_todays_names(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration with today's sections, keys and ``_target_``s."""
    renamed = {}
    for old_name, section in configuration.items():
        name = SECTIONS.get(old_name, old_name)
        removed = REMOVED.get(name, "")
        if removed is None:
            continue
        if isinstance(section, Mapping):
            section = {**ADDED.get(name, {}), **section}
            section.pop(removed, None)
            if section.get("_target_") in TARGETS:
                section["_target_"] = TARGETS[section["_target_"]]
        renamed[name] = section
    return renamed
