"""What a run says at its beginning about things that a person could not see otherwise."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchNormNotice:
    """What there is to say of BatchNorm.

    Attributes:
        text: how many examples each layer normalises over: the one thing in a model that M changes.
        warning: None, or that they are too few.
    """

    text: str
    warning: str | None


def batchnorm_notice(layers: int, mini_batch: int, M: int, replicas: int, together: bool) -> BatchNormNotice | None:
    """For a model with so many BatchNorm layers; None for one without.

    Args:
        mini_batch: examples, over all replicas; divided into M · replicas parts, the larger ones first.
        together: whether replicas share the statistics of training.
    """
    if not layers:
        return None
    size, larger = divmod(mini_batch, M * replicas)
    parts = [[size + (replica * M + m < larger) for m in range(M)] for replica in range(replicas)]
    shared = together and replicas > 1
    seen = [sum(column) for column in zip(*parts, strict=True)] if shared else [part for row in parts for part in row]
    over = f"{min(seen)}" if min(seen) == max(seen) else f"{min(seen)} or {max(seen)}"
    words = f"{layers} BatchNorm layers normalise" if layers > 1 else "1 BatchNorm layer normalises"
    text = f"{words} over {over} example{'s' if over != '1' else ''}: mini-batch {mini_batch}, M={M}"
    if replicas > 1:
        text += f", {replicas} replicas {'together' if shared else 'each by itself'}"
    if min(seen) > 1:
        return BatchNormNotice(text, None)
    replica_advice = " or pipeline.sync_batchnorm=true" if replicas > 1 and not shared else ""
    return BatchNormNotice(
        text,
        f"a micro-batch has a single example, so BatchNorm tells the model only how the places of one example differ, "
        f"and evaluation will look different: use pipeline.M<={max(1, mini_batch // (2 * replicas))}, "
        f"data.batch_size>={2 * M * replicas}{replica_advice}",
    )


def grace_warning(step_seconds: float, grace_seconds: float, torchrun_seconds: float | None = None) -> str | None:
    """Of a request to stop that leaves no time to end a step and save it; None where there is enough for two.

    Args:
        torchrun_seconds: after which torchrun kills what it has asked to stop; None without torchrun.
    """
    patience = math.inf if torchrun_seconds is None else torchrun_seconds
    if 2 * step_seconds <= min(grace_seconds, patience):
        return None
    enough = 10 * math.ceil(0.4 * step_seconds)
    killed, advice = "the workers are killed", []
    if 2 * step_seconds > grace_seconds:
        advice.append(f"launch.grace_seconds={enough}")
    else:
        killed, enough = "torchrun kills the workers (if it has no --shutdown-timeout)", math.ceil(grace_seconds)
    if enough > patience:
        advice.append(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={enough} before torchrun (torch 2.12 or newer)")
    return (
        f"a step takes {step_seconds:.0f} s, and {min(grace_seconds, patience):g} s after Ctrl-C or SIGTERM {killed}, "
        f"saved or not: {' with '.join(advice)} leaves time for a step and a checkpoint"
    )
