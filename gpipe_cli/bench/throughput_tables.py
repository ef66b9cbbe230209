"""Tables 2 and 3: normalised throughput by K and M, on emulated accelerators, beside the paper, the ideal and peers.

Everything is in units of the engine's own run at the smallest K and M, as the paper's tables are; the mini-batch is
fixed, so a micro-batch takes 1/M of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpipe_cli.errors import ConfigurationError
from gpipe_cli.pipeline.schedule import KINDS

from .options import BenchOptions
from .paper import ideal_throughput
from .profiles import Model, profile_models
from .tables import Curve, Table
from .throughput_settings import PEERS, PLAIN, TABLES, Protocol, Setting, serial_seconds
from .workers import run_workers

WORKER = "gpipe_cli.bench.throughput:worker"

PEER_NOTES = (
    "torch: torch.distributed.pipelining with the same layers in the same processes, torch.utils.checkpoint in its "
    "stages unless remat=never; a dash where it refuses M. plain: a loop on one device, nothing recomputed.",
    "torchgpipe is not in this table: it runs all CPU partitions on one thread, so it overlaps nothing without GPUs.",
)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """One row.

    Attributes:
        seconds: of a step, by contender; None where one refuses the setting.
        link: measured seconds of a message in front of cell 1 (``carry``) and of a free one (``host``); None without.
        unit: throughput of the reference, in mini-batches of one second's work a second.
        limit: shortest possible seconds of the step; of the reference ``limit_unit``, as a throughput.
    """

    setting: Setting
    kind: str
    seconds: dict[str, float | None]
    link: dict[str, float] | None
    unit: float
    limit: float
    limit_unit: float
    paper: float | None
    ideal: float

    def normalised(self, name: str) -> float | None:
        seconds = self.seconds.get(name)
        return None if seconds is None else self.setting.serial_seconds / seconds / self.unit

    @property
    def ours(self) -> float:
        value = self.normalised(self.kind)
        assert value is not None
        return value

    @property
    def simulated(self) -> float:
        return self.setting.serial_seconds / self.limit / self.limit_unit

    @property
    def of_limit(self) -> float:
        return self.limit * self.ours * self.unit / self.setting.serial_seconds

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second of the emulated device's link, as measured."""
        if self.link is None:
            return None
        return self.setting.message_bytes[1] / self.link["carry"] * self.setting.scale

    def facts(self) -> dict[str, Any]:
        """For programs."""
        setting = self.setting
        return {
            "model": setting.profile.model.name,
            "family": setting.profile.model.family,
            "K": setting.K,
            "M": setting.M,
            "paper": self.paper,
            "ours": self.ours,
            "ideal": self.ideal,
            "simulated": self.simulated,
            "limit_seconds": self.limit,
            "serial_seconds": setting.serial_seconds,
            "seconds": self.seconds,
            "normalised": {name: self.normalised(name) for name in self.seconds},
            "cell_shares": setting.profile.cell_shares(setting.K),
            "message_bytes": setting.message_bytes[1:],
            "link": self.link,
            "link_bytes_per_second": self.bandwidth,
        }


def throughput_table(number: int, options: BenchOptions, say: Say) -> Table:
    """Table 2 or 3 on emulated accelerators.

    Raises:
        ConfigurationError: an unknown schedule, or more cells than layers.
    """
    protocol = TABLES[number]
    check(options, protocol)
    say("counting the models' FLOPs on fake tensors")
    profiles = profile_models([Model(family, protocol.sizes[family], options.small) for family in options.models])
    settings = [
        Setting(profile, K, M, serial_seconds(M, options), options, protocol.linked)
        for profile in profiles
        for K in options.grid_K
        for M in options.M or protocol.M
    ]
    for setting in settings:
        if len(setting.profile.costs) < setting.K:
            layers = f"{setting.profile.model.name} has {len(setting.profile.costs)} layers"
            raise ConfigurationError(f"K={setting.K}: {layers}, and each cell needs one")
    measured = measure(settings, options, say)
    results = make_results(protocol, settings, measured, options)
    return make_table(protocol, results, options)


def check(options: BenchOptions, protocol: Protocol) -> None:
    """What can be refused before anything runs."""
    if wrong := [kind for kind in options.schedules if kind not in KINDS]:
        raise ConfigurationError(f"schedules={','.join(wrong)}: use {', '.join(KINDS)}")
    if not options.schedules or not options.models or not options.grid_K:
        raise ConfigurationError("models, schedules and K need at least one value each: see gpipe-bench --help")
    if too_few := [K for K in options.grid_K if K < 2]:
        raise ConfigurationError(f"K={too_few[0]}: a pipeline to measure has at least 2 cells")


def measure(settings: Sequence[Setting], options: BenchOptions, say: Say) -> dict[int, dict[str, Any]]:
    """What the workers found, by the number of the setting; one set of processes for each K."""
    measured: dict[int, dict[str, Any]] = {}
    for K in sorted(set(options.grid_K)):
        numbers = [number for number, setting in enumerate(settings) if setting.K == K]
        say(f"K={K}: {len(numbers)} settings, timed steps of each contender: {options.timed_steps}")
        config = {
            "settings": [settings[number].config() for number in numbers],
            "repetitions": options.timed_steps,
            "realtime": options.realtime,
        }
        found = run_workers(WORKER, K, config, ("torch.distributed.pipelining",))
        measured |= dict(zip(numbers, found, strict=True))
    return measured


def make_results(
    protocol: Protocol, settings: Sequence[Setting], measured: dict[int, dict[str, Any]], options: BenchOptions
) -> list[Result]:
    """From seconds to throughput in units of each model's reference."""
    kind = options.schedules[0]
    reference = reference_of(protocol, options)
    results = []
    for number, setting in enumerate(settings):
        at = next(i for i, s in enumerate(settings) if s.profile is setting.profile and reference == (s.K, s.M))
        of_reference = settings[at]
        limit, limit_there = setting.limit(kind), of_reference.limit(kind)
        assert limit is not None and limit_there is not None
        results.append(
            Result(
                setting,
                kind,
                measured[number]["seconds"],
                measured[number]["link"],
                of_reference.serial_seconds / measured[at]["seconds"][kind],
                limit,
                of_reference.serial_seconds / limit_there,
                protocol.paper[setting.profile.model.family].get((setting.K, setting.M)),
                ideal_throughput(setting.K, setting.M, reference),
            )
        )
    return results


def reference_of(protocol: Protocol, options: BenchOptions) -> tuple[int, int]:
    return min(options.grid_K), min(options.M or protocol.M)


def make_table(protocol: Protocol, results: Sequence[Result], options: BenchOptions) -> Table:
    others = [
        name
        for name in (*options.schedules[1:], *PEERS, PLAIN)
        if any(result.normalised(name) is not None for result in results)
    ]
    columns = ["model", "K", "M", "paper", "ours", "K·M/(M+K−1)", "simulated", "of limit", *others]
    rows: list[list[object]] = [
        [
            *(r.setting.profile.model.name, r.setting.K, r.setting.M, two_digits(r.paper)),
            *(two_digits(value) for value in (r.ours, r.ideal, r.simulated, r.of_limit)),
            *(two_digits(r.normalised(name)) for name in others),
        ]
        for r in results
    ]
    return Table(
        f"table{protocol.number}",
        f"Table {protocol.number}: {protocol.title}, emulated accelerators",
        columns,
        rows,
        notes(protocol, results, options),
        {"rows": [result.facts() for result in results], "contenders": [options.schedules[0], *others]},
        curves(results),
    )


def two_digits(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def notes(protocol: Protocol, results: Sequence[Result], options: BenchOptions) -> list[str]:
    """The protocol, and what is remarkable."""
    K, M = reference_of(protocol, options)
    kind = options.schedules[0]
    serial = ", ".join(f"{serial_seconds(m, options):g} s (M={m})" for m in options.M or protocol.M)
    said = [
        f"ours: schedule {kind}, remat {options.remat}. Real engine, real processes, real messages; each layer sleeps "
        "as long as its FLOPs say, backward twice the forward; cells by the partitioner's min_max over the same FLOPs.",
        f"Fixed mini-batch: a micro-batch takes 1/M of it. Median of {options.timed_steps} step(s) after a warm-up. "
        f"Serial work of an emulated step: {serial}; normalising takes it out.",
        f"Every column is in units of our own run at K={K}, M={M}. simulated: the same lists of instructions with "
        "nothing between them, in units of its own. of limit: that shortest step by the measured one.",
        "The paper changed its batch size to fit memory, so its rows are no comparison at a fixed batch.",
    ]
    above = [r for r in results if r.paper is not None and r.paper > r.ideal * 1.005]
    if above:
        rows = ", ".join(f"{r.setting.profile.model.family} K={r.setting.K} M={r.setting.M}" for r in above)
        said.append(f"The paper's figure exceeds K·M/(M+K−1), the bound for micro-batches of equal cost, at {rows}.")
    if protocol.linked:
        said += link_notes(results, options)
    elif options.peers:
        said += PEER_NOTES
    return said


def link_notes(results: Sequence[Result], options: BenchOptions) -> list[str]:
    """How the link was limited and what it came to."""
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
    ]


def curves(results: Sequence[Result]) -> list[Curve]:
    """One panel a model and M, throughput by K."""
    found = []
    panels = dict.fromkeys((r.setting.profile.model.name, r.setting.M) for r in results)
    for model, M in panels:
        mine = [r for r in results if (r.setting.profile.model.name, r.setting.M) == (model, M)]
        panel = f"{model}, M={M}"
        lines: list[tuple[str, str, list[float | None]]] = [
            ("K·M/(M+K−1)", "ideal", [r.ideal for r in mine]),
            ("simulated limit", "limit", [r.simulated for r in mine]),
            ("paper", "paper", [r.paper for r in mine]),
            *((name, "peer", [r.normalised(name) for r in mine]) for name in PEERS),
            (f"ours ({mine[0].kind})", "ours", [r.ours for r in mine]),
        ]
        for label, role, values in lines:
            points = [(float(r.setting.K), v) for r, v in zip(mine, values, strict=True) if v is not None]
            if points:
                found.append(Curve(panel, label, role, points))
    return found
