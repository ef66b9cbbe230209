"""Defines the entry point of gpipe-predict's workers: the class of each image, by the pipeline of evaluations."""

from typing import Any

from ..errors import ConfigurationError
from ..launch.context import Context
from ..trainer.assembly import assemble_evaluator, assemble_from_checkpoint


def main(context: Context, config: dict[str, Any]) -> list[tuple[str, float]] | None:
    """Classifies images; the entry point of a worker.

    Args:
        context: this worker's place in the job.
        config: as in `assemble_from_checkpoint`.

    Returns:
        On rank 0 the class and its probability for each file, in their order; None elsewhere.

    Raises:
        ConfigurationError: the run's task does not classify, or an image is broken.
    """
    assembly = assemble_from_checkpoint(context, config)
    if not assembly.pipeline.task.predicts:
        raise ConfigurationError(f"task._target_={assembly.settings.task['_target_']} of this run predicts no classes")
    found = assemble_evaluator(assembly).evaluate(final=True).classes
    if assembly.world.rank != 0:
        return None
    return [(found["names"][label], probability) for label, probability in found["predicted"]]
