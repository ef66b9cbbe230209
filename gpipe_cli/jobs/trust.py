"""What a checkpoint may have called: gpipe-eval and gpipe-translate make model, data and task by the names in it.

A `_target_` can be any function that Python can import, and the keys beside it are its arguments. A checkpoint may come
from anybody, so it has nothing called but what stands in `OURS`, and what the person has typed: `trust=[…]`, or a
`_target_` among the overrides. The names are compared whole: Hydra goes on from a module to what that imports, so
`gpipe_cli.data.images.digits.Path.unlink` begins like a name of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from gpipe_cli.errors import ConfigurationError

SECTIONS = ("model", "data", "task")  # optimizer and schedule are not made where nothing is trained
OURS = frozenset(
    {
        "gpipe_cli.models.amoebanet.amoebanet",
        "gpipe_cli.models.transformer.transformer",
        "gpipe_cli.models.transformer_lm.transformer_lm",
        "gpipe_cli.data.images.digits.DigitsSource",
        "gpipe_cli.data.examples.ExampleSource",
        "gpipe_cli.data.images.source.ImageSource",
        "gpipe_cli.data.parallel.source.ParallelTextSource",
        "gpipe_cli.data.cldr.text.TextSource",
        "gpipe_cli.data.cldr.source.TranslationSource",
        "gpipe_cli.tasks.classification.ClassificationTask",
        "gpipe_cli.tasks.language_model.LanguageModelTask",
        "gpipe_cli.tasks.translation.TranslationTask",
    }
)


def trusted_names(word: str) -> list[str]:
    """What `trust=` was given: ``[a.b,c.d]``, or ``a.b``."""
    return [name for part in word.strip().removeprefix("[").removesuffix("]").split(",") if (name := part.strip())]


def typed_names(overrides: Sequence[Override]) -> list[str]:
    """The `_target_`s in the overrides, also in a value such as ``data.train={_target_:my_data.Mine}``."""
    values = [{override.key_or_group.rpartition(".")[2]: override.value()} for override in overrides]
    return [str(name) for name in _targets(values)]


def refuse_interpolations(recorded: Mapping[str, Any], checkpoint: Path) -> None:
    """A run records values. Whatever still refers to something else could become a `_target_` after they are checked.

    Raises:
        ConfigurationError: a text of the recorded configuration has ``${`` in it.
    """
    if (found := next((text for text in _texts(recorded) if "${" in text), None)) is not None:
        raise ConfigurationError(
            f"{checkpoint}/manifest.json: its configuration has the text {found!r}; no run writes ${{…}} there, so the "
            "file was changed: use another copy of the checkpoint"
        )


def refuse_foreign(config: Mapping[str, Any], trusted: Sequence[str], checkpoint: Path) -> None:
    """Refuse to call what is neither ours nor named by the person.

    Args:
        config: resolved, as workers will get it.

    Raises:
        ConfigurationError: it names what is foreign, and what to type where that is the person's own.
    """
    wanted = list(dict.fromkeys(map(str, _targets([config[section] for section in SECTIONS]))))
    foreign = [name for name in wanted if name not in OURS and name not in trusted]
    if foreign:
        everything = ",".join([*trusted, *foreign])
        raise ConfigurationError(
            f"{checkpoint} wants to call {', '.join(foreign)}, which is none of gpipe-cli's own. Other code is "
            f"only called when you have named it: if you know it and trust it, type trust=[{everything}]"
        )


def _targets(value: Any) -> Iterator[Any]:
    """Every `_target_`, at any depth."""
    return (item for key, item in _entries(value) if key == "_target_")


def _texts(value: Any) -> Iterator[str]:
    """Every text, keys among them, at any depth."""
    return (text for entry in _entries(value) for text in entry if isinstance(text, str))


def _entries(value: Any, key: Any = None) -> Iterator[tuple[Any, Any]]:
    """Every value with the key that it has, if it has one: this one, and all that lie in it."""
    yield key, value
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _entries(item, name)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _entries(item)
