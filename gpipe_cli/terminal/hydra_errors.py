"""Rewrites errors of Hydra and OmegaConf as messages that say what to type instead."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own
from hydra import compose, initialize_config_module
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException

from gpipe_cli.config import FREE_FORM, known_keys
from gpipe_cli.typed_section import nearest, unknown_key

KNOWN = (HydraException, OmegaConfBaseException, yaml.YAMLError)  # errors that `explain` rewrites
NO_KEY = re.compile(r"Could not override '([^'=]+)")
NOTHING_TO_DELETE = re.compile(r"Could not delete from config\. '([^'=]+)")
NO_GROUP = re.compile(r"Could not override '([^']+)'\.\s*No match in the defaults list")
REFERENCE = re.compile(r"Interpolation key '([^']+)' not found")
SWEEP_WITHOUT_M = re.compile(r"Ambiguous value for argument '([^']+)'")


def explain(error: Exception, words: Sequence[str], own_keys: Sequence[str] = ()) -> str:
    """Returns the message for the console.

    Args:
        error: one of `KNOWN`.
        words: the command line.
        own_keys: dotted keys of the command beside those of gpipe-train.
    """
    text = str(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
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
        return _unknown(match[1], words, own_keys)
    if match := NOTHING_TO_DELETE.search(text):
        return _nothing_to_delete(match[1], words, own_keys)
    if isinstance(error, MissingMandatoryValue):
        key = getattr(error, "full_key", None) or text
        return f"{key} needs a value: type {key}=…"
    if isinstance(error, InterpolationKeyError) and (match := REFERENCE.search(text)):
        key = getattr(error, "full_key", None) or "a key"
        section = match[1].partition(".")[0]
        return (
            f"{key} is taken from {match[1]}, which the chosen {section} does not have: "
            f"choose another {section}, or type {key}=…"
        )
    return _first_lines(error)


def _missing_option(error: MissingConfigException) -> str:
    path, options = (error.missing_cfg_file or "").removesuffix(".yaml"), list(error.options or ())
    group, slash, option = path.rpartition("/") if path.startswith("hydra/") else path.partition("/")
    if not slash:
        return f"there is no configuration {path}.yaml: leave out --config-name, or give --config-dir too"
    near = nearest(option, options)
    guess = f"did you mean {' or '.join(f'{group}={name}' for name in near)}? " if near else ""
    return f"there is no {group}={option}; {guess}{group} can be: {', '.join(options) or '(nothing yet)'}"


def _unknown(key: str, words: Sequence[str], own_keys: Sequence[str]) -> str:
    keys = _keys_beside(key, words, own_keys)
    text = unknown_key(key, keys)
    if _is_passed_on(key) and not nearest(key, keys):
        text += f"; to pass it to {key.partition('.')[0]}._target_ all the same, type +{key}=…"
    return text


def _nothing_to_delete(key: str, words: Sequence[str], own_keys: Sequence[str]) -> str:
    """Returns the message for ~key; Hydra treats a key that is null as missing."""
    keys = _keys_beside(key, words, own_keys)
    return f"{key} is null, and so cannot be deleted: leave out ~{key}" if key in keys else unknown_key(key, keys)


def _is_passed_on(key: str) -> bool:
    """Returns whether the `_target_` of its section receives the key, so that no list of keys exists."""
    return "." in key and key.partition(".")[0] in FREE_FORM


def _keys_beside(key: str, words: Sequence[str], own_keys: Sequence[str]) -> list[str]:
    """Returns all dotted keys that could be meant."""
    return _keys_of_chosen_groups(words) if _is_passed_on(key) else [*known_keys(), *own_keys]


def _keys_of_chosen_groups(words: Sequence[str]) -> list[str]:
    """Returns the dotted keys of sections that a `_target_` receives, for the groups chosen on the command line."""
    chosen = [word for word in words if re.fullmatch(r"[\w/]+=[\w/]+", word)]
    for overrides in (chosen, []):
        try:
            with initialize_config_module("gpipe_cli.conf", version_base="1.3"):
                return list(_dotted(compose("train", overrides)))
        except KNOWN:
            continue  # a group is wrong: suggest from the default groups
    return []


def _dotted(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in map(str, config):
        yield f"{prefix}{key}"
        value = None if OmegaConf.is_interpolation(config, key) else config._get_node(key)
        if isinstance(value, DictConfig):
            yield from _dotted(value, f"{prefix}{key}.")


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0]


def _first_lines(error: Exception) -> str:
    """Returns Hydra's own message without blank lines and object types."""
    lines = [line.strip() for line in str(error).splitlines()]
    return "\n".join(line for line in lines if line and not line.startswith(("object_type", "full_key")))
