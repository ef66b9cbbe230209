"""Reads, independently of the trainer, the weights that `checkpoint.init_from` should begin with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..checkpoint.choose import open_checkpoint
from ..checkpoint.files import is_named
from ..checkpoint.foreign import is_foreign, match_names, open_foreign
from ..config import Settings
from ..factory.build import build_model
from ..layers import own_name
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
        if name not in info.layers or is_named(name, config.init_except) or not path.exists():
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
                if key.startswith(kind) and not is_named(full, config.init_except):
                    found[full] = tensor
        return found

    return taken


def _made_elsewhere(settings: Settings, path: Path) -> Load:
    """Returns the same for weights that no run has saved; the model's names are those of layers without values."""
    saved, builders = open_foreign(path), build_model(settings.model, settings.seed)
    plain: dict[str, str] = {}  # <layer>.<parameter or buffer> to its name in a plain state_dict
    shapes: dict[str, Sequence[int]] = {}
    of_layer: list[list[str]] = []
    for builder in builders:
        with torch.device("meta"):
            held = builder.build().state_dict()
        plain |= {f"{builder.name}.{name}": own_name(builder.name, name) for name in held}
        shapes |= {own_name(builder.name, name): tensor.shape for name, tensor in held.items()}
        of_layer.append([f"{builder.name}.{name}" for name in held])
    tied: dict[str, list[str]] = {}
    for builder in builders:
        for name, owner in builder.tied.items():
            tied.setdefault(plain[owner], [plain[owner]]).append(own_name(builder.name, name))
    match = match_names(shapes, saved, tied.values(), settings.checkpoint.init_except, path).saved
    return lambda layer: {name: saved[match[plain[name]]].read() for name in of_layer[layer] if plain[name] in match}
