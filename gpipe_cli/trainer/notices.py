"""Makes notices of a run: what BatchNorm sees, too little time to save, a checkpoint of another kind of device."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..data.source import split_evenly


def batchnorm_notice(
    layers: int, mini_batch: int, M: int, replicas: int, together: bool
) -> tuple[str, str | None] | None:
    """Returns over how many examples BatchNorm layers normalise: the one thing in a model that M changes.

    Args:
        layers: number of BatchNorm layers.
        mini_batch: examples over all replicas, divided into M · replicas micro-batches, the larger ones first.
        together: replicas share the statistics of training.

    Returns:
        A message, and a warning or None; None for a model without BatchNorm.
    """
    if not layers:
        return None
    sizes = [part.stop - part.start for part in split_evenly(mini_batch, M * replicas)]
    shared = together and replicas > 1
    seen = [sum(sizes[m::M]) for m in range(M)] if shared else sizes
    over = f"{min(seen)}" if min(seen) == max(seen) else f"{min(seen)} or {max(seen)}"
    words = f"{layers} BatchNorm layers normalise" if layers > 1 else "1 BatchNorm layer normalises"
    text = f"{words} over {over} example{'s' if over != '1' else ''}: mini-batch {mini_batch}, M={M}"
    if replicas > 1:
        text += f", {replicas} replicas {'together' if shared else 'each by itself'}"
    if min(seen) > 1:
        return text, None
    replica_advice = " or pipeline.sync_batchnorm=true" if replicas > 1 and not shared else ""
    return (
        text,
        f"a micro-batch has a single example, so in training BatchNorm normalises over the places of one example only, "
        f"and evaluation will look different: use pipeline.M<={max(1, mini_batch // (2 * replicas))}, "
        f"data.batch_size>={2 * M * replicas}{replica_advice}",
    )


def grace_warning(step_seconds: float, grace_seconds: float, launchers_seconds: float | None = None) -> str | None:
    """Returns a warning where a request to stop leaves less time than two steps; None where it leaves enough.

    Args:
        grace_seconds: `launch.grace_seconds`.
        launchers_seconds: from torchrun's request to stop until it kills its processes; None without torchrun.
    """
    patience = grace_seconds if launchers_seconds is None else launchers_seconds
    if 2 * step_seconds <= patience:
        return None
    enough = 10 * math.ceil(0.4 * step_seconds)
    own = launchers_seconds is None
    return (
        f"a step takes {step_seconds:.0f} s, and {patience:g} s after Ctrl-C or SIGTERM the workers are killed, "
        f"saved or not: {'launch.grace_seconds=' if own else 'torchrun --shutdown-timeout '}{enough} leaves time for a "
        "step and a checkpoint"
    )


def another_device_notice(versions: Mapping[str, str], device: str) -> str | None:
    """Returns a warning for a run that goes on on another kind of device; None where that is not so, or not known.

    Args:
        versions: of the checkpoint.
        device: the kind of device of this run.
    """
    before = versions.get("device", device)
    if before == device:
        return None
    return (
        f"the checkpoint was made on {before}, and this run computes on {device}: losses continue, but their last bits "
        f"are no longer those of a run on {before} alone"
    )
