"""Reads, independently of the trainer, the weights that `checkpoint.init_from` should begin with."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..checkpoint.choose import open_checkpoint
from ..checkpoint.foreign import is_foreign, match_names, open_foreign
from ..config import Settings
from ..factory.build import build_model
from .plain import Load


def expected_weights(settings: Settings) -> Load:
    """Returns, as a function of a layer's index, what of its weights and buffers is not freshly drawn."""
    config = settings.checkpoint
    if config.init_from is None:
        return lambda layer: {}
    if is_foreign(Path(config.init_from)):
        return _made_elsewhere(settings, Path(config.init_from))
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
            of_owner = load_file(info.layer_path(owner.layer))
            for kind in ("weight:", "average:"):
                if (value := of_owner.get(kind + owner.parameter)) is not None:
                    tensors[kind + own] = value
        found = {}
        for kind in kinds:  # an average replaces its weight
            for key, tensor in tensors.items():
                full = f"{name}.{key.removeprefix(kind)}"
                if key.startswith(kind) and not _matches(full, config.init_except):
                    found[full] = tensor
        return found

    return taken


def _made_elsewhere(settings: Settings, path: Path) -> Load:
    """Returns the same for weights that no run has saved; the model's names are those of layers without values."""
    saved, shapes = open_foreign(path), list[dict[str, Sequence[int]]]()
    aliases: dict[str, list[str]] = {}
    for builder in build_model(settings.model, settings.seed):
        with torch.device("meta"):
            held = builder.build().state_dict()
        shapes.append({f"{builder.name}.{name}": tensor.shape for name, tensor in held.items()})
        for name, owner in builder.tied.items():
            aliases.setdefault(owner, [owner]).append(f"{builder.name}.{name}")
    model = {name: shape for layer in shapes for name, shape in layer.items()}
    match = match_names(model, saved, aliases.values(), settings.checkpoint.init_except, path)
    return lambda layer: {name: saved[match.saved[name]].read() for name in shapes[layer] if name in match.saved}


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Returns whether a pattern names it, or something that it is part of."""
    return any(fnmatchcase(name, each) for pattern in patterns for each in (pattern, f"{pattern}.*"))
