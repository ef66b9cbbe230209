"""What Hydra and OmegaConf refuse, in words that say what to type instead."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import yaml
from hydra import compose, initialize_config_module
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from gpipe_cli.config import known_keys
from gpipe_cli.typed_section import nearest, unknown_key

KNOWN = (HydraException, OmegaConfBaseException, yaml.YAMLError)  # errors that `explain` puts into words
NO_KEY = re.compile(r"(?:Could not override|Could not delete from config\.) '([^'=]+)")
NO_GROUP = re.compile(r"Could not override '([^']+)'\.\s*No match in the defaults list")
SWEEP_WITHOUT_M = re.compile(r"Ambiguous value for argument '([^']+)'")
IS_GROUP = re.compile(r"Key '(\w+)' is not in struct")


def explain(error: Exception, words: Sequence[str]) -> str:
    """The message for the console.

    Args:
        error: one of `KNOWN`.
        words: the command line.
    """
    text = str(error)
    if isinstance(error, MissingConfigException) and error.options is not None:
        return _missing_option(error)
    if match := SWEEP_WITHOUT_M.search(text):
        key, _, value = match[1].partition("=")
        return f"{match[1]} is a sweep: type gpipe-train -m … {match[1]}, or {key}=[{value}] for one list"
    if isinstance(error, OverrideParseException):
        return (
            f"could not read {error.override!r}: write key=value, with '…' around the whole word if the value has "
            f"spaces or brackets ({_first_line(text)})"
        )
    if match := NO_GROUP.search(text) or NO_KEY.search(text):
        return _unknown(match[1], words)
    if isinstance(error, MissingMandatoryValue):
        key = getattr(error, "full_key", None) or text
        return f"{key} needs a value: type {key}=…"
    return _first_lines(error)


def _missing_option(error: MissingConfigException) -> str:
    group, _, option = (error.missing_cfg_file or "").removesuffix(".yaml").rpartition("/")
    options = list(error.options or ())
    if not group:
        return f"there is no configuration {option}.yaml: leave out --config-name, or give --config-dir too"
    near = nearest(option, options)
    guess = f"did you mean {' or '.join(f'{group}={name}' for name in near)}? " if near else ""
    return f"there is no {group}={option}; {guess}{group} can be: {', '.join(options) or 'nothing'}"


def _unknown(key: str, words: Sequence[str]) -> str:
    keys = [*known_keys(), *_keys_of_chosen_groups(words)]
    section = key.split(".", 1)[0]
    siblings = [name for name in keys if name.startswith(f"{section}.")]
    text = unknown_key(key, siblings if siblings and not nearest(key, keys) else keys)
    if f"{section}._target_" in keys and not nearest(key, keys):
        text += f"; to pass it to {section}._target_ all the same, type +{key}=…"
    return text


def _keys_of_chosen_groups(words: Sequence[str]) -> list[str]:
    """Dotted keys of the sections whose keys are not ours to list, for the groups chosen on the command line."""
    chosen = [word for word in words if re.fullmatch(r"[\w/]+=[\w/]+", word)]
    for overrides in (chosen, []):
        try:
            with initialize_config_module("gpipe_cli.conf", version_base="1.3"):
                return list(_dotted(compose("train", overrides)))
        except KNOWN:
            continue  # with a wrong group among them: the default ones will do for a suggestion
    return []


def _dotted(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in config:
        yield f"{prefix}{key}"
        value = OmegaConf.select(config, str(key)) if OmegaConf.is_interpolation(config, str(key)) is False else None
        if isinstance(value, DictConfig):
            yield from _dotted(value, f"{prefix}{key}.")


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0]


def _first_lines(error: Exception) -> str:
    """Hydra's own words without its blank lines and object types."""
    lines = [line.strip() for line in str(error).splitlines()]
    return "\n".join(line for line in lines if line and not line.startswith(("object_type", "full_key")))
