"""What has to be said with tables 2 and 3: the protocol, and what is remarkable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .options import BenchOptions
from .throughput_settings import TORCHGPIPE, Protocol, serial_seconds

if TYPE_CHECKING:
    from .throughput_tables import Result

TORCH_NOTE = (
    "torch: torch.distributed.pipelining with the same layers in the same processes, torch.utils.checkpoint in its "
    "stages unless remat=never; a dash where it refuses M. plain: a loop on one device, nothing recomputed."
)
TORCHGPIPE_NOTE = (
    "torchgpipe is one process, which runs all cells on CPUs by one thread, so it overlaps nothing without GPUs."
)
NO_TORCHGPIPE_NOTE = "torchgpipe is not installed here, so it is not measured: pip install torchgpipe."


def notes(
    protocol: Protocol, results: Sequence[Result], options: BenchOptions, reference: tuple[int, int]
) -> list[str]:
    """One sentence or two each."""
    real = results[0].setting.real
    said = [
        *(real_notes(results, options) if real else emulation_notes(protocol, options)),
        f"Every column is in units of our own run at K={reference[0]}, M={reference[1]}. simulated: the same lists of "
        "instructions with nothing between them, in units of its own."
        + ("" if real else " of limit: that shortest step by the measured one."),
        "The paper changed its batch size to fit memory, so its rows are no comparison at a fixed batch.",
    ]
    above = [r for r in results if r.paper is not None and r.paper > r.ideal * 1.005]
    if above:
        rows = ", ".join(f"{r.setting.profile.model.family} K={r.setting.K} M={r.setting.M}" for r in above)
        said.append(f"The paper's figure exceeds K·M/(M+K−1), the bound for micro-batches of equal cost, at {rows}.")
    if options.remat == "always" and any(r.setting.M == 1 for r in results):
        said.append(
            "With M=1 a recompute hides in the wait for the gradient, in all cells but the last: so M=1 gains a little "
            "from K, and larger M less than K·M/(M+K−1) says, in units of a row that recomputed almost for nothing."
        )
    if protocol.linked:
        said += link_notes(results, options)
    elif options.peers and not real:
        said.append(TORCH_NOTE)
        if TORCHGPIPE in results[0].setting.contenders():
            measured = any(result.normalised(TORCHGPIPE) is not None for result in results)
            said.append(TORCHGPIPE_NOTE if measured else NO_TORCHGPIPE_NOTE)
    return said


def emulation_notes(protocol: Protocol, options: BenchOptions) -> list[str]:
    serial = ", ".join(f"{serial_seconds(m, options):g} s (M={m})" for m in options.M or protocol.M)
    return [
        f"ours: schedule {options.schedules[0]}, remat {options.remat}. Real engine, real processes, real messages; "
        "each layer sleeps as long as its FLOPs say, backward twice the forward; cells by min_max over the same FLOPs.",
        f"Fixed mini-batch: a micro-batch takes 1/M of it. Median of {options.timed_steps} step(s) after a warm-up. "
        f"Serial work of an emulated step: {serial}; normalising takes it out.",
    ]


def real_notes(results: Sequence[Result], options: BenchOptions) -> list[str]:
    """The protocol with layers that compute."""
    batches = {r.setting.profile.model.name: r.setting.examples for r in results}
    sizes = ", ".join(f"{model}: {examples}" for model, examples in batches.items())
    return [
        f"ours: schedule {options.schedules[0]}, remat {options.remat}. Layers compute, in fp32, on this machine; "
        "random examples; a step is forward, backward and an update by SGD. Cells by min_max over the layers' FLOPs.",
        f"Fixed mini-batch, examples: {sizes} (batch=). Median of {options.timed_steps} step(s) after a warm-up. "
        "A micro-batch of 1/M may take more than 1/M of the time.",
        "This way of measuring has not been tried on several GPUs yet.",
    ]


def link_notes(results: Sequence[Result], options: BenchOptions) -> list[str]:
    """How the links were limited and what they came to."""
    measured = [result.bandwidth for result in results if result.bandwidth is not None]
    host = [result.link["host"] for result in results if result.link is not None]
    largest = max(max(result.setting.message_bytes) for result in results)
    busiest = max(max(r.setting.carry) * 1e3 for r in results)
    return [
        f"Links: {options.bandwidth / 1e9:g} GB/s in each direction and {options.latency * 1e6:g} µs, against "
        f"{options.device_flops / 1e12:g} TFLOP/s of compute, all stretched by one factor to the emulation's time. "
        "A message of the real boundary's bytes (fp32) is handed over when it would be there; one at a time on a link.",
        f"The links measured: {min(measured) / 1e9:.2f} to {max(measured) / 1e9:.2f} GB/s, by 20 messages of 5 ms or "
        f"more in a row from worker 0 to 1. Largest message: {largest / 1e6:.1f} MB, {busiest:.2f} ms here; a free "
        f"message takes {min(host) * 1e3:.2f} to {max(host) * 1e3:.2f} ms here, which is this machine's own.",
        "simulated: messages travel without a queue. Where one takes longer than a cell's forward, the link is the "
        "limit, and of limit shows its queue.",
    ]
