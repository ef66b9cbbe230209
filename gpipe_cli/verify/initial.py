"""Reads, independently of the trainer, the weights that `checkpoint.init_from` should begin with."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from ..checkpoint.choose import open_checkpoint
from ..config import Settings
from ..factory.build import build_model
from ..layers import layer_of
from .plain import Load


def expected_weights(settings: Settings) -> Load:
    """Returns, as a function of a layer's index, what of its weights and buffers is not freshly drawn."""
    config = settings.checkpoint
    if config.init_from is None:
        return lambda layer: {}
    info = open_checkpoint(Path(config.init_from))
    names = [builder.name for builder in build_model(settings.model, settings.seed)]

    def taken(layer: int) -> dict[str, Tensor]:
        name = names[layer]
        path = info.layer_path(name)
        if name not in info.layers or _matches(name, config.init_except) or not path.exists():
            return {}
        kinds = ("weight:", "buffer:", "average:") if config.init_average else ("weight:", "buffer:")
        tensors = load_file(path)
        for own, owner in info.layers[name].tied.items():
            other = layer_of(owner, info.layers)
            of_owner = load_file(info.layer_path(other))
            for kind in ("weight:", "average:"):
                if (value := of_owner.get(kind + owner.removeprefix(f"{other}."))) is not None:
                    tensors[kind + own] = value
        found = {}
        for kind in kinds:  # an average replaces its weight
            for key, tensor in tensors.items():
                full = f"{name}.{key.removeprefix(kind)}"
                if key.startswith(kind) and not _matches(full, config.init_except):
                    found[full] = tensor
        return found

    return taken


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Returns whether a pattern names it, or something that it is part of."""
    return any(fnmatchcase(name, each) for pattern in patterns for each in (pattern, f"{pattern}.*"))
