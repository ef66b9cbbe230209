"""Makes tables 2 and 3: normalised throughput by K and M beside the paper, the ideal and other libraries.

Everything is in units of the engine's own run at the smallest K and M, as the paper's tables are; the mini-batch is
fixed, so a micro-batch takes 1/M of it. Imports no torch: worker processes measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpipe_cli.errors import ConfigurationError
from gpipe_cli.gpus import count_gpus
from gpipe_cli.launch.report import WorkerOutOfMemory
from gpipe_cli.schedule.orders import KINDS

from ..options import BenchOptions
from ..throughput import (
    PEERS,
    PLAIN,
    TABLES,
    GridTable,
    Measured,
    PaperModel,
    Row,
    Setting,
    count_models,
    make_rows,
    serial_seconds,
)
from ..workers import run_workers
from .table import Curve, Say, Table

WORKER = "gpipe_cli.bench.contenders:worker"
PRELOAD = ("torch.distributed.pipelining",)
IDEAL = "K·M/(M+K−1)"


def throughput_table(number: int, options: BenchOptions, say: Say) -> Table:
    """Measures table 2 or 3.

    Raises:
        ConfigurationError: an unknown schedule, or more cells than layers.
        WorkerFailed: a worker's exception, unless it is a real layer that ran out of memory.
    """
    protocol = TABLES[number]
    check(options, protocol)
    real = uses_real_layers(protocol, options)
    settings = make_settings(protocol, options, [(K, M) for K in options.grid_K for M in options.M or protocol.M], say)
    if real:
        settings = [replace(setting, serial_seconds=1.0, real=True) for setting in settings]
        measured = [measure_real(setting, options, say) for setting in settings]
    else:
        measured = measure_emulated(settings, options, say)
    rows = make_rows(settings, measured, protocol)
    others = [*options.schedules[1:], *PEERS, PLAIN]
    others = [name for name in others if any(row["normalised"].get(name) is not None for row in rows)]
    columns = {"model": "", "K": "", "M": "", "paper": ".2f", "ours": ".2f", IDEAL: ".2f", "simulated": ".2f"}
    columns |= {"of limit": ".2f", **dict.fromkeys(others, ".2f")}
    shown = [
        {**row, IDEAL: row["ideal"], "of limit": row["of_limit"], **dict.fromkeys(others), **row["normalised"]}
        for row in rows
    ]
    return Table(
        f"table{number}",
        f"Table {number}: {protocol.title}, {'real layers' if real else 'emulated accelerators'}",
        columns,
        shown,
        notes(protocol, settings, rows, options),
        {"rows": rows, "contenders": [options.schedules[0], *others]},
        curves(rows, options.schedules[0]),
    )


def check(options: BenchOptions, protocol: GridTable) -> None:
    """Refuses, before anything runs, what cannot be measured."""
    if wrong := [kind for kind in options.schedules if kind not in KINDS]:
        raise ConfigurationError(f"schedules={','.join(wrong)}: use {', '.join(KINDS)}")
    if protocol.linked and (round_robin := [kind for kind in options.schedules if kind.startswith("interleaved")]):
        raise ConfigurationError(f"schedules={round_robin[0]}: table 3 has one cell a worker; leave it out")
    if not options.schedules or not options.models or not options.grid_K:
        raise ConfigurationError("models, schedules and K need at least one value each: see gpipe-bench --help")
    if too_few := [K for K in options.grid_K if K < 2]:
        raise ConfigurationError(f"K={too_few[0]}: a pipeline to measure has at least 2 cells")


def uses_real_layers(protocol: GridTable, options: BenchOptions) -> bool:
    """Reports whether layers compute: with a GPU for each of K workers, or where the options ask for it."""
    if options.layers == "auto":
        return not protocol.linked and count_gpus() >= max(options.grid_K)
    if options.layers == "real" and protocol.linked:
        raise ConfigurationError("layers=real: table 3's slow links are emulated, and so are its layers")
    return options.layers == "real"


def make_settings(
    protocol: GridTable, options: BenchOptions, grid: Sequence[tuple[int, int]], say: Say
) -> list[Setting]:
    """Counts the models, and returns each of them at each K and M, emulated.

    Raises:
        ConfigurationError: more cells than layers.
    """
    say("counting the models' FLOPs on fake tensors")
    counted = count_models([PaperModel(family, protocol.sizes[family], options.small) for family in options.models])
    for costs in counted:
        for K, _ in grid:
            if len(costs.costs) < K:
                layers = f"{costs.model.name} has {len(costs.costs)} layers"
                raise ConfigurationError(f"K={K}: {layers}, and each cell needs one")
    return [
        Setting(costs, K, M, serial_seconds(M, options), options, protocol.linked) for costs in counted for K, M in grid
    ]


def measure_emulated(settings: Sequence[Setting], options: BenchOptions, say: Say) -> list[Measured]:
    """Measures with one set of processes for each K; in each setting the contenders take turns."""
    measured: dict[int, Measured] = {}
    for K in sorted({setting.K for setting in settings}):
        numbers = [number for number, setting in enumerate(settings) if setting.K == K]
        say(f"K={K}: {len(numbers)} settings, timed steps of each contender: {options.timed_steps}")
        found = _run([settings[number] for number in numbers], options)
        measured |= dict(zip(numbers, found, strict=True))
    return [measured[number] for number in range(len(settings))]


def measure_real(setting: Setting, options: BenchOptions, say: Say) -> Measured:
    """Measures each contender in processes of its own.

    A contender that runs out of memory ends its workers, which may wait for each other, and nothing else; and none
    starts with what another has left in a device's memory.
    """
    seconds: dict[str, float | None] = {}
    too_large = []
    for name in setting.contenders():
        model = setting.costs.model.name
        say(f"{model}, K={setting.K}, M={setting.M}, timed steps: {options.timed_steps}: {name}")
        try:
            seconds |= _run([setting], options, [name])[0].seconds
        except WorkerOutOfMemory as error:
            seconds[name] = None
            too_large.append(name)
            say(f"does not fit: {last_line(error)}")
    return Measured(seconds, too_large=tuple(too_large))


def _run(settings: Sequence[Setting], options: BenchOptions, contenders: Sequence[str] | None = None) -> list[Measured]:
    """Measures settings of one K with one set of processes; ``contenders`` None: all of each setting."""
    config = {
        "settings": [{**s.config(), "contenders": contenders or s.contenders()} for s in settings],
        "real": settings[0].real,
        "repetitions": options.timed_steps,
        "realtime": options.realtime,
    }
    return [Measured(**found) for found in run_workers(WORKER, settings[0].K, config, PRELOAD)]


def last_line(error: WorkerOutOfMemory) -> str:
    """Returns the last line of the traceback, without the log's path, which is gone with its processes' folder."""
    return [line for line in str(error).splitlines() if not line.startswith("log: ")][-1]


def curves(rows: Sequence[Row], kind: str) -> list[Curve]:
    """Returns the throughput by K, one panel per model and M."""
    found = []
    for model, M in dict.fromkeys((row["model"], row["M"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["M"]) == (model, M)]
        lines = [
            (IDEAL, "ideal", [row["ideal"] for row in mine]),
            ("simulated limit", "limit", [row["simulated"] for row in mine]),
            ("paper", "paper", [row["paper"] for row in mine]),
            *((name, "peer", [row["normalised"].get(name) for row in mine]) for name in PEERS),
            (f"ours ({kind})", "ours", [row["ours"] for row in mine]),
        ]
        for label, role, values in lines:
            points = [(float(row["K"]), value) for row, value in zip(mine, values, strict=True) if value is not None]
            if points:
                found.append(Curve(f"{model}, M={M}", label, role, points))
    return found


def notes(protocol: GridTable, settings: Sequence[Setting], rows: Sequence[Row], options: BenchOptions) -> list[str]:
    """Returns the footnotes of the table: the protocol, and what is remarkable, a sentence or two each."""
    real = settings[0].real
    ours = f"ours: schedule {options.schedules[0]}, remat {options.remat}."
    steps = f"Median of {options.timed_steps} step(s) after a warm-up."
    if real:
        batches = {setting.costs.model.name: setting.examples for setting in settings}
        sizes = ", ".join(f"{model}: {examples}" for model, examples in batches.items())
        said = [
            f"{ours} Layers compute, in fp32, on this machine; random examples; a step is forward, backward and an "
            "update by SGD. Cells by min_max over the layers' FLOPs.",
            f"Fixed mini-batch, examples: {sizes} (batch=). {steps} A micro-batch of 1/M may take more than 1/M of "
            "the time.",
            "This way of measuring has not been tried on several GPUs yet.",
        ]
    else:
        serial = ", ".join(f"{serial_seconds(M, options):g} s (M={M})" for M in options.M or protocol.M)
        said = [
            f"{ours} Real engine, real processes, real messages; each layer sleeps as long as its FLOPs require, "
            "backward twice the forward; cells by min_max over the same FLOPs.",
            f"Fixed mini-batch: a micro-batch takes 1/M of it. {steps} Serial work of an emulated step: {serial}; "
            "normalising divides by it.",
        ]
    limit = "" if real else " of limit: that shortest step divided by the measured one."
    said += [
        f"{unit_note(protocol, rows)} simulated: the same instruction lists with nothing between them, in units of its "
        f"own.{limit}",
        "The paper changed its batch size to fit memory, so its rows are no comparison at a fixed batch.",
    ]
    lost = [(row, ", ".join(row["too_large"])) for row in rows if row["too_large"]]
    if large := [f"{row['family']} K={row['K']} M={row['M']} ({names})" for row, names in lost]:
        said.append(
            f"Too large for the memory of a device, so there is a dash: {'; '.join(large)}. batch= makes mini-batches "
            "smaller, small=true the models."
        )
    if protocol.linked:
        return said + link_notes(settings, options)
    return said + ([peer_note(real)] if options.peers else [])


def unit_note(protocol: GridTable, rows: Sequence[Row]) -> str:
    """Names the run of each model that is 1.00, and the paper's."""
    ours = {row["family"]: row["reference"] for row in rows}
    each = "; ".join(f"{family}: {place_name(place) if place else 'none'}" for family, place in ours.items())
    papers = min(place for figures in protocol.paper.values() for place in figures)
    return (
        f"Every column is in units of our own run of the model, the first that could be measured: {each}. The paper's "
        f"figures are in units of its own, {place_name(papers)}."
    )


def place_name(place: tuple[int, int]) -> str:
    return f"K={place[0]}, M={place[1]}"


def peer_note(real: bool) -> str:
    refused = ", where M does not divide the examples" + (", or where workers share a GPU" if real else "")
    return (
        ("Each contender has processes of its own. " if real else "")
        + "torch: torch.distributed.pipelining with the same layers"
        + ("" if real else " in the same processes")
        + f", torch.utils.checkpoint in its stages unless remat=never; a dash where it refuses M{refused}. plain: a "
        "loop on one device, nothing recomputed."
    )


def link_notes(settings: Sequence[Setting], options: BenchOptions) -> list[str]:
    """Describes how the links were limited."""
    largest, busiest = (max(max(getattr(each, key)) for each in settings) for key in ("message_bytes", "carry"))
    return [
        f"Links: {options.bandwidth / 1e9:g} GB/s in each direction and {options.latency * 1e6:g} µs, against "
        f"{options.device_flops / 1e12:g} TFLOP/s of compute, all stretched by one factor to the emulation's time. "
        "A message of the real boundary's bytes (fp32) is handed over when it would arrive; one at a time on a link. "
        f"Largest message: {largest / 1e6:.1f} MB, {1e3 * busiest:.2f} ms here.",
        "simulated: messages travel without a queue. Where one takes longer than a cell's forward, the link is the "
        "limit, and of limit shows its queue.",
    ]
