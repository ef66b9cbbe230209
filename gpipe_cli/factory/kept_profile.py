"""Keeps timed profiles of the layers (`pipeline.cost=profile`) on disk, so that every start of a run cuts alike.

Times waver from start to start; without the file a resumed run would be cut differently from its first half. Everything
that a profile depends on is its key; a file with another key is not used.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_object

from ..config import Settings
from ..disk import write_whole
from ..layers import LayerBuilder
from ..micro_batch import MicroBatch
from ..partition.cost import LayerCost
from ..partition.fake_layers import TensorShape
from ..partition.model_profile import profile_layers
from .build import boundary_type_of, build_autocast, build_task

FORMAT = 2  # of the files; profiles in another format are measured again


@dataclass(frozen=True)
class KeptProfile:
    """Locates the profile of a model's layers in the cache.

    Attributes:
        path: of the JSON file, which need not exist.
        key: everything that the times depend on, as plain values.
    """

    path: Path
    key: dict[str, Any]

    @classmethod
    def of(
        cls,
        builders: Sequence[LayerBuilder],
        micro_batch: MicroBatch,
        settings: Settings,
        device: torch.device,
        cache_dir: Path | None = None,
    ) -> KeptProfile:
        """Returns the place of these layers' profile; the arguments are those of `profiled_costs`."""
        inputs, targets = micro_batch
        values = {
            "format": FORMAT,
            "model": settings.model,
            "source": _source_hash(settings.model["_target_"]),
            "layers": [builder.name for builder in builders],
            "task": settings.task,
            "inputs": [str(TensorShape.of(tensor)) for tensor in inputs],
            "targets": [str(TensorShape.of(tensor)) for tensor in targets],
            "device": device_name(device),
            "threads": torch.get_num_threads(),
            "autocast": settings.precision.autocast,
            "boundaries": settings.precision.boundaries,
            "torch": torch.__version__,
        }
        text = json.dumps(values, sort_keys=True, default=str)
        cache = cache_dir or Path(os.environ.get("GPIPE_CACHE") or "~/.cache/gpipe").expanduser()
        name = f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        return cls(cache / "profiles" / name, json.loads(text))

    def read(self) -> list[LayerCost] | None:
        """Returns the costs; None where there is no file that can be used."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content["key"] != self.key:
                return None
            return [LayerCost(row["name"], row["parameters"], None, None, row["seconds"]) for row in content["layers"]]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, costs: Sequence[LayerCost]) -> bool:
        """Writes the whole file or nothing; False where the cache cannot be written."""
        rows = [{"name": cost.name, "parameters": cost.parameters, "seconds": cost.cost} for cost in costs]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps({"key": self.key, "layers": rows}, indent=1) + "\n")
        except OSError:
            return False
        return True


def profiled_costs(
    builders: Sequence[LayerBuilder],
    micro_batch: MicroBatch,
    settings: Settings,
    device: torch.device,
    say: Callable[[str], None],
    cache_dir: Path | None = None,
) -> list[LayerCost]:
    """Returns each layer's seconds of forward and backward, from the cache or measured now; the loss is in the last.

    Args:
        micro_batch: its values matter only where the times are measured.
        device: where they are measured.
        say: receives one line about where the times come from.
        cache_dir: None for `$GPIPE_CACHE`, or `~/.cache/gpipe` where that is not set.

    Raises:
        CostError: a layer that cannot be measured.
    """
    kept = KeptProfile.of(builders, micro_batch, settings, device, cache_dir)
    known = kept.read()
    if known is not None:
        say(f"profile of {len(known)} layers from {kept.path}; remove the file to measure anew")
        return known
    began = time.perf_counter()
    autocast, task = build_autocast(settings.precision, device), build_task(settings.task, settings.seed)
    targets = tuple(tensor.to(device) for tensor in micro_batch[1])
    costs = profile_layers(
        builders,
        micro_batch[0],
        device,
        autocast,
        lambda outputs: task.loss(outputs, targets)[0],
        targets,
        boundary_type_of(settings.precision),
    ).costs
    seconds = time.perf_counter() - began
    place = f", kept in {kept.path}" if kept.write(costs) else ""
    say(f"profile of {len(costs)} layers measured in {seconds:.1f} s{place}")
    return costs


def device_name(device: torch.device) -> str:
    """Returns the name of the GPU or the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "cpu"


def _source_hash(target: str) -> str:
    """Returns a hash of the file that defines the model's function; "" where there is none (from C, from a prompt)."""
    with suppress(Exception):
        file = inspect.getsourcefile(get_object(target))
        if file is not None:
            return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return ""
