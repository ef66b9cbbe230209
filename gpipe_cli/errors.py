"""Defines the errors whose message is all that the user needs, so that no traceback is printed."""

from __future__ import annotations


class PlainError(Exception):
    """Raised when the message alone explains the failure; it is printed without a traceback."""


class ConfigurationError(PlainError, ValueError):
    """Raised when a request cannot be fulfilled; the message names the key, the value, and what to type instead.

    The command ends with exit code 2, also when a worker raises it.
    """
