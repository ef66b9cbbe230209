"""`gpipe-train model._target_=my_module.my_layers`: a function of the user's in place of the group's own.

The chosen YAML's keys are meant for its own function. So when a `_target_` is typed for model, data, task, optimizer or
schedule, only the keys that are typed beside it are passed on (and `ALWAYS_KEPT`); none of them needs Hydra's `+`.
Whoever wants a fixed set of keys writes a YAML file of their own and chooses it with --config-dir.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gpipe_cli.config import FREE_FORM

ALWAYS_KEPT = {"data": ("batch_size",), "optimizer": ("lr",)}  # what every data set and every optimizer has
OVERRIDE = re.compile(r"(?P<mark>\+{0,2})(?P<section>\w+)\.(?P<key>[^.=@]+)(?P<rest>[^=]*=.*)", re.DOTALL)


def allow_new_keys(words: Sequence[str]) -> list[str]:
    """The command line with `++` before the keys of each section whose `_target_` is typed in it."""
    own = set(_typed_keys(words))
    changed = []
    for word in words:
        match = OVERRIDE.fullmatch(word)
        changed.append(f"++{word}" if match and match["section"] in own and not match["mark"] else word)
    return changed


def keys_left_out(config: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, list[str]]:
    """The keys, by section, that are not passed on because the section's `_target_` was typed without them.

    Args:
        config: composed; its values are not looked at, since they may refer to other keys that are left out.
        overrides: of this job, as typed.
    """
    kept = {section: {*keys, *ALWAYS_KEPT.get(section, ())} for section, keys in _typed_keys(overrides).items()}
    return {section: [str(key) for key in config[section] if key not in keys] for section, keys in kept.items()}


def describe(section: str, values: Mapping[str, Any], left_out: Sequence[str]) -> str:
    """The line that tells the person; `values` are those that are passed on."""
    taken = ", ".join(key for key in values if key != "_target_") or "no keys"
    return (
        f"{section}._target_={values['_target_']}: called with {taken}; "
        f"left out, because they are not its own: {', '.join(left_out)}"
    )


def _typed_keys(words: Sequence[str]) -> dict[str, set[str]]:
    """The keys typed in each section whose `_target_` is among them."""
    typed: dict[str, set[str]] = {}
    for word in words:
        match = OVERRIDE.fullmatch(word)
        if match and match["section"] in FREE_FORM:
            typed.setdefault(match["section"], set()).add(match["key"])
    return {section: keys for section, keys in typed.items() if "_target_" in keys}
