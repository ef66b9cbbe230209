"""Decides which functions a checkpoint may name: gpipe-eval and gpipe-translate build model, data and task of them.

A `_target_` can be any function that Python can import, with the keys beside it as arguments, and a checkpoint may come
from anywhere. Only names in `OURS` are called, and what was typed: `trust=[…]`, or a `_target_` among the overrides.
Names are compared as a whole: Hydra resolves attributes of what a module imports, so
`gpipe_cli.data.images.digits.Path.unlink` begins like a name of gpipe-cli.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from gpipe_cli.config import KINDS
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.typed_section import flat, typed

OURS = {  # of models, data and tasks
    *KINDS,
    "gpipe_cli.data.torch_datasets.DatasetSource",
    "gpipe_cli.models.traced.layers.layers",
    "gpipe_cli.tasks.own_loss.OwnLossTask",
}
PATHS = ("root", "evaluation_root", "tokenizer", "train", "dev", "test")  # keys of data that name files to read
SECTIONS = ("model", "data", "task")  # optimizer and lr_schedule are not built without training


def typed_names(words: Sequence[str]) -> list[str]:
    """Returns the `_target_`s in overrides, also inside values such as ``data.train={_target_:my_data.Mine}``."""
    overrides = OverridesParser.create().parse_overrides(list(words))
    return list(targets([{each.key_or_group.rpartition(".")[2]: each.value()} for each in overrides]))


def look_here(named: Iterable[str]) -> None:
    """Appends the current directory to the import path if one of these names needs a module that is nowhere else.

    Otherwise it stays out, and it comes last: it may be a stranger's, whose files must not run because a library looks
    for an optional module. Workers inherit the path.

    Args:
        named: `_target_`s that the user has chosen, not those of a checkpoint.
    """
    modules = filter(None, (name.partition(".")[0] for name in named))
    if any(module not in sys.modules and find_spec(module) is None for module in modules):
        sys.path.append(str(Path.cwd()))


def refuse_interpolations(recorded: Mapping[str, Any], checkpoint: Path) -> None:
    """Refuses interpolations, which could become a `_target_` after the check. Runs record resolved values only.

    Raises:
        ConfigurationError: a text of the recorded configuration contains ``${``.
    """
    if "${" in json.dumps(dict(recorded)):
        raise ConfigurationError(
            f"{checkpoint}/manifest.json: its configuration holds an interpolation; no run writes ${{…}} there, so the "
            "file was changed: use another copy of the checkpoint"
        )


def refuse_foreign(config: Mapping[str, Any], trusted: Sequence[str], checkpoint: Path) -> None:
    """Refuses `_target_`s that are neither gpipe-cli's own nor trusted.

    Args:
        config: resolved, as workers will get it.

    Raises:
        ConfigurationError: it names the foreign `_target_`s, and what to type to trust them.
    """
    wanted = list(dict.fromkeys(targets([config[section] for section in SECTIONS])))
    foreign = [name for name in wanted if name not in OURS and name not in trusted]
    if foreign:
        everything = ",".join([*trusted, *foreign])
        raise ConfigurationError(
            f"{checkpoint} wants to call {', '.join(foreign)}: code that is not part of gpipe-cli is called "
            f"only when you name it. If you know it and trust it, type trust=[{everything}]"
        )


def refuse_unnamed_paths(
    data: Mapping[str, Any], named: Sequence[str], recorded: Mapping[str, Any], checkpoint: Path
) -> None:
    """Refuses to read files that a checkpoint's configuration names, and the user never has.

    Args:
        data: the section.
        named: the keys that were typed, and those of `trust=`.
        recorded: the configuration in the user's own run directory, flat; empty if the directory is not the user's.

    Raises:
        ConfigurationError: it names the keys with their values, and what to type.
    """
    found = {f"data.{key}": data[key] for key in PATHS if data.get(key) is not None and not [*targets(data[key])]}
    trained_on = [key for key, value in found.items() if flat({key: value}).items() <= recorded.items()]
    if unnamed := [key for key in found if not {key, "data"} & {*named, *trained_on}]:
        words = " ".join(f"{key}={typed(found[key])}" for key in unnamed)
        raise ConfigurationError(
            f"{checkpoint} names files: {words}. They are read only when you name them, too: type "
            f"these words, or trust=[{','.join(unnamed)}]"
        )


def targets(value: Any) -> Iterator[str]:
    """Yields every `_target_`, at any depth."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from [str(item)] if key == "_target_" else targets(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from targets(item)
