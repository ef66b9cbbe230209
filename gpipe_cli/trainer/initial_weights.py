"""Loads the weights that a run begins with: of a run, or made elsewhere (`checkpoint.init_from`; paper, section 4)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from ..checkpoint.compatibility import differences, other_vocabulary, vocabularies
from ..checkpoint.files import CheckpointError, CheckpointInfo, matches_any, open_checkpoint, shorten
from ..checkpoint.foreign import SavedTensor, match_names, open_foreign, weight_files
from ..checkpoint.layer_state import named_tensors, open_run
from ..layers import own_name
from ..metrics.journal import Notices
from ..pipeline.cell import BuiltLayer
from ..typed_section import shown
from .assembly import Assembly

# Keys of `model` that decide how weights begin, what training drops, or shapes: not what trained weights mean.
OTHERS_MAY_DIFFER = ("model.*init*", "model.depth_scale*", "model.*drop*", "model.classes", "model.*vocabulary")


def begin_with_weights(assembly: Assembly, journal: Notices) -> None:
    """Loads the weights and buffers of `checkpoint.init_from`; every worker calls it at the same time."""
    config, world, layers = assembly.settings.checkpoint, assembly.world, assembly.pipeline.layers
    path, left_out = Path(cast(str, config.init_from)), config.init_except
    if weight_files(path):
        saved = open_foreign(path, journal.warn)
    else:
        info = open_checkpoint(path)
        if world.rank == 0:
            _warn_of_another_model(info, assembly, journal)
        saved = open_run(info)
    own = named_values(layers)
    model = dict(world.gather_from_workers((name, list(tensor.shape)) for name, tensor in own.items()))
    tied: dict[str, list[str]] = {}
    for builder, ties in zip(assembly.builders, assembly.pipeline.cut.ties, strict=True):
        for name, owner in ties.items():
            tied.setdefault(own_name(*owner), [own_name(*owner)]).append(own_name(builder.name, name))
    aliases = [*tied.values(), *world.gather_from_workers(shared_names(own))]
    match = match_names(model, saved, aliases, left_out, path)
    for pattern in left_out:
        if not any(matches_any(name, [pattern]) for name in (*model, *saved)):
            journal.warn(f"checkpoint.init_except: {pattern} is no layer or parameter of this model or of {path}")
    converted = world.all_gather(load_matched(own, saved, match, path))
    kinds = dict.fromkeys(f"; {kind}" for kinds in converted for kind in kinds)
    new = [name for name in model if name not in match]
    journal.message(f"weights from {path}{''.join(kinds)}; begun anew: {shorten(new) or 'nothing'}")


def _warn_of_another_model(info: CheckpointInfo, assembly: Assembly, journal: Notices) -> None:
    """Warns if the weights were trained with another vocabulary or other model keys, and so mean other things."""
    if name := other_vocabulary(info, vocabularies(assembly.source)):
        journal.warn(
            f"checkpoint.init_from={info.path} was trained with another vocabulary ({name}): its ids mean other texts. "
            f"data.tokenizer={info.run_dir} keeps them"
        )
    before, now = ({"model": model} for model in (info.state.configuration["model"], assembly.settings.model))
    if other := differences(before, now, OTHERS_MAY_DIFFER):
        keys = shorten([f"{key}: {shown(old)} there, {shown(new)} here" for key, (old, new) in other.items()])
        journal.message(f"checkpoint.init_from={info.path} was trained with other keys of the model ({keys})")


def named_values(layers: Sequence[BuiltLayer]) -> dict[str, Tensor]:
    """Returns this worker's parameters and persistent buffers by their names in a plain state_dict."""
    found: dict[str, Tensor] = {}
    for layer in layers:
        for tensors in named_tensors(layer.module):
            found |= {own_name(layer.name, name): tensor for name, tensor in tensors.items()}
    return found


def shared_names(own: Mapping[str, Tensor]) -> list[list[str]]:
    """Returns all names of each tensor that has several in this worker's layers."""
    groups: dict[int, list[str]] = {}
    for name, tensor in own.items():
        groups.setdefault(id(tensor), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


@torch.no_grad()
def load_matched(
    own: Mapping[str, Tensor], saved: Mapping[str, SavedTensor], match: Mapping[str, str], path: Path
) -> list[str]:
    """Loads saved weights into this worker's tensors; floating-point values get the types of the model.

    Args:
        own: this worker's tensors by name.
        saved: the saved tensors by their own names.
        match: name in the model -> name in ``saved``.
        path: file or folder in which they are saved, for messages.

    Returns:
        The types that were converted, as "bfloat16 to float32".

    Raises:
        CheckpointError: a file cannot be read, or a value cannot become one of the model's type.
    """
    converted: dict[str, None] = {}
    for name in filter(match.__contains__, own):  # in the order of the layers, of which one is in memory at a time
        tensor, value = own[name], saved[match[name]].read()
        if value.dtype != tensor.dtype:
            if not (value.is_floating_point() and tensor.is_floating_point()):
                raise CheckpointError(f"{path}: {name} is {value.dtype}, this model's {tensor.dtype}")
            converted[f"{value.dtype} to {tensor.dtype}".replace("torch.", "")] = None
        tensor.copy_(value)
    return list(converted)
