"""Describes the machine, compares gpipe-plan with a run on it (cells, bubble, memory), and times messages."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.plan import compare, measured, planned
from gpipe_cli.bench.workers import machine
from gpipe_cli.commands.plan import make_request
from gpipe_cli.planner.measure.this_device import measure_rates

from .part import Row, Site

LARGE = ("model=transformer_lm_small", "model.L=12", "model.d_model=1024", "model.H=4096", "model.A=16")
SMALL = ("model=transformer_lm_small", "debug=tiny")
ROUNDS = 3


def machine_facts(site: Site) -> Iterator[Row]:
    """Yields what the machine is and what it reaches in products and copies."""
    yield from ({"what": name, "value": value} for name, value in machine().items())
    for number in range(site.gpus):
        found = torch.cuda.get_device_properties(number)
        others = [other for other in range(site.gpus) if other != number]
        peers = [other for other in others if torch.cuda.can_device_access_peer(number, other)]
        text = f"{found.name}, {found.total_memory / 1e9:.1f} GB, reaches {peers or 'no other'} directly"
        yield {"what": f"GPU {number}", "value": text}
    if site.device == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # torch's own
        yield {"what": "CUDA, NCCL", "value": f"{torch.version.cuda}, {nccl}"}
    rates = measure_rates(make_request([f"pipeline.device={site.device}"]).settings.pipeline)
    yield {"what": "products in float32, TFLOP/s", "value": rates.flops / 1e12}
    yield {"what": "products in bfloat16, TFLOP/s", "value": rates.half_flops / 1e12}
    yield {"what": "memory, GB/s", "value": rates.bandwidth / 1e9}
    yield {"what": "start of an operation, µs", "value": 1e6 * rates.overhead}


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
