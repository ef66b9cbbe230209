"""Explains why the object of a `_target_` cannot be made: the cause, and its place in the user's own code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..errors import place_in_users_code

LINES_SHOWN = 2  # of an exception's message
NOT_LOCATED = re.compile(r"Error locating target '(?P<target>[^']*)'(?:.*\nfull_key: (?P<inner>\S+))?", re.DOTALL)


def explain(key: str, section: Mapping[str, Any], error: Exception) -> str:
    """Returns one sentence, with file and line of the cause where it lies in code of the user's own.

    Args:
        key: of the section, such as "model".
        section: its `_target_` and the keys that were passed on.
        error: raised by Hydra's `instantiate`; it wraps the cause, and does not always quote all of it.
    """
    target, cause = section.get("_target_"), error.__cause__ or error
    not_located = NOT_LOCATED.match(str(error))
    if not_located is None:
        return f"{key}._target_={target} could not be made from the keys of `{key}`: {_summary(cause)}"
    cause, target, inner = cause.__cause__ or cause, not_located["target"], not_located["inner"]
    if inner:  # a section inside this one
        key = f"{key}.{inner}"
    if isinstance(cause, ModuleNotFoundError) and cause.name and f"{target}.".startswith(f"{cause.name}."):
        return f"{key}._target_={target} was not found: {_missing(cause.name)}"
    return f"{key}._target_={target} could not be imported: {_summary(cause)}"


def _missing(module: str) -> str:
    parent, dot, last = module.rpartition(".")
    return f"{parent} has no {last}" if dot else f"there is no module {last} here or on the PYTHONPATH"


def _summary(error: BaseException) -> str:
    """Returns the exception in a line or two; its type and place only where it was raised in the user's own code."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = "\n".join(lines[:LINES_SHOWN]) or type(error).__name__
    place = place_in_users_code(error)
    return message if place is None else f"{type(error).__name__}: {message} ({place})"
