"""Errors whose message is written for the person at the console."""

from __future__ import annotations


class ConfigurationError(ValueError):
    """What the user asked for cannot be done; the message names the key, the value, and what to type instead.

    It is shown without a traceback, wherever in the command or in a worker it was raised.
    """
