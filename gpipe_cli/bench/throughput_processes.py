"""Starts the processes that measure the settings of tables 2 and 3. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_cli.launch.report import WorkerOutOfMemory

from .options import BenchOptions
from .tables import Say
from .throughput_settings import Measured, Setting
from .workers import run_workers

EMULATED, REAL = "gpipe_cli.bench.throughput:worker", "gpipe_cli.bench.real_throughput:worker"
PRELOAD = ("torch.distributed.pipelining",)


def measure(settings: Sequence[Setting], options: BenchOptions, say: Say) -> list[Measured]:
    """What was found in each of the settings, which are all emulated or all real.

    Raises:
        WorkerFailed: a worker's exception, unless it is a real layer that found no room.
    """
    if settings[0].real:
        return [measure_real(setting, options, say) for setting in settings]
    return measure_emulated(settings, options, say)


def measure_emulated(settings: Sequence[Setting], options: BenchOptions, say: Say) -> list[Measured]:
    """One set of processes for each K; in each setting the contenders take turns."""
    measured: dict[int, Measured] = {}
    for K in sorted({setting.K for setting in settings}):
        numbers = [number for number, setting in enumerate(settings) if setting.K == K]
        say(f"K={K}: {len(numbers)} settings, timed steps of each contender: {options.timed_steps}")
        config = {
            "settings": [settings[number].config() for number in numbers],
            "repetitions": options.timed_steps,
            "realtime": options.realtime,
        }
        found = run_workers(EMULATED, K, config, PRELOAD)
        measured |= {number: Measured(**facts) for number, facts in zip(numbers, found, strict=True)}
    return [measured[number] for number in range(len(settings))]


def measure_real(setting: Setting, options: BenchOptions, say: Say) -> Measured:
    """Each contender has processes of its own: one that finds no room ends its workers, which may wait for each other,
    and nothing else; and none inherits what another has left in a device's memory."""
    seconds: dict[str, float | None] = {}
    too_large = []
    for name in setting.contenders():
        say(f"{setting.profile.model.name}, K={setting.K}, M={setting.M}, timed steps: {options.timed_steps}: {name}")
        config = {"setting": setting.config(), "contender": name, "repetitions": options.timed_steps}
        try:
            seconds[name] = run_workers(REAL, setting.K, config, PRELOAD)
        except WorkerOutOfMemory as error:
            seconds[name] = None
            too_large.append(name)
            say(f"does not fit: {last_line(error)}")
    return Measured(seconds, too_large=tuple(too_large))


def last_line(error: WorkerOutOfMemory) -> str:
    """Of the traceback, without the log's path, which is gone with its processes' folder."""
    return [line for line in str(error).splitlines() if not line.startswith("log: ")][-1]
