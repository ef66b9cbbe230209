"""Errors whose message is written for the person at the console."""

from __future__ import annotations


class PlainError(Exception):
    """What the message says is all there is to know: it is shown without a traceback, wherever it was raised."""


class ConfigurationError(PlainError, ValueError):
    """What the user asked for cannot be done; the message names the key, the value, and what to type instead.

    A command ends with exit code 2 upon it, in a worker too.
    """
