"""Keeps timed profiles of the layers (`pipeline.cost=profile`) on disk, so that every start of a run cuts alike.

Times waver from start to start; without the file a resumed run would be cut differently from its first half. The
file's name stands for everything that a profile depends on.
"""

import hashlib
import inspect
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch
from hydra.utils import get_object

from ...config import Settings
from ...cpu import processor_name
from ...data.cache import get_or_make, writing_cache
from ...disk import cache_folder
from ...factory.build import boundary_type_of, build_autocast, build_task
from ...gpus import GPU
from ...json_files import read_json
from ...layers import LayerBuilder
from ...micro_batch import MicroBatch
from ...partition.fake_layers import CostError, TensorShape
from ...partition.model_profile import ModelProfile, profile_layers

FORMAT = 8  # of the files; profiles in another format are measured again


def profile_file(
    builders: Sequence[LayerBuilder], micro_batch: MicroBatch, settings: Settings, device: torch.device
) -> Path:
    """Returns the path of these layers' profile in the cache, where it may exist; arguments as in `profiled`."""
    depends_on = {
        "format": FORMAT,
        "model": settings.model,
        "source": _source(settings.model["_target_"]),
        "layers": [builder.name for builder in builders],
        "task": settings.task,
        "micro-batch": [[str(TensorShape.of(tensor)) for tensor in side] for side in micro_batch],
        "device": torch.cuda.get_device_name(device) if device.type == GPU else processor_name(),
        "threads": torch.get_num_threads(),
        "precision": asdict(settings.precision),
        "torch": torch.__version__,
    }
    digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True, default=str).encode()).hexdigest()
    return cache_folder(None) / "profiles" / f"{digest[:32]}.json"


def profiled(
    builders: Sequence[LayerBuilder],
    micro_batch: MicroBatch,
    settings: Settings,
    device: torch.device,
    say: Callable[[str], None],
    may_measure: bool = True,
) -> ModelProfile:
    """Returns the seconds of each layer and of the task's loss, from the cache or measured now.

    Args:
        micro_batch: its values matter only where the times are measured.
        device: device on which they are measured.
        say: receives one line about where the times come from.
        may_measure: False: only a kept profile will do.

    Raises:
        CostError: a layer that cannot be measured; or none may be, and there is no file.
        DiskError: the cache cannot be written.
    """
    file = profile_file(builders, micro_batch, settings, device)

    def write(draft: Path) -> None:
        """Measures the profile and writes it to a file that takes its place in the cache when it is whole."""
        began = time.perf_counter()
        autocast, task = build_autocast(settings.precision, device), build_task(settings.task, settings.seed)
        inputs, targets = micro_batch[0], tuple(tensor.to(device) for tensor in micro_batch[1])
        between = boundary_type_of(settings.precision)
        found = profile_layers(
            builders, inputs, device, autocast, lambda outputs: task.loss(outputs, targets)[0], targets, between
        )
        draft.write_text(json.dumps(asdict(found), indent=1), encoding="utf-8")
        say(f"profile of {len(builders)} layers measured in {time.perf_counter() - began:.1f} s, kept in {file}")

    if file.exists():
        say(f"profile of the layers from {file}; remove the file to measure anew")
    elif not may_measure:
        raise CostError("that would take long")
    with writing_cache(file.parent):
        return get_or_make(file, write, lambda path: read_json(path, ModelProfile))


def _source(target: str) -> str:
    """Returns the source text of the module that defines a function; "" if there is none (from C, from a prompt)."""
    with suppress(Exception):
        module = inspect.getmodule(get_object(target))
        return inspect.getsource(module) if module is not None else ""
    return ""
