"""Tells other workers of an exception, so that they raise one of the same class."""

import builtins
import traceback

import torch

from ..pipeline.cell import failed

TOLD = 2000  # characters of an exception's text


def describe(error: BaseException) -> tuple[list[str], str]:
    """Returns the names of an exception's classes, and its text with that of its causes."""
    causes: list[BaseException] = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    text = ": ".join("".join(traceback.format_exception_only(type(one), one)).strip() for one in causes)
    return [kind.__name__ for kind in type(error).__mro__], text[:TOLD]


def failed_there(rank: int, described: tuple[list[str], str]) -> BaseException:
    """Returns the exception of a worker whose step another worker's exception has ended.

    It is of the first class of that exception that is Python's or torch's, so one `except` serves all workers.
    """
    names, text = described
    kinds = [getattr(builtins, name, torch.OutOfMemoryError if name == "OutOfMemoryError" else None) for name in names]
    kind = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseException))
    said = f"rank {rank} has failed, and all is as before this call; the pipeline can go on. It was {text}"
    return failed(said, kind) if issubclass(kind, Exception) else kind(said)
