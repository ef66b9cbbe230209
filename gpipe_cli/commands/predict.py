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

from gpipe_cli.checkpoint.files import vocabulary_folder
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

    places = [word for word in words if "=" not in word or Path(word).exists()]
    line = read_words([word for word in words if word not in places], OWN)
    if len(places) < 2:
        raise ConfigurationError("type gpipe-predict RUN FILES…")
    files = [str(file) for place in places[1:] for file in images_at(Path(place))]
    run = open_run(places[0], line.overrides, line.own.get("step", "last"), line.own.get("trust", ()))
    data = source_of(run.prepared.config["data"], files, vocabulary_folder(run.info.run_dir))
    config = {"settings": {**run.prepared.config, "data": data}, "checkpoint": str(run.info.path.absolute())}
    for text in run.warnings:
        to_stderr(text)
    with tempfile.TemporaryDirectory(prefix="gpipe-predict-") as folder:
        found = run.launch("gpipe_cli.inference.evaluate:predict", config, Path(folder), tell)
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


def source_of(data: dict[str, Any], files: Sequence[str], vocabularies: Path) -> dict[str, Any]:
    """Returns the section data for these images, transformed as in the run's evaluations.

    Args:
        data: the section of the run's configuration.
        vocabularies: the run's folder, with the names of its classes.

    Raises:
        ConfigurationError: the run was not trained on images of ours.
    """
    if not data["_target_"].startswith(IMAGES):
        raise ConfigurationError(f"data._target_={data['_target_']}: gpipe-predict knows images of {IMAGES}* only")
    keys = ("image_size", "evaluation_crop", "batch_size")
    known = {key: data[key] for key in keys if data.get(key) is not None}
    source = {"_target_": f"{IMAGES}source.ImagesOfRun", "files": list(files), "vocabularies": str(vocabularies)}
    return {**source, **known}


if __name__ == "__main__":
    sys.exit(main())
