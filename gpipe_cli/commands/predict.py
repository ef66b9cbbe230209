"""gpipe-predict: classifies images with the model of a run, in cells on workers as in training.

    gpipe-predict RUN cat.jpg photos/ > classes.csv

Prints a table in CSV: file, class, probability; of a folder, every image in and below it.

step=N            the checkpoint of step N; step=best: the one with the lowest loss; step=last (default)
trust=[NAMES]     code of your own that the checkpoint may call, such as trust=[my_module.layers]

Any key of the run can be typed too, such as pipeline.K=4, pipeline.workers=2 or data.batch_size=64.
"""  # --help prints this

import csv
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpipe_cli.commands.lines import tell
from gpipe_cli.data.images.layout import SUFFIXES, has_suffix
from gpipe_cli.data.tree import files_below
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.terminal.command import read_words, run_command, to_stderr

OWN: dict[str, Any] = {"step": str, "trust": list[str]}
IMAGES = "gpipe_cli.data.images."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 0, 1 when it failed, 2 when it was refused, 130 after Ctrl-C."""
    return run_command("gpipe-predict", arguments, __doc__, _predict, needs_words=True)


def _predict(words: Sequence[str]) -> int:
    from gpipe_cli.jobs.reopen import open_run

    line = read_words(words, OWN)
    if len(line.runs) < 2:
        raise ConfigurationError("type gpipe-predict RUN FILES…")
    checkpoint, *places = line.runs
    files = [str(file) for place in places for file in images_at(Path(place))]
    run = open_run(checkpoint, line)
    target = run.prepared.config["data"]["_target_"]
    if not target.startswith(IMAGES):
        raise ConfigurationError(f"data._target_={target}: gpipe-predict knows images of {IMAGES}* only")
    keys = ("image_size", "evaluation_crop", "batch_size")
    settings = run.with_data(f"{IMAGES}source.ImagesOfRun", keys, files=files)
    for text in run.warnings:
        to_stderr(text)
    with tempfile.TemporaryDirectory(prefix="gpipe-predict-") as folder:
        found = run.launch("gpipe_cli.inference.evaluate:predict", settings, Path(folder), tell)
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["file", "class", "probability"])
    table.writerows([file, name, f"{probability:.4f}"] for file, (name, probability) in zip(files, found, strict=True))
    return 0


def images_at(place: Path) -> Iterator[Path]:
    """Yields a file, or the images in and below a folder.

    Raises:
        ConfigurationError: there is none.
    """
    found = [Path(entry.path) for entry in files_below(place, has_suffix) if has_suffix(entry.name)]
    if place.is_dir() and not found:
        raise ConfigurationError(f"{place}: no image in it ({', '.join(SUFFIXES)})")
    if not place.is_dir() and not place.is_file():
        raise ConfigurationError(f"{place}: there is no such file or folder")
    yield from found or [place]


if __name__ == "__main__":
    sys.exit(main())
