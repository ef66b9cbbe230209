"""What has to be said with tables 2 and 3: the protocol, and what is remarkable."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from gpipe_cli.gpus import count_gpus

from .options import BenchOptions
from .paper import ideal_throughput
from .throughput_settings import TORCHGPIPE, Protocol, Result, serial_seconds

TORCH_NOTE = (
    "torch: torch.distributed.pipelining with the same layers in the same processes, torch.utils.checkpoint in its "
    "stages unless remat=never; a dash where it refuses M. plain: a loop on one device, nothing recomputed."
)
REAL_TORCH_NOTE = (
    "Each contender has processes of its own. torch: torch.distributed.pipelining with the same layers, "
    "torch.utils.checkpoint in its stages unless remat=never; a dash where it refuses M, where M does not divide the "
    "examples, or where workers share a GPU. plain: a loop on one device, nothing recomputed."
)
TORCHGPIPE_NOTE = (
    "torchgpipe is one process, which runs all cells on CPUs by one thread, so it overlaps nothing without GPUs."
)
REAL_TORCHGPIPE_NOTE = (
    "torchgpipe is one process, which has the GPUs of all workers; on CPUs it runs all cells by one thread, so it "
    "overlaps nothing."
)
NO_TORCHGPIPE_NOTE = "torchgpipe is not installed here, so it is not measured: pip install torchgpipe."


def notes(protocol: Protocol, results: Sequence[Result], options: BenchOptions) -> list[str]:
    """One sentence or two each."""
    real = results[0].setting.real
    said = [
        *(real_notes(results, options) if real else emulation_notes(protocol, options)),
        f"{unit_note(protocol, results)} simulated: the same lists of instructions with nothing between them, in units "
        "of its own." + ("" if real else " of limit: that shortest step by the measured one."),
        "The paper changed its batch size to fit memory, so its rows are no comparison at a fixed batch.",
        *memory_notes(results),
    ]
    unit = papers_unit(protocol)
    above = [r for r in results if r.paper is not None and r.paper > ideal_throughput(*r.setting.place, unit) * 1.005]
    if above:
        rows = ", ".join(row_name(r) for r in above)
        said.append(f"The paper's figure exceeds K·M/(M+K−1), the bound for micro-batches of equal cost, at {rows}.")
    if options.remat == "always" and any(r.reference[1] == 1 for r in results):
        said.append(
            "With M=1 a recompute hides in the wait for the gradient, in all cells but the last: so M=1 gains a little "
            "from K, and larger M less than K·M/(M+K−1) says, in units of a row that recomputed almost for nothing."
        )
    if protocol.linked:
        return said + link_notes(results, options)
    if options.peers:
        said += peer_notes(results)
    return said + ([] if real else machine_notes(options))


def row_name(result: Result) -> str:
    setting = result.setting
    return f"{setting.profile.model.family} K={setting.K} M={setting.M}"


def papers_unit(protocol: Protocol) -> tuple[int, int]:
    """K and M of the paper's 1.00."""
    return min(place for figures in protocol.paper.values() for place in figures)


def unit_note(protocol: Protocol, results: Sequence[Result]) -> str:
    """What is 1.00, of each model where they differ."""
    ours = {r.setting.profile.model.family: r.reference if r.unit is not None else None for r in results}
    places = set(ours.values())
    if len(places) == 1 and None not in places:
        said = f"Every column is in units of our own run at {place_name(results[0].reference)}."
    else:
        each = "; ".join(f"{family}: {place_name(place) if place else 'none'}" for family, place in ours.items())
        said = f"Every column is in units of our own run of the model, the first that could be measured: {each}."
    unit = papers_unit(protocol)
    return said if places == {unit} else f"{said} The paper's figures are in units of its own, {place_name(unit)}."


def place_name(place: tuple[int, int]) -> str:
    return f"K={place[0]}, M={place[1]}"


def memory_notes(results: Sequence[Result]) -> list[str]:
    """Which measurements found no room."""
    rows = [f"{row_name(r)} ({', '.join(r.measured.too_large)})" for r in results if r.measured.too_large]
    if not rows:
        return []
    return [
        f"Too large for the memory of a device, so there is a dash: {'; '.join(rows)}. batch= makes mini-batches "
        "smaller, small=true the models."
    ]


def peer_notes(results: Sequence[Result]) -> list[str]:
    setting = results[0].setting
    said = [REAL_TORCH_NOTE if setting.real else TORCH_NOTE]
    if TORCHGPIPE in setting.contenders():
        installed = REAL_TORCHGPIPE_NOTE if setting.real else TORCHGPIPE_NOTE
        said.append(installed if find_spec("torchgpipe") else NO_TORCHGPIPE_NOTE)
    return said


def machine_notes(options: BenchOptions) -> list[str]:
    """What layers=auto could not measure for all K alike, but for some."""
    gpus = count_gpus() if options.layers == "auto" else 0
    enough = [str(K) for K in options.grid_K if gpus >= K]
    if not enough:
        return []
    Ks = ",".join(enough)
    return [
        f"There {'is 1 GPU' if gpus == 1 else f'are {gpus} GPUs'} here, enough for layers that compute at K={Ks}: "
        f"gpipe-bench table=2 K={Ks} layers=real output={options.output}/real"
    ]


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
    host = [r.measured.link["host"] for r in results if r.measured.link is not None]
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
