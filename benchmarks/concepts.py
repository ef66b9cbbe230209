"""Counts what a reader of a training step meets: files, functions and changes of file.

Traced is the second step of a tiny run, from the report of the first to its own: four cells on one worker, inside this
process, and four micro-batches. A call is a change of file where the call before it lay in another file.
"""

import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from benchmarks.common import ROOT, parser, report
from gpipe_cli.jobs.configuration import composed, prepare
from gpipe_cli.launch.supervisor import Job, launch_inline

WORDS = ("debug=tiny", "pipeline.K=4", "pipeline.M=4", "launch.inline=true", "logging.tensorboard=false")
PACKAGES = tuple(str(ROOT / folder) for folder in ("gpipe_cli", "models", "data"))


def traced_calls() -> list[tuple[str, str]]:
    """Returns file and function of each call in the second step, in order."""
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, *_: object) -> None:
        if frame.f_code.co_filename.startswith(PACKAGES):
            calls.append((frame.f_code.co_filename, f"{frame.f_code.co_name}, line {frame.f_code.co_firstlineno}"))

    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == "progress":
            sys.settrace(note if event["step"] == 1 else None)

    config = prepare(composed("train", WORDS)).config
    with TemporaryDirectory() as folder:
        launch_inline(Job(Path(folder), 1, "gpipe_cli.trainer.run:main", {"settings": config}), on_event)
    return calls


def main() -> None:
    arguments = parser(__doc__).parse_args()
    calls = traced_calls()
    files = [file for file, _ in calls]
    row: dict[str, Any] = {"files": len({*files}), "functions": len({*calls}), "calls": len(calls)}
    row["changes of file"] = sum(one != other for one, other in pairwise(files))
    most = [f"{Path(file).relative_to(ROOT)} {number:,}" for file, number in Counter(files).most_common()]
    report(dict.fromkeys(row, ",d"), [row], arguments.output, lambda _: [f"calls: {', '.join(most)}"])


if __name__ == "__main__":
    main()
