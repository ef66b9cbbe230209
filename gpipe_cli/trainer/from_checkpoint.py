"""A checkpoint's model cut into cells on workers, for commands that train nothing: gpipe-eval, gpipe-translate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoint.choose import open_checkpoint
from ..checkpoint.transfer import load_weights, require_same_model
from ..config import Settings
from ..factory.build import build_task
from ..launch.context import Context
from ..metrics.journal import Notices
from .assembly import Assembly, assemble_model
from .start import start_worker


class _WithoutCells(Notices):
    def cells(self, table: Sequence[Mapping[str, Any]]) -> None:
        """Says nothing: nobody who evaluates asked how the model is cut."""


def assemble_from_checkpoint(context: Context, config: Mapping[str, Any]) -> Assembly:
    """Cells with the checkpoint's weights, out of training; every worker calls it at the same time.

    The weights are those that evaluation used in the run: the moving averages where `trainer.average` was set.

    Args:
        config: "settings", the resolved configuration (jobs/checkpointed.py makes it), and "checkpoint", the path
            of one checkpoint.

    Raises:
        ConfigurationError: the checkpoint is of another model, or something in the configuration that shows only now.
    """
    settings = Settings.from_config(config["settings"])
    world = start_worker(context, settings)
    info = open_checkpoint(Path(config["checkpoint"]))
    journal = _WithoutCells(context.run_dir, context.emit, world.rank == 0)
    assembly = assemble_model(context, settings, world, build_task(settings.task), journal)
    require_same_model(info, assembly.layers, [])
    load_weights(info, assembly.cells, [], settings.trainer.average is not None)
    for cell in assembly.cells:
        cell.train(False)
    return assembly
