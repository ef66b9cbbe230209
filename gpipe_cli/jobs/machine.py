"""Chooses the number of workers by the devices, and looks for the files of data. No torch."""

import os
from pathlib import Path

from gpipe_cli.config import ROUND_ROBIN, PipelineConfig, Settings
from gpipe_cli.cpu import usable_cores
from gpipe_cli.data.images.layout import unsplit
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.gpus import count_gpus
from gpipe_cli.schedule.own_lists import is_file, read_lists, why_not_for
from gpipe_cli.terminal.text import plural
from gpipe_cli.typed_section import shown


def require_data(settings: Settings) -> None:
    """Refuses files and folders of our data sources that are not there.

    Raises:
        ConfigurationError: it names the key and the path.
    """
    data, kinds = settings.data, ("gpipe_cli.data.parallel.", "gpipe_cli.data.images.source.", "gpipe_cli.data.text.")
    if not data["_target_"].startswith(kinds):
        return
    if data.get("root") in (None, "") and not data.get("train"):  # an unset variable of the shell is ""
        raise ConfigurationError(
            "data.root is not set: type data.root=FOLDER, the folder that holds the data (docs/data.md)"
        )
    for key in ("root", "evaluation_root", "tokenizer"):
        names = data[key] if isinstance(data.get(key), list) else [data.get(key)]
        for name in filter(None, names):
            if not os.access(Path(str(name)).expanduser(), os.F_OK):
                raise ConfigurationError(f"data.{key}={shown(data[key])}: there is no {name}")
    two_splits = data.get("dataset") in ("image_folder", "imagenet") and data.get("held_out") is None
    if two_splits and (line := unsplit(Path(str(data["root"])).expanduser(), data["folders"])):
        raise ConfigurationError(line)


def most_workers(pipeline: PipelineConfig) -> tuple[int, str]:
    """Returns the number of workers of one replica that fit this machine, at least one, and its devices in words.

    The devices are GPUs, or the CPU cores that this process may use (`pipeline.device`).
    """
    if gpus := 0 if pipeline.device == "cpu" else count_gpus():
        return max(1, gpus // pipeline.replicas), plural(gpus, "GPU")
    cores = usable_cores()
    return max(1, cores // pipeline.replicas // pipeline.threads), plural(cores, "core")


def choose_workers(pipeline: PipelineConfig, inline: bool, world_size: int | None) -> tuple[int, str]:
    """Returns the number of workers of one replica, and a line about it for the console.

    Args:
        inline: one worker inside the command's process.
        world_size: number of processes of the torchrun job; None if the command starts its own workers.

    Raises:
        ConfigurationError: `world_size` or the lists of a file do not fit the configuration.
    """
    if world_size is not None:
        workers, why = _workers_of_job(pipeline, world_size), f"WORLD_SIZE={world_size}"
    elif inline:
        workers, why = 1, "launch.inline=true"
    elif pipeline.workers == "auto" and is_file(pipeline.schedule):
        workers, why = len(read_lists(pipeline.schedule).lists), pipeline.schedule
    elif pipeline.workers == "auto":
        most, why = most_workers(pipeline)
        workers = pipeline.workers_in(most)
    else:
        workers, why = pipeline.workers, f"pipeline.workers={pipeline.workers}"
    if is_file(pipeline.schedule) and (unfit := why_not_for(pipeline.schedule, pipeline.K, pipeline.M, workers)):
        raise ConfigurationError(unfit)
    replicas = f" × {plural(pipeline.replicas, 'replica')}" if pipeline.replicas > 1 else ""
    cells = "cells to be chosen" if "K" in pipeline.auto else plural(pipeline.K, "cell")
    return workers, f"{cells} on {plural(workers, 'worker')}{replicas} ({why})"


def _workers_of_job(pipeline: PipelineConfig, world_size: int) -> int:
    """Returns the workers of one replica in a torchrun job.

    Raises:
        ConfigurationError: the processes do not fit the configuration.
    """
    replicas, K = pipeline.replicas, pipeline.K
    workers, rest = divmod(world_size, replicas)
    uneven = pipeline.schedule in ROUND_ROBIN and workers and K % workers
    if rest or not 1 <= workers <= K or pipeline.workers not in ("auto", workers) or uneven:
        raise ConfigurationError(
            f"WORLD_SIZE={world_size} does not fit pipeline.workers={pipeline.workers} × pipeline.replicas={replicas} "
            f"and pipeline.K={K}: start torchrun with pipeline.replicas times 1 to {K} processes"
            + (f", a number that divides pipeline.K ({pipeline.schedule})" if uneven else "")
        )
    return workers
