"""Finds the fastest pipeline that fits the devices, and the fewest devices that hold the model."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf
from typing import Any

from ..config import ROUND_ROBIN, PipelineConfig, Settings
from ..errors import ConfigurationError
from ..factory.example import example_micro_batch
from ..schedule.orders import KINDS
from ..schedule.schedule import REMAT
from .cells import CellPlan
from .options import Options
from .plan import Plan
from .planner import Planner

FREE = ("K", "M", "schedule", "workers", "replicas", "partition", "remat")  # keys that a search may choose
ROUNDS = (2, 3, 4, 6, 8)  # cells a worker of round robin
SIDE_BY_SIDE = (1, 4)  # of the other kinds: smaller cells keep their graphs more finely
ALONE = (1, 2, 4, 8, 16)  # of a single worker
MOST_MICRO_BATCHES = 1024
MEASURED_AGAIN = 0.03  # of a step: by how much two measurements of the same layers differ
ROUNDING = 1e-6
NEARLY_FULL = 0.8  # of the memory, from where a cut may have been made for it, and another with recompute be faster
_RIVALS = 3  # that are shown beside the answer
_CORRECTIONS = 4  # of the graphs that fit
Say = Callable[[str], None]


def find_plan(settings: Settings, options: Options, say: Say = lambda line: None) -> Plan:
    """Returns the plan of a configuration, after the search of `plan.fit` or `plan.best`, if any.

    Args:
        say: receives a line of progress now and then.

    Raises:
        ConfigurationError: the configuration cannot be planned, or nothing fits.
    """
    planner = Planner(settings, options)
    if options.fit is not None:
        return smallest(planner, say)
    pipeline = planner.settings.pipeline
    if not (options.best or pipeline.auto):
        return planner.plan()
    free = FREE if options.best else [*pipeline.auto, *(["workers"] if pipeline.workers == "auto" else [])]
    return Search(planner, free, say).fastest(_devices(planner))


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


def candidates(
    pipeline: PipelineConfig, free: Collection[str], devices: int, layers: int, counts: Sequence[int]
) -> Iterator[PipelineConfig]:
    """Yields sections `pipeline` with other values of the keys in ``free``, those that recompute nothing.

    Args:
        devices: of all replicas together.
        layers: of the model.
        counts: micro-batches of all replicas together that a search may try.
    """
    replicas = [n for n in range(1, devices + 1) if devices % n == 0] if "replicas" in free else [pipeline.replicas]
    kinds = list(KINDS) if "schedule" in free else [pipeline.schedule]
    for copies, kind in product(replicas, kinds):
        workers = min(devices // copies, layers) if "workers" in free else pipeline.planned_workers
        if workers * copies != devices and "replicas" in free:
            continue  # devices without work
        for K in _cells(pipeline, kind, workers, layers) if "K" in free else [pipeline.K]:
            for M in [n // copies for n in counts if n % copies == 0] if "M" in free else [pipeline.M]:
                values: dict[str, Any] = {"K": K, "M": M, "schedule": kind, "workers": workers, "replicas": copies}
                if "partition" in free or "K" in free:
                    values["partition"] = "auto"
                if "remat" in free:
                    values |= {"remat": "never", "keep": None}
                yield replace(pipeline, **values)


def _cells(pipeline: PipelineConfig, kind: str, workers: int, layers: int) -> list[int]:
    """Returns the numbers of cells that are tried for a kind on so many workers."""
    if workers == 1:
        each: Sequence[int] = ALONE if kind == "1f1b" else ()  # every kind is the same there
    else:
        each = ROUNDS if kind in ROUND_ROBIN else SIDE_BY_SIDE
    return [workers * number for number in each if workers * number <= layers]


class Search:
    """Looks for the pipeline with the shortest step that fits.

    Args:
        planner: of the model.
        free: keys of `pipeline` that it may choose; all others are as configured.
        say: receives lines of progress.
    """

    def __init__(self, planner: Planner, free: Collection[str], say: Say = lambda line: None) -> None:
        self._planner, self._free, self._say = planner, free, say
        self._tried = 0
        self._nearest: Plan | None = None
        self._refusal: ConfigurationError | None = None

    def fastest(self, devices: int) -> Plan:
        """Returns the plan with the shortest step that fits ``devices``; of those as fast the one with fewest cells.

        Every candidate is first planned without recompute, which takes the least time that it can. A plan that does not
        fit takes at least its bound in the memory that there is (`plan.bound_seconds`). Then those that may be fastest
        come first, until none is left that could be among the best.

        Raises:
            ConfigurationError: nothing fits; the message describes the nearest plan.
        """
        counts = micro_batch_counts(self._planner) if "M" in self._free else []
        layers = len(self._planner.builders)
        sections = list(candidates(self._planner.settings.pipeline, self._free, devices, layers, counts))
        quick = []
        for number, section in enumerate(sections, start=1):
            self._say(f"planned {number} of {len(sections)} pipelines")
            if (plan := self.plan(section)) is not None:
                quick.append((plan, section))
        quick.sort(key=lambda pair: _least_seconds(pair[0]))
        found: list[Plan] = []
        for number, (plan, section) in enumerate(quick, start=1):
            if len(found) > _RIVALS and _least_seconds(plan) > sorted(map(_order, found))[_RIVALS][0]:
                break
            self._say(f"fitted {number} of {len(quick)} pipelines to the memory")
            fitting = [plan] if plan.fits else []
            if plan.memory > NEARLY_FULL * plan.limit and (leaner := self.fitted(section)) is not None:
                fitting.append(leaner)
            found += [min(fitting, key=_order)] if fitting else []
        if not found:
            raise self.error()
        unsure = MEASURED_AGAIN if self._planner.options.device is None else ROUNDING
        as_fast = (1 + unsure) * min(found, key=_order).step_seconds

        def simplest_first(plan: Plan) -> tuple[float, ...]:
            return plan.K if plan.step_seconds <= as_fast else inf, *_order(plan)

        best, *others = sorted(found, key=simplest_first)
        shown = [*others[:_RIVALS], *[plan for plan, _ in quick if not plan.fits][:1]]
        facts = ("step_seconds", "memory", "fits")
        rivals = [{"keys": self._words(each)} | {name: getattr(each, name) for name in facts} for each in shown]
        return replace(best, found=self._words(best), tried=self._tried, rivals=rivals)

    def least(self, devices: int) -> Plan | None:
        """Returns a plan that fits ``devices`` with the smallest micro-batches; None without one."""
        counts, layers = micro_batch_counts(self._planner), len(self._planner.builders)
        sections = candidates(self._planner.settings.pipeline, self._free, devices, layers, counts[-1:])
        lean = [section for section in sections if section.schedule == "1f1b"]
        words: list[Any] = list(REMAT)
        plans = (self.plan(replace(section, remat=remat)) for section, remat in product(lean, words))
        return next((plan for plan in plans if plan is not None and plan.fits), None)

    def fitted(self, section: PipelineConfig) -> Plan | None:
        """Returns the plan of a pipeline that keeps as many graphs as fit; None where it does not fit at all."""
        if "remat" not in self._free:
            return None
        lean = self.plan(replace(section, remat="except_last"))
        if lean is None or not lean.fits:
            least = self.plan(replace(section, remat="always"))
            return least if least is not None and least.fits else None
        sizes: Any = [cell.layers for cell in lean.cells]  # of the cells whose graphs are counted
        plans = [self._keeping(replace(section, partition=cut), lean) for cut in (sizes, section.partition)]
        return min((plan for plan in (*plans, lean) if plan is not None), key=_order)

    def _keeping(self, section: PipelineConfig, lean: Plan) -> Plan | None:
        """Returns the plan that keeps the graphs for which a lean plan has room; None where none is found that fits."""
        room = [worker.limit - worker.total for worker in lean.workers_plan]
        for _ in range(_CORRECTIONS):
            made = self.plan(replace(section, keep=keep_what_fits(lean, room)))
            if made is None or made.fits:
                return made
            over = [max(0.0, worker.total - worker.limit) for worker in made.workers_plan]
            room = [left - more for left, more in zip(room, over, strict=True)]
        return None

    def plan(self, section: PipelineConfig) -> Plan | None:
        """Makes a plan; returns None where model or schedule refuse its values, as BatchNorm does a single number."""
        try:
            made = self._planner.plan(section)
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
        if plan.model_memory > plan.limit:
            cause = f", and weights, gradients and optimizer state alone are {plan.model_memory / 1e9:.4g} GB"
        return ConfigurationError(
            f"nothing fits {plan.limit / 1e9:.4g} GB: the nearest is {plan.memory / 1e9:.4g} GB with "
            f"pipeline.K={plan.K} pipeline.M={plan.M} pipeline.remat={plan.remat} pipeline.schedule={plan.schedule}"
            f"{cause}; use more workers, smaller mini-batches or a smaller model"
        )

    def _words(self, plan: Plan) -> dict[str, Any]:
        """Returns the keys that a person could have typed for a plan, with their values."""
        values = {key: getattr(plan, key) for key in FREE if key in self._free and key not in ("partition", "remat")}
        if "remat" in self._free:
            values |= {"remat": plan.remat} if plan.keep is None else {"keep": plan.keep}
        if {"partition", "K"} & {*self._free} or plan.keep is not None:  # counts are those of this cut's cells
            values["partition"] = [cell.layers for cell in plan.cells]
        return {f"pipeline.{key}": value for key, value in values.items()}


def smallest(planner: Planner, say: Say = lambda line: None) -> Plan:
    """Returns the fastest plan on the fewest devices on which anything fits, one replica.

    Raises:
        ConfigurationError: nothing fits with a worker for every layer; the message describes the nearest plan.
    """
    search = Search(planner, [key for key in FREE if key != "replicas"], say)
    devices = _first(lambda devices: search.least(devices) is not None, len(planner.builders))
    if devices is None:
        raise search.error()
    return search.fastest(devices)


def _first(holds: Callable[[int], bool], most: int) -> int | None:
    """Returns the least number from 1 to ``most`` for which something holds, as for all above it; None: for none."""
    doubled = (min(1 << power, most) for power in range((most - 1).bit_length() + 1))
    enough = next(filter(holds, doubled), None)
    return enough and bisect_left(range(enough), True, enough // 2 + 1, key=holds)


def keep_what_fits(lean: Plan, room: Sequence[float]) -> list[int]:
    """Returns for each cell the most graphs that it keeps, `pipeline.keep`.

    A graph more spares recomputing a share of the micro-batches: that of one in so many as are in flight. What spares
    most seconds for its bytes comes first; of a worker with many cells so the choice comes down to a few layers.

    Args:
        lean: the plan in which each cell keeps one graph, the one at work.
        room: bytes that each worker has left in it.
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
    return cell.seconds.recompute / max(1, cell.graph * cell.inputs_in_flight)


def _least_seconds(plan: Plan) -> float:
    """Returns the least seconds of a pipeline, by its plan without recompute."""
    return plan.step_seconds if plan.fits else max(plan.step_seconds, plan.bound_seconds or inf)


def _order(plan: Plan) -> tuple[float, float]:
    return plan.step_seconds, plan.memory
