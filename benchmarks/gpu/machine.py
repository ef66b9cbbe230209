"""Describes the machine: GPUs, releases, and measured rates."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpipe_cli.bench.workers import machine
from gpipe_cli.commands.plan import make_request
from gpipe_cli.planner.measure.this_device import measure_rates

from .part import Row, Site


def facts(site: Site) -> Iterator[Row]:
    """Yields what the machine is and what it reaches in products and copies."""
    yield from ({"what": name, "value": value} for name, value in machine().items())
    if site.device == "cuda":
        for number in range(site.gpus):
            found = torch.cuda.get_device_properties(number)
            others = [other for other in range(site.gpus) if other != number]
            peers = [other for other in others if torch.cuda.can_device_access_peer(number, other)]
            text = f"{found.name}, {found.total_memory / 1e9:.1f} GB, reaches {peers or 'no other'} directly"
            yield {"what": f"GPU {number}", "value": text}
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # torch's own
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # torch's own
        yield {"what": "CUDA, cuDNN, NCCL", "value": f"{torch.version.cuda}, {cudnn}, {nccl}"}
    rates = measure_rates(make_request([f"pipeline.device={site.device}"]).settings.pipeline)
    yield {"what": "products in float32, TFLOP/s", "value": rates.flops / 1e12}
    yield {"what": "products in bfloat16, TFLOP/s", "value": rates.half_flops / 1e12}
    yield {"what": "memory, GB/s", "value": rates.bandwidth / 1e9}
    yield {"what": "start of an operation, µs", "value": 1e6 * rates.overhead}
