"""Rewrites errors of Hydra and OmegaConf as one line that says what to type instead."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from typing import Any

import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import (
    GrammarParseError,
    InterpolationKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    UnsupportedInterpolationType,
)

from gpipe_cli.terminal import yaml_aliases  # noqa: F401  # from here on all YAML is checked
from gpipe_cli.terminal.help import conf_folder
from gpipe_cli.typed_section import nearest

REFERENCE = re.compile(r"Interpolation key '([^']+)' not found")
RESOLVER = re.compile(r"Unsupported interpolation type (\S+)")
LONGEST = 300  # characters of a foreign message


def explain(error: Exception, key: str | None = None) -> str:
    """Returns the message for the console.

    Args:
        key: whose value cannot be set or read, if that is known.
    """
    text = str(error)
    key = key or getattr(error, "full_key", None) or "a key"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _missing_option(error)
    if isinstance(error, OverrideParseException):
        return (
            f"could not read {error.override!r}: write key=value, a value with spaces, brackets or = in two quotes, as "
            f"name='\"a=b\"' ({_one_line(text)})"
        )
    if isinstance(error, MissingMandatoryValue):
        return f"{key} needs a value: type {key}=…"
    if isinstance(error, InterpolationKeyError) and (match := REFERENCE.search(text)):
        section, dot, _ = match[1].partition(".")
        if not dot or not (conf_folder() / section).is_dir():
            return f"{key} is taken from {match[1]}, and there is no such key: type {key}=…"
        return (
            f"{key} is taken from {match[1]}, which the chosen {section} does not have: "
            f"choose another {section}, or type {key}=…"
        )
    if isinstance(error, UnsupportedInterpolationType) and (match := RESOLVER.search(text)):
        return f"{key}: there is no ${{{match[1]}:…}}: a key is ${{section.key}}, a variable ${{oc.env:NAME}}"
    if isinstance(error, GrammarParseError):
        return f"{key}: ${{…}} is not complete or has a wrong character ({_one_line(text)})"
    if isinstance(error, InterpolationResolutionError):
        return f"{key}: its ${{…}} cannot be computed ({_one_line(text)})"
    if isinstance(error, RecursionError):
        return _endless(error)
    if isinstance(error, yaml.YAMLError):
        return " ".join(text.split())
    return _one_line(text) or type(error).__name__


def _missing_option(error: MissingConfigException) -> str:
    path, options = (error.missing_cfg_file or "").removesuffix(".yaml"), list(error.options or ())
    group, slash, option = path.rpartition("/") if path.startswith("hydra/") else path.partition("/")
    if not slash:
        return f"there is no configuration {path}.yaml: leave out --config-name, or give --config-dir too"
    return no_such_option(group, option, options)


def no_such_option(group: str, option: str, options: Sequence[str]) -> str:
    """Returns the message for an option that a group does not have."""
    near = nearest(option, options)
    guess = f"did you mean {' or '.join(f'{group}={name}' for name in near)}? " if near else ""
    if group == "hydra/launcher" and option.startswith("submitit"):
        guess = "pip install 'gpipe-cli[slurm]' adds it; "
    return f"there is no {group}={option}; {guess}{group} can be: {', '.join(options) or '(nothing yet)'}"


def _endless(error: RecursionError) -> str:
    """Names the files whose lists of defaults lead back to themselves."""
    names: dict[str, None] = {}  # in order
    for frame, _ in traceback.walk_tb(error.__traceback__):
        parent: Any = frame.f_locals.get("parent")
        if hasattr(parent, "get_config_path"):
            names.setdefault(str(parent.get_config_path()))
    circle = [name for name in names if name not in ("hydra/config", "_dummy_empty_config_", "<root>")][-3:]
    return f"the defaults of {', '.join(circle) or 'a YAML file'} include themselves: take one entry out of `defaults:`"


def _one_line(text: str) -> str:
    """Returns a foreign message on one line, without the types of objects."""
    lines = [line.strip() for line in text.splitlines()]
    kept = [line for line in lines if line and not line.startswith(("object_type", "full_key", "See https"))]
    return " ".join(kept)[:LONGEST]
