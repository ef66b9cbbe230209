"""Timed profiles of the layers (`pipeline.cost=profile`), kept on disk: measured once, and the same cut ever after.

Without that a run would be cut by times that waver from start to start, and a resumed run differently from its first
half. What a profile depends on is its key; a file whose key is another's is not used.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_object

from ..config import Settings
from ..layers import LayerBuilder
from ..micro_batch import MicroBatch
from ..partition.cost import LayerCost
from ..partition.fake_layers import TensorShape
from ..partition.profile import profile_layers
from .build import build_autocast, build_task

FORMAT = 2  # of the files; another one is measured anew


@dataclass(frozen=True)
class ProfileKey:
    """What the times depend on; equal keys share a profile.

    Attributes:
        values: plain values that JSON can hold.
    """

    values: Mapping[str, Any]

    @classmethod
    def of(
        cls, builders: Sequence[LayerBuilder], part: MicroBatch, settings: Settings, device: torch.device
    ) -> ProfileKey:
        """The sections of model and task, the model's file and layers, the shapes that enter, and what computes."""
        return cls(
            {
                "format": FORMAT,
                "model": settings.model,
                "source": _source(settings.model["_target_"]),
                "layers": [builder.name for builder in builders],
                "task": settings.task,
                "inputs": [str(TensorShape.of(tensor)) for tensor in part[0]],
                "targets": [str(TensorShape.of(tensor)) for tensor in part[1]],
                "device": device_name(device),
                "threads": torch.get_num_threads(),
                "autocast": settings.precision.autocast,
                "torch": torch.__version__,
            }
        )

    def path(self, cache_dir: Path) -> Path:
        text = json.dumps(self.values, sort_keys=True, default=str)
        return cache_dir / "profiles" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


@dataclass(frozen=True)
class KeptProfile:
    """A place in the cache, where the profile of these layers on this device lies or is to lie."""

    key: ProfileKey
    path: Path

    @classmethod
    def of(
        cls,
        builders: Sequence[LayerBuilder],
        part: MicroBatch,
        settings: Settings,
        device: torch.device,
        cache_dir: Path | None = None,
    ) -> KeptProfile:
        """As for `profiled_costs`; of ``part`` only the shapes matter."""
        cache = cache_dir or Path(os.environ.get("GPIPE_CACHE") or "~/.cache/gpipe").expanduser()
        key = ProfileKey.of(builders, part, settings, device)
        return cls(key, key.path(cache))

    def read(self) -> list[LayerCost] | None:
        """None where there is no such file, or one that this program cannot use."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content["key"] != json.loads(json.dumps(self.key.values, default=str)):
                return None
            return [LayerCost(row["name"], row["parameters"], None, None, row["seconds"]) for row in content["layers"]]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, costs: Sequence[LayerCost]) -> bool:
        """Whole or not at all; False where the cache cannot be written, which costs time at the next start, no more."""
        rows = [{"name": cost.name, "parameters": cost.parameters, "seconds": cost.cost} for cost in costs]
        temporary = self.path.with_suffix(f".{os.getpid()}.partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"key": self.key.values, "layers": rows}, indent=1, default=str) + "\n")
            temporary.replace(self.path)
        except OSError:
            return False
        return True


def profiled_costs(
    builders: Sequence[LayerBuilder],
    part: MicroBatch,
    settings: Settings,
    device: torch.device,
    say: Callable[[str], None],
    cache_dir: Path | None = None,
) -> list[LayerCost]:
    """What each layer costs in seconds of forward and backward, from the cache or measured now; the last with the loss.

    Args:
        builders: the model.
        part: one micro-batch.
        device: where it is measured.
        say: is told where the times come from.
        cache_dir: None for `$GPIPE_CACHE`, or `~/.cache/gpipe` where that is not set.

    Raises:
        CostError: a layer that cannot be measured.
    """
    place = KeptProfile.of(builders, part, settings, device, cache_dir)
    known = place.read()
    if known is not None:
        say(f"profile of {len(known)} layers from {place.path}; remove the file to measure anew")
        return known
    began = time.perf_counter()
    autocast = build_autocast(settings.precision, device)
    task, targets = build_task(settings.task), tuple(tensor.to(device) for tensor in part[1])
    costs = profile_layers(
        builders, part[0], device, autocast, lambda outputs: task.loss(outputs, targets)[0], targets
    ).costs
    seconds = time.perf_counter() - began
    kept = f", kept in {place.path}" if place.write(costs) else ""
    say(f"profile of {len(costs)} layers measured in {seconds:.1f} s{kept}")
    return costs


def device_name(device: torch.device) -> str:
    """The GPU's or the processor's name; what computes at another speed has another."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "cpu"


def _source(target: str) -> str:
    """A hash of the file that holds the model's function: whoever changes it wants it measured anew."""
    with suppress(Exception):  # a function without a file of its own (from C, from a prompt) is known by its name alone
        file = inspect.getsourcefile(get_object(target))
        if file is not None:
            return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return ""
