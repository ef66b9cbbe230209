"""A checkpoint's model cut into cells on workers, for commands that train nothing: gpipe-eval, gpipe-translate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..config import Settings
from ..launch.context import Context
from .assembly import Assembly, assemble_model
from .build import build_task
from .checkpoint_files import open_checkpoint
from .journal import Journal
from .transfer import load_weights, require_same_model
from .world import World, join_world


class Notices(Journal):
    """What the making of the model and its data says, from rank 0 to the command. Writes no file."""

    def __init__(self, context: Context, world: World) -> None:
        self._emit = context.emit if world.rank == 0 else lambda event: None

    def cells(self, table: Sequence[Mapping[str, Any]]) -> None:
        """Says nothing: nobody who evaluates asked how the model is cut."""


def assemble_from_checkpoint(context: Context, config: Mapping[str, Any]) -> Assembly:
    """Cells with the checkpoint's weights, out of training; every worker calls it at the same time.

    The weights are those that evaluation used in the run: the moving averages where `trainer.average` was set.

    Args:
        config: "settings", the resolved configuration (commands/checkpointed.py makes it), and "checkpoint", the path
            of one checkpoint.

    Raises:
        ConfigurationError: the checkpoint is of another model, or something in the configuration that shows only now.
    """
    settings = Settings.from_config(config["settings"])
    pipeline = settings.pipeline
    torch.set_num_threads(pipeline.threads)
    workers = context.world_size // pipeline.replicas
    world = join_world(context, workers, pipeline.replicas, pipeline.device, pipeline.backend)
    info = open_checkpoint(Path(config["checkpoint"]))
    assembly = assemble_model(context, settings, world, build_task(settings.task), Notices(context, world))
    require_same_model(info, assembly.layers, [])
    load_weights(info, assembly.cells, [], settings.trainer.average is not None)
    for cell in assembly.cells:
        cell.train(False)
    return assembly
