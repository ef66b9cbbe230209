"""Tables 2 and 3: normalised throughput by K and M beside the paper, the ideal and peers; emulated or real layers.

Everything is in units of the engine's own run at the smallest K and M, as the paper's tables are; the mini-batch is
fixed, so a micro-batch takes 1/M of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_cli.errors import ConfigurationError
from gpipe_cli.gpus import count_gpus
from gpipe_cli.schedule.orders import KINDS

from .options import BenchOptions
from .paper import ideal_throughput
from .profiles import Model, profile_models
from .tables import Curve, Say, Table, two_digits
from .throughput_notes import notes
from .throughput_processes import measure
from .throughput_settings import PEERS, PLAIN, TABLES, Measured, Protocol, Result, Setting, serial_seconds


def throughput_table(number: int, options: BenchOptions, say: Say) -> Table:
    """Table 2 or 3.

    Raises:
        ConfigurationError: an unknown schedule, or more cells than layers.
        WorkerFailed: a worker's exception, unless it is a real layer that found no room.
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


def make_results(
    protocol: Protocol, settings: Sequence[Setting], measured: Sequence[Measured], options: BenchOptions
) -> list[Result]:
    """From seconds to throughput in units of each model's reference."""
    kind = options.schedules[0]
    results = []
    for setting, found in zip(settings, measured, strict=True):
        reference, seconds = reference_of(setting, settings, measured, kind)
        limit_there = reference.limit(kind)
        results.append(
            Result(
                setting,
                kind,
                found,
                reference.place,
                None if seconds is None else reference.serial_seconds / seconds,
                setting.limit(kind),
                None if limit_there is None else reference.serial_seconds / limit_there,
                None if options.small else protocol.paper[setting.profile.model.family].get(setting.place),
                ideal_throughput(*setting.place, reference.place),
            )
        )
    return results


def reference_of(
    setting: Setting, settings: Sequence[Setting], measured: Sequence[Measured], kind: str
) -> tuple[Setting, float | None]:
    """The setting with the smallest K, then M, in which the same model was measured, and our seconds there.

    Where none was, as when nothing fits into a device's memory, the smallest of all, and None.
    """
    pairs = zip(settings, measured, strict=True)
    found = [(other, facts.seconds.get(kind)) for other, facts in pairs if other.profile is setting.profile]
    return min(found, key=lambda one: (one[1] is None, one[0].place))


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
            *(two_digits(value) for value in (r.ours, r.ideal, r.simulated, r.of_limit)),
            *(two_digits(r.normalised(name)) for name in others),
        ]
        for r in results
    ]
    return Table(
        f"table{protocol.number}",
        f"Table {protocol.number}: {protocol.title}, {'real layers' if real else 'emulated accelerators'}",
        columns,
        rows,
        notes(protocol, results, options),
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
