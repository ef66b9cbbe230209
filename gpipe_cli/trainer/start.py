"""How every worker begins that was started with a run's configuration."""

from __future__ import annotations

import torch

from ..config import Settings
from ..distributed.world import World, join_world
from ..launch.context import Context


def start_worker(context: Context, settings: Settings) -> World:
    """Sets the number of threads, and meets the others; every worker calls it at the same time.

    Raises:
        ValueError: the number of workers is no multiple of `pipeline.replicas`.
    """
    pipeline = settings.pipeline
    torch.set_num_threads(pipeline.threads)  # torchrun's workers have another number; bits depend on it
    workers = context.world_size // pipeline.replicas
    return join_world(context, workers, pipeline.replicas, pipeline.device, pipeline.backend)
