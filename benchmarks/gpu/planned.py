"""Compares gpipe-plan with a run on this machine: times of cells, bubble, and memory; and times messages."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

import torch

from benchmarks.plan import compare, measured, planned
from gpipe_cli.bench.workers import run_workers
from gpipe_cli.distributed.pipeline import make_transport
from gpipe_cli.distributed.world import join_world
from gpipe_cli.launch.context import Context
from gpipe_cli.planner.measure.link import measure_link

from .part import Row, Site

LARGE = ("model=transformer_lm_small", "model.L=12", "model.d_model=1024", "model.H=4096", "model.A=16")
SMALL = ("model=transformer_lm_small", "debug=tiny")
ROUNDS = 3


def plans(site: Site) -> Iterator[Row]:
    """Compares planned and measured cells, bubble (by events on GPUs) and memory."""
    model = SMALL if site.tiny else (*LARGE, "precision=bf16")
    for remat in ("never",) if site.tiny else ("never", "always"):
        words = [*model, "pipeline.K=2", "pipeline.M=4", f"pipeline.remat={remat}", f"pipeline.device={site.device}"]
        words += ["logging.tensorboard=false", "checkpoint.every=null"]
        plan = planned(words)
        steps, summary = measured(words, 2 if site.tiny else 20)
        yield from ({"remat": remat, **row} for row in compare([plan], steps))
        both = {"planned": plan["memory"] / 1e6, "measured": summary["peak_memory_bytes"] / 1e6}
        row = {"remat": remat, "cell": "all", "what": "memory, MB", **both}
        yield {**row, "planned / measured": both["planned"] / both["measured"]}


def messages(site: Site) -> Iterator[Row]:
    """Times messages between two workers: over NCCL where each has a GPU of its own, and through the CPU."""
    for backend in ("auto", "gloo"):
        config = {"device": site.device, "backend": backend, "rounds": 1 if site.tiny else ROUNDS}
        wire, rounds = run_workers(f"{__name__}:worker", 2, config)
        host, latency, rate = (median(values) for values in zip(*rounds, strict=True))
        times = {"host, ms": 1e3 * host, "latency, ms": 1e3 * latency, "rate, GB/s": rate / 1e9}
        yield {"pipeline.backend": backend, "wire": wire, **times}


def worker(context: Context, config: dict[str, Any]) -> tuple[str, list[tuple[float, ...]]]:
    """Returns what carries messages, and their times by round."""
    world = join_world(context, context.world_size, 1, config["device"], config["backend"])
    transport = make_transport(world, tuple(range(world.workers)))
    assert transport is not None
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    rounds = [
        tuple(measure_link(transport, world.rank, world.device, world.all_ranks)) for _ in range(config["rounds"])
    ]
    return type(transport).__name__, rounds
