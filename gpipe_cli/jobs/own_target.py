"""Prepares `gpipe-train model._target_=my_module.my_layers`: a user's function in place of the chosen group's own.

The keys of the chosen YAML belong to its own function. When a `_target_` is typed for model, data, task, optimizer or
lr_schedule, only the keys typed beside it are passed on (and `ALWAYS_KEPT`), and none of them needs Hydra's `+`.
For a fixed set of keys, write a YAML file and choose it with --config-dir.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException

from gpipe_cli.config import FREE_FORM

OWN_LR_SCHEDULE = "constant"  # suits any model
ALWAYS_KEPT = {"data": ("batch_size",), "optimizer": ("lr",)}  # every data set and every optimizer has these


def complete(words: Sequence[str]) -> list[str]:
    """Returns the command line as Hydra must read it: new keys marked, and what a user's own model needs."""
    marked, typed = allow_new_keys(words), filter(None, map(_parsed, words))
    targets = {override.key_or_group: _target(override) for override in typed}
    own = targets.get("model._target_")
    name = own or targets.get("model.module._target_") or targets.get("model.module")
    if not isinstance(name, str) or any(word.startswith("experiment=") for word in words):
        return marked
    added = {"name": name}  # else the run directory has the name of the chosen group
    if own:  # in place of conf/model/transformer.yaml, which chooses them for the Transformer
        added |= {"trainer.average": "null", "lr_schedule": OWN_LR_SCHEDULE, "optimizer": "adam"}
    typed_keys = {word.partition("=")[0] for word in words}
    return [*marked, *(f"{key}={value}" for key, value in added.items() if key not in typed_keys)]


def look_here(named: Iterable[str]) -> None:
    """Appends the current directory to the import path if one of these names begins with a module found nowhere else.

    Only then, and at the end: the directory may be a stranger's, whose files must not run because a library looks for
    an optional module. Workers inherit the path.

    Args:
        named: `_target_`s that the user has chosen, not those of a checkpoint.
    """
    modules = filter(None, (name.partition(".")[0] for name in named))
    if any(module not in sys.modules and find_spec(module) is None for module in modules):
        sys.path.append(str(Path.cwd()))


def allow_new_keys(words: Sequence[str]) -> list[str]:
    """Returns the words with `++` before the keys of each section, or part of one, whose `_target_` is typed.

    Such a part may be typed as one value, as ``model.module={_target_:torchvision.models.resnet50,num_classes:10}``.
    """
    parsed = [*map(_parsed, words)]
    keys = [override.key_or_group for override in parsed if override is not None and _section(override)]
    own = tuple(key.removesuffix("_target_") for key in keys if key.endswith("._target_"))
    return [
        f"++{word}"
        if override is not None
        and override.type == OverrideType.CHANGE
        and (override.key_or_group.startswith(own) or (_section(override) and _target(override)))
        else word
        for word, override in zip(words, parsed, strict=True)
    ]


def keys_left_out(config: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, list[str]]:
    """Returns, for each section whose `_target_` is typed, the keys that are not passed on.

    Args:
        config: composed; its values are not read, since they may refer to keys that are left out.
        overrides: of this job, as typed.
    """
    kept = {section: {*keys, *ALWAYS_KEPT.get(section, ())} for section, keys in _typed_keys(overrides).items()}
    return {section: [str(key) for key in config[section] if key not in keys] for section, keys in kept.items()}


def typed_sections(overrides: Sequence[str]) -> set[str]:
    """Returns the sections whose `_target_` is typed."""
    return set(_typed_keys(overrides))


def describe(config: Mapping[str, Any], left_out: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns lines for the console: the sections whose keys are left out, and the learning rate of an own model.

    Args:
        config: with the keys that are passed on.
        left_out: by section.
    """
    calls = [
        f"{section}._target_={config[section]['_target_']}: called with "
        + (", ".join(key for key in config[section] if key != "_target_") or "no keys")
        for section, keys in left_out.items()
        if keys
    ]
    lines = [f"{'; '.join(calls)} (keys that were not typed belong to other functions)"] if calls else []
    lr_schedule = config.get("lr_schedule", {})
    if "model" in left_out and lr_schedule.get("_target_") == f"gpipe_cli.optim.lr_schedules.{OWN_LR_SCHEDULE}":
        lr, steps = config.get("optimizer", {}).get("lr"), lr_schedule.get("warmup_steps")
        rise = f" after a rise over {steps} steps" if steps else ""
        lines.append(f"learning rate: {lr} in every step{rise} (lr_schedule=constant; for others type lr_schedule=…)")
    return lines


def _typed_keys(words: Sequence[str]) -> dict[str, set[str]]:
    """Returns the typed keys of each section whose `_target_` is among them."""
    typed: dict[str, set[str]] = {}
    for override in filter(None, map(_parsed, words)):
        if _section(override) and not override.is_delete():
            typed.setdefault(_section(override), set()).add(override.key_or_group.split(".")[1])
    return {section: keys for section, keys in typed.items() if "_target_" in keys}


def _section(override: Override) -> str:
    """Returns the section of `FREE_FORM` in which the override sets a key, or an empty text."""
    section, dot, _ = override.key_or_group.partition(".")
    return section if dot and section in FREE_FORM else ""


def _target(override: Override) -> Any:
    """Returns the value of a key, or the `_target_` in it where it is a dictionary."""
    value = None if override.is_sweep_override() else override.value()
    if isinstance(value, Mapping):
        return value.get("_target_")
    return value if override.key_or_group.endswith("._target_") else None


def _parsed(word: str) -> Override | None:
    """Returns the word as Hydra reads it; None for options, and for what Hydra will refuse."""
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        return None
