"""Makes tables 2 and 3: normalised throughput by K and M beside the paper, the ideal and other libraries.

Everything is in units of the engine's own run at the smallest K and M, as the paper's tables are; the mini-batch is
fixed, so a micro-batch takes 1/M of it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from gpipe_cli.errors import ConfigurationError
from gpipe_cli.svg import Curve, plot
from gpipe_cli.terminal.runs import ideal_throughput

from .options import BenchOptions
from .table import Say, Table
from .throughput import PEERS, TABLES, GridTable, Seconds, Setting, measure

Row = dict[str, Any]
IDEAL = "K·M/(M+K−1)"


def throughput_table(number: int, options: BenchOptions, say: Say) -> Table:
    """Measures table 2 or 3.

    Raises:
        ConfigurationError: more cells than layers, or than workers in table 3.
        WorkerFailed: a worker's exception.
    """
    protocol = TABLES[number]
    if protocol.linked and "interleaved_1f1b" in options.schedules:
        raise ConfigurationError("schedules=interleaved_1f1b: table 3 has one cell a worker; leave it out")
    grid = [(K, M) for K in options.K or (2, 4, 8) for M in options.M or protocol.M]
    say("counting the models' FLOPs on fake tensors")
    from .contenders import count_model  # torch is slow

    counted = [count_model(family, protocol.sizes[family]) for family in options.models]
    settings = [Setting(costs, K, M, options, protocol.linked) for costs in counted for K, M in grid]
    rows = list(make_rows(settings, measured(settings, options, say), protocol))
    others = [*options.schedules[1:], *PEERS]
    columns = {"model": "", "K": "", "M": "", "paper": ".2f", "ours": ".2f", IDEAL: ".2f", "simulated": ".2f"}
    columns |= {"of limit": ".2f"}
    columns |= {name: ".2f" for name in others if any(row.get(name) is not None for row in rows)}
    title = f"Table {number}: {protocol.title}, emulated accelerators"
    drawing = plot(list(curves(rows, options.schedules[0])), ("cells K", "normalised throughput"), title)
    return Table(f"table{number}", title, columns, rows, notes(settings[0], rows), drawing)


def measured(settings: Sequence[Setting], options: BenchOptions, say: Say) -> list[Seconds]:
    """Measures with one set of processes for each K; returns the seconds for each setting."""
    found, configs = dict[int, Seconds](), [setting.config() for setting in settings]  # refused before anything runs
    for K in sorted({setting.K for setting in settings}):
        numbers = [number for number, setting in enumerate(settings) if setting.K == K]
        say(f"K={K}: {len(numbers)} settings, timed steps of each contender: {options.timed_steps}")
        of_K = [configs[number] for number in numbers]
        found |= dict(zip(numbers, measure(of_K, K, options.timed_steps, options.realtime), strict=True))
    return [found[number] for number in range(len(settings))]


def make_rows(settings: Sequence[Setting], found: Sequence[Seconds], protocol: GridTable) -> Iterator[Row]:
    """Yields one row per setting, with throughput in units of the reference of each model.

    The reference is the setting with the smallest K, then M.
    """
    for setting, steps in zip(settings, found, strict=True):
        kind, place = setting.options.schedules[0], (setting.K, setting.M)
        same = [pair for pair in zip(settings, found, strict=True) if pair[0].costs is setting.costs]
        unit, of_unit = min(same, key=lambda pair: (pair[0].K, pair[0].M))
        serial, limit, reference = setting.serial_seconds / unit.serial_seconds, setting.limit(kind), (unit.K, unit.M)
        row: Row = {"model": setting.costs.name, "K": setting.K, "M": setting.M, "reference": reference}
        row |= {name: taken and of_unit[kind] / taken * serial for name, taken in steps.items()}
        row |= {"paper": protocol.paper[setting.costs.family].get(place), "ours": row[kind]}
        row |= {IDEAL: ideal_throughput(*place, reference), "of limit": limit / steps[kind]}
        row |= {"simulated": unit.limit(kind) / limit * serial, "seconds": steps}
        yield row | {"limit_seconds": limit, "serial_seconds": setting.serial_seconds}


def curves(rows: Sequence[Row], kind: str) -> Iterator[Curve]:
    """Yields the throughput by K, one panel per model and M."""
    for model, M in dict.fromkeys((row["model"], row["M"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["M"]) == (model, M)]
        lines = [(IDEAL, "ideal", IDEAL), ("simulated limit", "limit", "simulated"), ("paper", "paper", "paper")]
        lines += [*((name, "peer", name) for name in PEERS), (f"ours ({kind})", "ours", "ours")]
        for label, role, key in lines:
            points = [(float(row["K"]), row[key]) for row in mine if row.get(key) is not None]
            if points:
                yield Curve(f"{model}, M={M}", label, role, points)


def notes(setting: Setting, rows: Sequence[Row]) -> list[str]:
    """Returns the footnotes of the table; ``setting`` is any of its settings."""
    options = setting.options
    units = dict.fromkeys(f"{row['model']} at K={row['reference'][0]}, M={row['reference'][1]}" for row in rows)
    said = [
        f"ours: schedule {options.schedules[0]}, remat {options.remat}, median of {options.timed_steps} step(s), in "
        f"units of our own run of {'; '.join(units)}. docs/measurements/tables.md says more."
    ]
    if setting.linked:
        said.append(
            f"Links: {options.bandwidth / 1e9:g} GB/s in each direction and {options.latency * 1e6:g} µs, against "
            f"{options.device_flops / 1e12:g} TFLOP/s of compute; one message at a time on a link."
        )
    return said
