"""Refuses what this machine cannot hold, and data that are not there, before workers start. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpipe_cli.config import Checks, Settings
from gpipe_cli.cpu import usable_memory
from gpipe_cli.data.cldr.languages import check_languages
from gpipe_cli.gpus import count_gpus
from gpipe_cli.jobs import torchrun

THREADS_OF_A_CORE = 8  # at most: a run may go on, with the same number of threads, on a smaller machine
WORKER_BYTES = 32 << 20  # that a worker needs at least, without its part of the model
PARAMETER_BYTES = 8  # at least: weight and gradient, each a float32
HEAD = 64  # width of an attention head of the shipped Transformers


def _threads(settings: Settings) -> str | None:
    threads, cores = settings.pipeline.threads, os.cpu_count() or 1
    most = max(16, THREADS_OF_A_CORE * cores)
    if threads <= most:
        return None
    return f"pipeline.threads={threads}: this machine has {cores} cores, use at most {most} (1 is the default)"


def _processes(settings: Settings) -> str | None:
    pipeline = settings.pipeline
    workers = 1 if pipeline.workers == "auto" else pipeline.workers
    memory = usable_memory()
    if torchrun.world_size() is not None or memory is None or workers * pipeline.replicas * WORKER_BYTES <= memory:
        return None
    number = workers * pipeline.replicas
    key = "pipeline.replicas" if pipeline.replicas > workers else "pipeline.workers"
    return (
        f"{key}={getattr(pipeline, key.partition('.')[2])}: {number:,} processes need at least "
        f"{_size(number * WORKER_BYTES)} of memory, this machine has {_size(memory)}: use fewer"
    )


def _cells(settings: Settings) -> str | None:
    K, layers = settings.pipeline.K, layers_of(settings.model)
    if layers is None or layers >= K:
        return None
    return f"pipeline.K={K} but the model has {layers} layers: use pipeline.K<={layers} or a deeper model"


def layers_of(model: Mapping[str, Any]) -> int | None:
    """Returns the number of layers of a shipped model; None for any other."""
    L = model.get("L")
    if not isinstance(L, int):
        return None
    own = {
        "gpipe_cli.models.transformer.transformer": 5 * L + 5,
        "gpipe_cli.models.transformer_lm.transformer_lm": 2 * L + 2 + bool(model.get("final_norm")),
        "gpipe_cli.models.amoebanet.amoebanet": L + 6,
    }
    return own.get(str(model.get("_target_")))


def _model(settings: Settings) -> str | None:
    parameters, memory = parameters_of(settings.model), usable_memory()
    if parameters is None or memory is None or _has_other_memory(settings):
        return None
    needed = parameters * PARAMETER_BYTES * settings.pipeline.replicas
    if needed <= memory:
        return None
    copies = f" × {settings.pipeline.replicas} replicas" if settings.pipeline.replicas > 1 else ""
    keys = [key for key in ("L", "H", "A", "D", "d_model") if key in settings.model]
    sizes = ", ".join(f"model.{key}={settings.model[key]}" for key in keys)
    return (
        f"{sizes}: at least {parameters:,} parameters, whose weights and gradients{copies} take {_size(needed)}; this "
        f"machine has {_size(memory)}: make the model smaller (gpipe-plan shows what fits)"
    )


def parameters_of(model: Mapping[str, Any]) -> int | None:
    """Returns a lower bound of the number of parameters of a shipped model; None for any other."""
    name = str(model.get("_target_"))
    try:
        if name == "gpipe_cli.models.transformer.transformer":
            words = model["source_vocabulary"] + 2 * model["target_vocabulary"]
            layer = 12 * HEAD * model["A"] + 4 * model["H"]
        elif name == "gpipe_cli.models.transformer_lm.transformer_lm":
            words, layer = 2 * model["vocabulary"], 4 * HEAD * model["A"] + 2 * model["H"]
        elif name == "gpipe_cli.models.amoebanet.amoebanet":
            return int(60 * model["L"] * model["D"] ** 2)  # those of the paper have about 100 · L · D²
        else:
            return None
        return int(model["d_model"] * (model["L"] * layer + words))
    except KeyError:  # a wrong value
        return None


def _batch(settings: Settings) -> str | None:
    data, memory = settings.data, usable_memory()
    size = data.get("batch_size") or data.get("batch_tokens")
    if not isinstance(size, int) or memory is None:
        return None
    side = data.get("image_size")
    needed = size * (3 * side * side if isinstance(side, int) else 8)  # bytes of an image; a token at least
    if needed <= memory:
        return None
    key = "batch_size" if data.get("batch_size") else "batch_tokens"
    return (
        f"data.{key}={size}: one mini-batch takes at least {_size(needed)}, this machine has {_size(memory)}: use fewer"
    )


def _has_other_memory(settings: Settings) -> bool:
    """Returns whether the model lies in GPUs, or on several machines."""
    if torchrun.world_size() is not None:
        return True
    return settings.pipeline.device != "cpu" and count_gpus() > 0


def _languages(settings: Settings) -> str | None:
    data = settings.data
    if not str(data.get("_target_")).startswith("gpipe_cli.data.cldr."):
        return None
    chosen = [data["pair"]] if data.get("pair") is not None else data.get("languages")
    try:
        check_languages(chosen)
    except ValueError as error:
        return str(error)
    return None


def _folder(settings: Settings) -> str | None:
    data = settings.data
    kinds = ("gpipe_cli.data.parallel.", "gpipe_cli.data.images.source.", "gpipe_cli.data.text.")
    target = str(data.get("_target_"))
    if not target.startswith(kinds):
        return None
    if data.get("root") is None:
        return "data.root is not set: type data.root=FOLDER, the folder that holds the data (docs/data.md)"
    if not target.startswith("gpipe_cli.data.text."):
        folders = [Path(data["root"], name).expanduser() for name in ("", *data.get("folders", ()))]
        missing = [folder for folder in folders if not folder.is_dir()]
        there = not missing or data.get("download") is True
        return None if there else f"data.root={data['root']}: there is no folder {missing[0]}"
    places = {key: data.get(key) for key in ("root", "evaluation_root", "tokenizer")}
    absent = [f"data.{key}={place}" for key, place in places.items() if place and not Path(place).expanduser().exists()]
    return f"{', '.join(absent)}: there is no such file or folder" if absent else None


def _size(number: float) -> str:
    return f"{number / 1e9:,.0f} GB" if number < 1e15 else f"{number / 1e9:.2g} GB"


MACHINE: Checks = (_cells, _threads, _processes, _model, _batch, _languages)
TRAINING: Checks = (*MACHINE, _folder)
