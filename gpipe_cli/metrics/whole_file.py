"""Writes files atomically, for readers that may read while a run still writes."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replaces the file atomically. Unlike a checkpoint's files it may be lost when the machine crashes.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = path.with_name(f"{path.name}.partial")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
