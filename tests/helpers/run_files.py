"""Reads what runs and preparations leave."""

import json
from pathlib import Path
from typing import Any


def rows(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(run_dir: Path) -> list[float]:
    """Returns the loss of every step."""
    return [row["loss"] for row in rows(run_dir / "metrics.jsonl")]


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Returns the contents of all files of a folder, by their paths in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
