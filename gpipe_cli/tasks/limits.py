"""Limits of the keys that several tasks share."""

from __future__ import annotations


def check_label_smoothing(value: float) -> None:
    """At least 0 and less than 1.

    Raises:
        ValueError: naming the key.
    """
    if not 0 <= value < 1:
        raise ValueError(f"task.label_smoothing={value}: use a number from 0 up to, but not including, 1, such as 0.1")
