"""What to tell the person when what a `_target_` names cannot be made: the true cause, and where in their own code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from typing import Any

NOT_THEIRS = frozenset({*sys.stdlib_module_names, "hydra", "omegaconf", "torch", "numpy", "gpipe_cli"})
LINES_SHOWN = 2  # of an exception's message


def explain(key: str, section: Mapping[str, Any], error: Exception) -> str:
    """One sentence, with the cause's file and line where it arose in code of the user's own.

    Args:
        key: of the section, as "model".
        section: its `_target_` and the keys that were passed on.
        error: what Hydra's `instantiate` raised; it wraps the cause, and does not always quote all of it.
    """
    target, cause = section.get("_target_"), error.__cause__ or error
    if not str(error).startswith("Error locating target"):
        told = _told(cause) + _texts_among(key, section, cause)
        return f"{key}._target_={target} could not be made from the keys of `{key}`: {told}"
    cause = cause.__cause__ or cause
    if isinstance(cause, ModuleNotFoundError) and _is_part(cause.name, str(target)):
        return f"{key}._target_={target} was not found: {_what_is_missing(cause)}"
    return f"{key}._target_={target} could not be imported: {_told(cause)}"


def _is_part(module: str | None, target: str) -> bool:
    """Whether the module that was not found is one that the target names, and not one that the user's code imports."""
    return module is not None and f"{target}.".startswith(f"{module}.")


def _what_is_missing(error: ModuleNotFoundError) -> str:
    parent, dot, last = str(error.name).rpartition(".")
    if dot:
        return f"{parent} has no {last}"
    return f"there is no module {last} here or on the PYTHONPATH"


def _texts_among(key: str, section: Mapping[str, Any], error: BaseException) -> str:
    """Where something was no number but a text, the keys that it may be."""
    if not isinstance(error, TypeError) or "'str'" not in str(error):
        return ""
    texts = [
        f"{key}.{name}={value}" for name, value in section.items() if name != "_target_" and isinstance(value, str)
    ]
    return f"; texts among them: {', '.join(texts)}" if texts else ""


def _told(error: BaseException) -> str:
    """The exception in a line or two; with its type and place only where it arose in code of the user's own."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = "\n".join(lines[:LINES_SHOWN]) or type(error).__name__
    place = _place(error)
    return said if place is None else f"{type(error).__name__}: {said} ({place})"


def _place(error: BaseException) -> str | None:
    """File and line of the innermost call in code that is the user's own; None if there is none."""
    theirs = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in NOT_THEIRS
    ]
    return f"{theirs[-1][0]}, line {theirs[-1][1]}" if theirs else None
