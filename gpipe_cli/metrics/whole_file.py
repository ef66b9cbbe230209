"""Files that are there whole or not at all, for readers that may come while a run still writes."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replaces the file in one step. Unlike a checkpoint's files it may be lost when the machine goes down.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f"{path.name}.partial")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
