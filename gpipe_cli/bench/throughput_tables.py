"""Tables 2 and 3: normalised throughput by K and M, on emulated accelerators, beside the paper, the ideal and peers.

Everything is in units of the engine's own run at the smallest K and M, as the paper's tables are; the mini-batch is
fixed, so a micro-batch takes 1/M of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpipe_cli.errors import ConfigurationError
from gpipe_cli.gpus import count_gpus
from gpipe_cli.pipeline.schedule import KINDS

from .options import BenchOptions
from .paper import ideal_throughput
from .profiles import Model, profile_models
from .tables import Curve, Say, Table, two_digits
from .throughput_notes import notes
from .throughput_settings import PEERS, PLAIN, TABLES, Protocol, Setting, serial_seconds
from .workers import run_workers

EMULATED, REAL = "gpipe_cli.bench.throughput:worker", "gpipe_cli.bench.real:worker"


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
    real = uses_real_layers(protocol, options)
    say("counting the models' FLOPs on fake tensors")
    profiles = profile_models([Model(family, protocol.sizes[family], options.small) for family in options.models])
    settings = [
        Setting(profile, K, M, 1.0 if real else serial_seconds(M, options), options, protocol.linked, real)
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


def uses_real_layers(protocol: Protocol, options: BenchOptions) -> bool:
    """Where the machine has a GPU for each of K workers, or where the options say so."""
    if options.layers == "auto":
        return not protocol.linked and count_gpus() >= max(options.grid_K)
    if options.layers == "real" and protocol.linked:
        raise ConfigurationError("layers=real: table 3's slow links are emulated, and so are its layers")
    return options.layers == "real"


def check(options: BenchOptions, protocol: Protocol) -> None:
    """What can be refused before anything runs."""
    if wrong := [kind for kind in options.schedules if kind not in KINDS]:
        raise ConfigurationError(f"schedules={','.join(wrong)}: use {', '.join(KINDS)}")
    if protocol.linked and (round_robin := [kind for kind in options.schedules if kind.startswith("interleaved")]):
        raise ConfigurationError(f"schedules={round_robin[0]}: table 3 has one cell a worker; leave it out")
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
        found = run_workers(REAL if settings[0].real else EMULATED, K, config, ("torch.distributed.pipelining",))
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
                None if options.small else protocol.paper[setting.profile.model.family].get((setting.K, setting.M)),
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
    real = results[0].setting.real
    columns = ["model", "K", "M", "paper", "ours", "K·M/(M+K−1)", "simulated", "of limit", *others]
    rows: list[list[object]] = [
        [
            *(r.setting.profile.model.name, r.setting.K, r.setting.M, two_digits(r.paper)),
            *(two_digits(value) for value in (r.ours, r.ideal, r.simulated, None if r.setting.real else r.of_limit)),
            *(two_digits(r.normalised(name)) for name in others),
        ]
        for r in results
    ]
    return Table(
        f"table{protocol.number}",
        f"Table {protocol.number}: {protocol.title}, {'real layers' if real else 'emulated accelerators'}",
        columns,
        rows,
        notes(protocol, results, options, reference_of(protocol, options)),
        {"rows": [result.facts() for result in results], "contenders": [options.schedules[0], *others]},
        curves(results),
    )


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
