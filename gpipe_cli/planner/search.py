"""Finds the fastest pipeline that fits the devices, and the fewest devices that hold the model."""

import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import product
from math import inf
from typing import Any, cast

from ..config import ROUND_ROBIN, PipelineConfig, Settings
from ..errors import ConfigurationError
from ..factory.build import parameters_of
from ..factory.example import example_micro_batch
from ..schedule.orders import KINDS
from .cells import CellPlan
from .options import Options
from .plan import Plan
from .planner import Planner

FREE = ("K", "M", "schedule", "workers", "replicas", "partition", "remat")  # keys that a search may choose
ROUNDS = (2, 3, 4, 6, 8)  # cells a worker of round robin
SIDE_BY_SIDE = (1, 4)  # of the other kinds: smaller cells keep their graphs more finely
ALONE = (1, 2, 4, 8, 16)  # of a single worker
MOST_MICRO_BATCHES = 1024
MEASURED_AGAIN = 0.03  # share of a step by which two measurements of the same layers differ
ROUNDING = 1e-6  # the same share, of times that are not measured
# Share of the memory above which a plan's cut may have been made to fit; one with recompute may then be faster.
NEARLY_FULL = 0.8
_RIVALS = 3  # plans that are shown beside the answer
_CORRECTIONS = 4  # most attempts to find how many graphs fit


@dataclass(frozen=True)
class Listener:
    """Hears how a search goes on, and may end it.

    Attributes:
        say: receives a line of progress now and then.
        stopped: returns True once the user wants the best so far.
    """

    say: Callable[[str], None] = lambda line: None
    stopped: Callable[[], bool] = lambda: False


NOBODY = Listener()


def find_plan(settings: Settings, options: Options, listener: Listener = NOBODY) -> Plan:
    """Returns the plan of a configuration, after the search of `plan.fit`, `plan.best` or `plan.grow`, if any.

    Raises:
        ConfigurationError: the configuration cannot be planned, or nothing fits.
        KeyboardInterrupt: it was stopped before anything was found.
    """
    if options.grow is not None:
        return largest(settings, options, listener)
    planner = Planner(settings, options)
    if options.fit is not None:
        return smallest(planner, listener)
    free = _free_keys(planner)
    return Search(planner, free, listener).fastest(_devices(planner)) if free else planner.plan()


def _free_keys(planner: Planner) -> Collection[str]:
    """Returns the keys that a search may choose; none for a plain plan."""
    pipeline = planner.settings.pipeline
    if planner.options.best:
        return FREE
    return [*pipeline.auto, *(["workers"] if pipeline.auto and pipeline.workers == "auto" else [])]


def _devices(planner: Planner) -> int:
    """Returns the number of devices that a search may use."""
    pipeline, options = planner.settings.pipeline, planner.options
    if options.devices is not None:
        return options.devices
    if options.device is not None and "K" in pipeline.auto and pipeline.workers == "auto":
        raise ConfigurationError("pipeline.K=auto needs the number of devices: type plan.devices=4, for example")
    return planner.with_workers(pipeline).planned_workers * pipeline.replicas


def micro_batch_counts(planner: Planner) -> list[int]:
    """Returns the numbers of micro-batches of all replicas that searches try: powers of two up to the examples.

    Of a model with BatchNorm each has two examples at least: one alone is normalised by itself.
    """
    _, examples = example_micro_batch(planner.settings, 1, planner.options.longest)
    if planner.has_batchnorm:
        examples //= 2
    most = max(1, min(MOST_MICRO_BATCHES, examples))
    return [1 << power for power in range(most.bit_length())]


def candidates(planner: Planner, free: Collection[str], devices: int) -> Iterator[PipelineConfig]:
    """Yields sections `pipeline` with other values of the keys in ``free``, those that recompute nothing.

    Args:
        devices: number of devices of all replicas together.
    """
    pipeline, layers = planner.settings.pipeline, len(planner.builders)
    counts = micro_batch_counts(planner) if "M" in free else []
    replicas = [n for n in range(1, devices + 1) if devices % n == 0] if "replicas" in free else [pipeline.replicas]
    kinds = list(KINDS) if "schedule" in free else [pipeline.schedule]
    for copies, kind in product(replicas, kinds):
        workers = min(devices // copies, layers) if "workers" in free else pipeline.planned_workers
        if workers * copies != devices and "replicas" in free:
            continue  # devices without work
        for K in _cells(kind, workers, layers) if "K" in free else [pipeline.K]:
            for M in [n // copies for n in counts if n % copies == 0] if "M" in free else [pipeline.M]:
                values: dict[str, Any] = {"K": K, "M": M, "schedule": kind, "workers": workers, "replicas": copies}
                if "partition" in free or "K" in free:
                    values["partition"] = "auto"
                if "remat" in free:
                    values |= {"remat": "never", "keep": None}
                yield replace(pipeline, **values)


def _cells(kind: str, workers: int, layers: int) -> list[int]:
    """Returns the numbers of cells that are tried for a kind on so many workers."""
    if workers == 1:
        each: Sequence[int] = ALONE if kind == "1f1b" else ()  # every kind is the same there
    else:
        each = ROUNDS if kind in ROUND_ROBIN else SIDE_BY_SIDE
    return [workers * number for number in each if workers * number <= layers]


class Search:
    """Looks for the pipeline with the shortest step that fits.

    Args:
        planner: plans pipelines of the model.
        free: keys of `pipeline` that it may choose; all others are as configured.
    """

    def __init__(self, planner: Planner, free: Collection[str], listener: Listener = NOBODY) -> None:
        self.planner, self.free, self._listener = planner, free, listener
        self._tried = 0
        self._nearest: Plan | None = None
        self._refusal: ConfigurationError | None = None

    def fastest(self, devices: int) -> Plan:
        """Returns the plan with the shortest step that fits; of plans as fast, the one with fewest cells.

        For each candidate the search knows the least seconds that its step can take. At first these are a bound for any
        cut. Once it is planned they are the seconds of its plan without recompute or, if that does not fit, the bound
        in the memory that there is. The candidate with the least of these is looked at next, until none is left that
        could be among the best.

        Args:
            devices: number of devices of all replicas together.

        Raises:
            ConfigurationError: nothing fits; the message describes the nearest plan.
            KeyboardInterrupt: it was stopped before anything was found.
        """
        sections = list(candidates(self.planner, self.free, devices))
        waiting: list[tuple[float, int, Plan | None]]
        waiting = [(self._least_seconds(section), number, None) for number, section in enumerate(sections)]
        heapify(waiting)
        found, too_large = list[Plan](), list[Plan]()
        began = time.monotonic()
        while waiting and not self._listener.stopped():
            least, number, plan = heappop(waiting)
            if len(found) > _RIVALS and least > sorted(map(_order, found))[_RIVALS][0]:
                break
            self._tell(began, len(waiting) + 1, found)
            if plan is not None:
                leaner = self.fitted(sections[number])
                found += [] if leaner is None else [leaner]
            elif (plan := self.plan(sections[number])) is not None:
                (found if plan.fits else too_large).append(plan)
                if plan.memory > NEARLY_FULL * plan.limit:
                    heappush(waiting, (_least_seconds(plan), number, plan))
        if waiting and not found and self._listener.stopped():
            raise KeyboardInterrupt
        if not found:
            raise self.error()
        unsure = MEASURED_AGAIN if self.planner.options.device is None else ROUNDING
        as_fast = (1 + unsure) * min(found, key=_order).step_seconds

        def simplest_first(plan: Plan) -> tuple[float, ...]:
            return plan.K if plan.step_seconds <= as_fast else inf, *_order(plan)

        best, *others = sorted(found, key=simplest_first)
        shown = [*others[:_RIVALS], *sorted(too_large, key=_least_seconds)[:1]]
        facts = ("step_seconds", "memory", "fits")
        rivals = [{"keys": self._words(each)} | {name: getattr(each, name) for name in facts} for each in shown]
        notes = [*best.notes, *(["stopped: the best of the plans so far"] if self._listener.stopped() else [])]
        return replace(best, found=self._words(best), tried=self._tried, rivals=rivals, notes=notes)

    def _tell(self, began: float, left: int, found: Sequence[Plan]) -> None:
        """Reports how far the search is, and the most seconds that it will still take at the pace so far.

        Args:
            began: moment at which the search began, by `time.monotonic`.
            left: number of candidates that are left.
            found: plans that fit.
        """
        best = f", best so far {min(each.step_seconds for each in found):.3g} s" if found else ""
        seconds = (time.monotonic() - began) / max(1, self._tried) * left
        self._listener.say(f"planned {self._tried} pipelines, {left} left{best}; at most {seconds:.0f} s more")

    def _least_seconds(self, section: PipelineConfig) -> float:
        """Returns the least seconds of a candidate's step; infinity if the model refuses its micro-batches."""
        try:
            return self.planner.least_seconds(section)
        except ConfigurationError as error:
            self._refusal = self._refusal or error
            return inf

    def least(self, devices: int) -> Plan | None:
        """Returns a plan that fits so many devices, with the smallest micro-batches; None if none fits."""
        sections = list(candidates(self.planner, self.free, devices))
        most = max((section.M * section.replicas for section in sections), default=0)
        lean = [each for each in sections if each.schedule == "1f1b" and each.M * each.replicas == most]
        possible = [each for each in lean if self._least_seconds(each) < inf]
        leanest: Any = {"remat": "always", "keep": None} if "remat" in self.free else {}
        plans = (self.plan(replace(section, **leanest)) for section in possible or lean[-1:])
        return next((plan for plan in plans if plan is not None and plan.fits), None)

    def fitted(self, section: PipelineConfig) -> Plan | None:
        """Returns the plan of a pipeline that keeps as many graphs as fit; None if it fits with none."""
        if "remat" not in self.free:
            return None
        lean = self.plan(replace(section, remat="except_last"))
        if lean is None or not lean.fits:
            least = self.plan(replace(section, remat="always"))
            return least if least is not None and least.fits else None
        sizes: Any = [cell.layers for cell in lean.cells]  # of the cells whose graphs are counted
        plans = [self._keeping(replace(section, partition=cut), lean) for cut in (sizes, section.partition)]
        return min((plan for plan in (*plans, lean) if plan is not None), key=_order)

    def _keeping(self, section: PipelineConfig, lean: Plan) -> Plan | None:
        """Returns a plan that keeps as many graphs as a lean plan leaves room for; None if none is found that fits.

        Args:
            lean: the plan of the same pipeline that keeps one graph in each cell.
        """
        room = [worker.limit - worker.total for worker in lean.workers_plan]
        for _ in range(_CORRECTIONS):
            made = self.plan(replace(section, keep=keep_what_fits(lean, room)))
            if made is None or made.fits:
                return made
            over = [max(0.0, worker.total - worker.limit) for worker in made.workers_plan]
            room = [left - more for left, more in zip(room, over, strict=True)]
        return None

    def plan(self, section: PipelineConfig) -> Plan | None:
        """Makes a plan; returns None if the model or the schedule refuses its values."""
        try:
            made = self.planner.plan(section)
        except ConfigurationError as error:
            self._refusal = self._refusal or error
            return None
        self._tried += 1
        if self._nearest is None or made.memory < self._nearest.memory:
            self._nearest = made
        return made

    def error(self) -> ConfigurationError:
        """Returns the error to raise when no plan fits."""
        plan = self._nearest
        if plan is None:
            return self._refusal or ConfigurationError("there is nothing to try")
        cause = ""
        if (model := max(worker.model for worker in plan.workers_plan)) > plan.limit:
            cause = f", and weights, gradients and optimizer state alone are {model / 1e9:.4g} GB"
        return ConfigurationError(
            f"nothing fits {plan.limit / 1e9:.4g} GB: the nearest is {plan.memory / 1e9:.4g} GB with "
            f"pipeline.K={plan.K} pipeline.M={plan.M} pipeline.remat={plan.remat} pipeline.schedule={plan.schedule}"
            f"{cause}; use more workers, smaller mini-batches or a smaller model"
        )

    def _words(self, plan: Plan) -> dict[str, Any]:
        """Returns the keys that a person could have typed to get a plan, with their values."""
        values = {key: getattr(plan, key) for key in FREE if key in self.free and key not in ("partition", "remat")}
        if "remat" in self.free:
            values |= {"remat": plan.remat} if plan.keep is None else {"keep": plan.keep}
        if {"partition", "K"} & {*self.free} or plan.keep is not None:  # counts are those of this cut's cells
            values["partition"] = [cell.layers for cell in plan.cells]
        return {f"pipeline.{key}": value for key, value in values.items()}


def smallest(planner: Planner, listener: Listener) -> Plan:
    """Returns the fastest plan on the fewest devices on which anything fits, one replica.

    Raises:
        ConfigurationError: nothing fits with a worker for every layer; the message describes the nearest plan.
        KeyboardInterrupt: it was stopped before anything was found.
    """
    search = Search(planner, [key for key in FREE if key != "replicas"], listener)

    def holds(devices: int) -> bool:
        if listener.stopped():
            raise KeyboardInterrupt
        listener.say(f"looks whether {devices} devices hold the model")
        return search.least(devices) is not None

    devices = _first(holds, most=len(planner.builders))
    if devices is None:
        raise search.error()
    return search.fastest(devices)


def largest(settings: Settings, options: Options, listener: Listener) -> Plan:
    """Returns the plan of the largest model that fits, by one of its sizes (`plan.grow`).

    Raises:
        ConfigurationError: `plan.grow` names no number of the model, or no size fits.
        KeyboardInterrupt: it was stopped before any size was found to fit.
    """
    name, step = str(options.grow).removeprefix("model."), options.grow_by
    start, known = settings.model.get(name, 1), parameters_of(settings.model)
    if type(start) is not int or name not in known:
        names = ", ".join(f"model.{each}" for each in known)
        raise ConfigurationError(f"plan.grow={options.grow} is no number of this model, which has {names}")
    searches: dict[int, tuple[Search, Plan | None]] = {}

    def too_large(times: int) -> bool:
        if listener.stopped():  # no size is tried any more, so the search ends with the largest that fits so far
            if not any(plan is not None and plan.fits for _, plan in searches.values()):
                raise KeyboardInterrupt
            return True
        listener.say(f"plans model.{name}={times * step}")
        planner = Planner(replace(settings, model={**settings.model, name: times * step}), options)
        search = Search(planner, _free_keys(planner), listener)
        plan = search.least(_devices(planner)) if search.free else search.plan(planner.settings.pipeline)
        searches[times] = search, plan
        return plan is None or not plan.fits

    most = cast(int, _first(too_large, max(1, start // step))) - 1
    if most == 0:
        raise searches[1][0].error()
    search, plan = searches[most]
    assert plan is not None  # it fits
    stopped = listener.stopped()
    best = search.fastest(_devices(search.planner)) if search.free and not stopped else plan
    notes = [*best.notes, *(["stopped: the largest of the sizes so far"] if stopped else [])]
    return replace(best, notes=notes, found={f"model.{name}": most * step, **best.found}, tried=len(searches))


def _first(holds: Callable[[int], bool], start: int = 1, most: int | None = None) -> int | None:
    """Returns the least number for which something holds; None if it holds for none.

    Args:
        holds: returns whether it holds for a number; if so, it does for all larger ones.
        start: number that is tried first, then its double and so on.
        most: largest number that is tried; None: no limit.
    """
    low, high = 0, start
    while not holds(high):
        if high == most:
            return None
        low, high = high, 2 * high if most is None else min(2 * high, most)
    return bisect_left(range(high), True, low + 1, key=holds)


def keep_what_fits(lean: Plan, room: Sequence[float]) -> list[int]:
    """Returns for each cell the most graphs that it keeps, `pipeline.keep`.

    With n micro-batches in flight, one graph more spares the recompute of every n-th micro-batch. The cells whose graph
    spares most seconds for its bytes come first.

    Args:
        lean: the plan in which each cell keeps only the graph at work.
        room: bytes that each worker has left in that plan.
    """
    keep = [1] * lean.K
    for worker in lean.workers_plan:
        left = room[worker.worker]
        cells = [lean.cells[number] for number in worker.cells]
        for cell in sorted(cells, key=_seconds_for_a_byte, reverse=True):
            more = cell.inputs_in_flight - 1
            if cell.graph > 0:
                more = min(more, int(max(0.0, left) // cell.graph))
            left -= more * cell.graph
            keep[cell.cell] = lean.M if more == cell.inputs_in_flight - 1 else 1 + more
    return keep


def _seconds_for_a_byte(cell: CellPlan) -> float:
    """Returns the seconds of recompute that a kept graph spares, per byte of it."""
    return cell.seconds.recompute / max(1, cell.graph * cell.inputs_in_flight)


def _least_seconds(plan: Plan) -> float:
    """Returns the least seconds that a pipeline's step can take, given its plan without recompute."""
    return plan.step_seconds if plan.fits else max(plan.step_seconds, plan.bound_seconds or inf)


def _order(plan: Plan) -> tuple[float, float]:
    """Returns the key by which plans are sorted: the fastest first, then the one with least memory."""
    return plan.step_seconds, plan.memory
