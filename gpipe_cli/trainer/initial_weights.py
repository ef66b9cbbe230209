"""Loads the weights that a new run begins with (`checkpoint.init_from`): of a run, or made elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from ..checkpoint.choose import open_checkpoint
from ..checkpoint.compatibility import other_vocabulary, vocabularies
from ..checkpoint.files import CheckpointInfo, is_named, shorten, vocabulary_folder
from ..checkpoint.foreign import is_foreign, match_names, open_foreign
from ..checkpoint.transfer import load_matched, named_shapes, open_run, shared_names
from ..layers import own_name
from ..metrics.journal import Notices
from .assembly import Assembly


def begin_with_weights(assembly: Assembly, journal: Notices) -> None:
    """Loads the weights and buffers of `checkpoint.init_from`; every worker calls it at the same time."""
    config, world, cells = assembly.settings.checkpoint, assembly.world, assembly.cells
    path, left_out = Path(cast(str, config.init_from)), config.init_except
    if is_foreign(path):
        saved = open_foreign(path)
    else:
        info = open_checkpoint(path)
        _warn_of_other_vocabulary(info, assembly, journal)
        saved = open_run(info, config.init_average)
    model = dict(world.gather_from_workers(named_shapes(cells).items()))
    tied: dict[str, list[str]] = {}
    for layer, ties in zip(assembly.layout.layers, assembly.pipeline.cut.ties, strict=True):
        for name, owner in ties.items():
            tied.setdefault(own_name(*owner), [own_name(*owner)]).append(own_name(layer, name))
    aliases = [*tied.values(), *world.gather_from_workers(shared_names(cells))]
    match = match_names(model, saved, aliases, left_out, path)
    for pattern in left_out:
        if not any(is_named(name, [pattern]) for name in (*model, *saved)):
            journal.warn(f"checkpoint.init_except: {pattern} is no layer or parameter of this model or of {path}")
    converted = world.all_gather(load_matched(cells, saved, match, path))
    notes = [match.renamed, *dict.fromkeys(kind for kinds in converted for kind in kinds)]
    new = [name for name in model if name not in match.saved]
    journal.message(
        f"weights from {path}{''.join(f'; {note}' for note in notes if note)}; begun anew: {shorten(new) or 'nothing'}"
    )


def _warn_of_other_vocabulary(info: CheckpointInfo, assembly: Assembly, journal: Notices) -> None:
    if assembly.world.rank == 0 and (name := other_vocabulary(info, vocabularies(assembly.source))):
        journal.warn(
            f"checkpoint.init_from={info.path} was trained with another vocabulary ({name}): its ids mean other texts. "
            f"With data=text, data.tokenizer={vocabulary_folder(info.run_dir) / name} keeps them"
        )
