"""Compares the layers of a traced module with the module itself, as part of gpipe-verify."""

from __future__ import annotations

from itertools import islice

from ..config import Settings
from ..data.source import no_report
from ..factory.build import build_model, build_source, build_task
from ..factory.example import asks_for_example, with_example
from ..factory.module_itself import ModuleReport, compare_with_module, is_traced
from ..trainer.batches import training_batches

MICRO_BATCHES = 2  # one after the other, so that what the module keeps from call to call shows


def compare_module(settings: Settings) -> ModuleReport | None:
    """Compares the layers with the module itself, in the precision of the layers; None for other models.

    Args:
        settings: as configured, whatever `verify.dtype`.
    """
    if not asks_for_example(settings.model):
        return None
    source = build_source(settings.data, settings.seed, settings.task)
    source.prepare(no_report)  # done already, by the run
    pipeline = settings.pipeline
    batches = islice(training_batches(source, None, pipeline.M, 0, pipeline.replicas), MICRO_BATCHES)
    micro_batches = [micro_batch for batch in batches for micro_batch in batch.micro_batches][:MICRO_BATCHES]
    if not micro_batches:  # the run has said so
        return None
    builders = build_model(with_example(settings.model, micro_batches[0][0]), settings.seed)
    if not is_traced(builders):
        return None
    return compare_with_module(builders, micro_batches, build_task(settings.task, settings.seed))
