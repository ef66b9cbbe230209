"""Tests gpipe-plan against what a run allocates, closed formulas and trying by hand, and that a run's cut fits."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import pytest
from composed import checked
from own_plan import ON_CPU, OWN, planned

from gpipe_cli.benchmarks.tables.workers import run_workers
from gpipe_cli.commands.plan import main, make_request
from gpipe_cli.factory.build import build_model
from gpipe_cli.factory.example import example_micro_batch
from gpipe_cli.partition.cost import LayerTimes, count_forward
from gpipe_cli.partition.cutter import MARGIN
from gpipe_cli.partition.survey import survey
from gpipe_cli.planner.fitting_cut import cut_for_run
from gpipe_cli.planner.memory import PROCESS
from gpipe_cli.planner.planner import Planner

ROOT = Path(__file__).parents[2]
EXPERIMENTS = sorted(
    str(path.relative_to(ROOT / "conf" / "experiment").with_suffix(""))
    for path in (ROOT / "conf" / "experiment").rglob("*.yaml")
    if "recipe" not in path.parts
    and ("transfer" not in path.parts or path.stem == "cifar10")  # the others train the same model
)
TEXTS = ("data=cldr_text", "task=language_model", "data.vocabulary=4000", "model.module.vocabulary=4000")
WIDTHS = ("model.H=128", "model.d_model=64", "model.A=1", "data.vocabulary=4000")
FAMILIES = {
    "translation": ("model.L=2", *WIDTHS, "data.batch_size=32", "task.logit_clip=null"),
    "language model": ("model=transformer_lm_small", "model.L=4", *WIDTHS, "data.batch_size=16", "optimizer=adafactor"),
    "images": ("model=amoebanet", "model.L=3", "model.D=32", "data.batch_size=32"),
    "traced images": ("model=module", "model.module._target_=own_module.mobile_net", "data.batch_size=32"),
    "traced texts": ("model=module", "model.module._target_=own_module.TiedTexts", *TEXTS, "data.batch_size=16"),
}
PAPER_LM = ("model=transformer_lm",)


# -- memory ------------------------------------------------------------------------------------------------------------


SPREAD = ("pipeline.K=4", "pipeline.workers=2", "pipeline.M=8")
RUNS = [
    ("translation", (*SPREAD, "pipeline.remat=never", "pipeline.schedule=1f1b")),
    ("language model", (*SPREAD, "pipeline.remat=except_last", "model.tie_embeddings=true")),
    ("language model", ("pipeline.K=2", "pipeline.M=4", "precision=bf16", "precision.boundaries=bfloat16")),
    ("images", (*SPREAD, "pipeline.remat=never", "trainer.average=0.9")),
    ("translation", (*SPREAD, "pipeline.remat=never", "pipeline.schedule=zero_bubble")),
    ("images", (*SPREAD, "pipeline.remat=always", "pipeline.schedule=zero_bubble")),
    ("translation", (*SPREAD, "pipeline.keep=[5,3,4,2]")),
    ("language model", (*SPREAD, "pipeline.keep=[3,1,2,0]", "pipeline.schedule=zero_bubble")),
    ("traced images", (*SPREAD, "pipeline.remat=never")),
    ("traced texts", (*SPREAD, "pipeline.remat=except_last")),
]


@pytest.fixture(scope="module")
def allocated() -> list[list[dict[str, Any]]]:
    """Returns what the engine's workers allocate in a real step of each of RUNS."""
    settings = [checked(*FAMILIES[family], *how, "pipeline.cost=flops").config for family, how in RUNS]
    return run_workers("plan_jobs:measure", 2, {"settings": settings})  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(RUNS)), ids=[f"{family} {' '.join(how)}" for family, how in RUNS])
def test_every_kind_of_bytes_is_what_a_real_step_allocates(number: int, allocated: list[list[dict[str, Any]]]) -> None:
    family, how = RUNS[number]
    exact = 0.05 if "pipeline.keep" in str(how) else 0.1
    made = planned(*FAMILIES[family], *how, ON_CPU, "pipeline.cost=flops")
    for worker, real in zip(made.workers_plan, allocated[number], strict=True):
        cells = [made.cells[cell] for cell in worker.cells]
        for kind in ("weights", "gradients", "optimizer", "average"):
            assert sum(getattr(cell, kind) for cell in cells) == real[kind], kind
        assert worker.model == sum(real[kind] for kind in ("weights", "gradients", "optimizer", "average"))
        # How many slots of shared memory there are two busy cores decide: as many as messages were on their way.
        assert worker.activations - worker.by_kind["shared"] == pytest.approx(real["activations"], rel=exact)


def test_the_paper_s_largest_model_is_planned_exactly_and_without_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PAPER_LM, "model.L=1663", "pipeline.K=128", "pipeline.M=32", "plan.format=json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["parameters"] == 83_876_910_336
    assert len(printed["cells"]) == 128
    assert sum(cell["parameters"] for cell in printed["cells"]) == 83_876_910_336
    assert sum(cell["gradients"] for cell in printed["cells"]) == 4 * 83_876_910_336
    assert 0 < printed["bubble"] < 1
    assert printed["step_seconds"] > 0


# -- time --------------------------------------------------------------------------------------------------------------


def test_a_step_of_one_cell_takes_its_flops_at_the_device_s_rate() -> None:
    made = planned(*OWN, "pipeline.K=1", "pipeline.M=1", "pipeline.remat=never", "plan.efficiency=1")
    forward = 8 * 2 * 64 * 64 * 64  # layers, multiply and add, examples, two widths
    backward = 2 * forward - 2 * 64 * 64 * 64  # the first layer's input needs no gradient
    assert made.step_seconds == pytest.approx((forward + backward) / 1e9, rel=0.01)


# -- the command -------------------------------------------------------------------------------------------------------


FAST, SLOWEST = ("nmt_small/narrow", "nmt/t_64_16384_32"), ("imagenet/amoebanet_d_google", "transfer/cifar10")


@pytest.mark.parametrize(
    "experiment",
    [
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow(2 if name in SLOWEST else 1))
        for name in EXPERIMENTS
    ],
)
def test_every_experiment_fits_the_device_that_its_head_names(experiment: str) -> None:
    head = (ROOT / "conf" / "experiment" / f"{experiment}.yaml").read_text()
    device = re.search(rf"gpipe-plan .*experiment={experiment} .*(plan\.device=\S+)", head)
    extra = ["checkpoint.init_from=null"] if "transfer" in experiment else []
    made = planned(f"experiment={experiment}", *extra, device[1] if device else "pipeline.cost=flops")
    assert made.step_seconds > 0
    assert device is None or made.fits


def test_a_worker_on_a_cpu_shares_its_memory_with_its_process() -> None:
    (worker,) = planned(*OWN[:-1], ON_CPU, "pipeline.K=1").workers_plan
    assert worker.total == worker.model + worker.activations + PROCESS


def test_unequal_devices_get_work_by_their_speed_and_no_more_than_their_memory() -> None:
    words = ("model=transformer_lm", "model.L=20", "pipeline.K=2", "pipeline.remat=never", "plan.device=h100")
    even = planned(*words)
    slow = planned(*words, "pipeline.worker_devices=[{speed: 1},{speed: 0.5}]")
    assert even.busiest_over_mean < 0.03
    assert 0.6 < slow.cells[0].layers / sum(cell.layers for cell in slow.cells) < 0.72
    assert slow.busiest_over_mean < 0.1
    assert even.step_seconds < slow.step_seconds < 2 * even.step_seconds
    small = f"{even.workers_plan[1].total / 2:.0f}"
    fitting = planned(*words, f"pipeline.worker_devices=[{{memory: 80GB}},{{memory: {small}}}]")
    assert fitting.fits and fitting.cells[0].layers > even.cells[0].layers
    assert [worker.limit for worker in fitting.workers_plan] == [80e9, float(small)]


# -- the cut that a run makes ----------------------------------------------------------------------------------------


WORDS = ("model=transformer_lm_small", "pipeline.K=2", "pipeline.workers=2", "pipeline.cost=flops", ON_CPU)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_the_second_worker_gets_fewer_layers_where_its_memory_is_small(schedule: str) -> None:
    request = make_request((*WORDS, f"pipeline.schedule={schedule}"))
    settings = request.settings
    example, _ = example_micro_batch(settings, settings.pipeline.M, False)
    builders = build_model(settings.model)
    times = [LayerTimes.of_cost(layer.cost) for layer in survey(builders, example[0], count_forward).layers]
    planner = Planner(settings, request.options)
    even = planner.plan()
    first, second = (cell.layers for cell in even.cells)
    fewer = planner.plan(replace(settings.pipeline, partition=[first + 2, second - 2]))
    assert fewer.workers_plan[1].total < even.workers_plan[1].total
    small = round(fewer.workers_plan[1].total * (1 + MARGIN))
    devices = replace(settings, pipeline=replace(settings.pipeline, worker_devices=[{}, {"memory": small}]))
    cut = cut_for_run(builders, devices, example, [inf, inf], times)
    assert first < cut.sizes[0] <= first + 2
    planned = Planner(devices, request.options).plan()
    assert [cell.layers for cell in planned.cells] == cut.sizes and planned.fits
    assert cut_for_run(builders, settings, example, [inf, inf], times).sizes == [cell.layers for cell in even.cells]


def test_an_offloaded_model_is_planned_with_two_cells_in_memory() -> None:
    words = ("model=transformer_lm_small", "pipeline.K=6", "pipeline.workers=1", "pipeline.cost=flops", ON_CPU)
    whole, offloaded = (Planner(*make_request((*words, f"pipeline.offload={on}"))).plan() for on in ("false", "true"))
    cells = whole.cells
    two = max(a.weights + a.gradients + b.weights + b.gradients for a, b in pairwise(cells))
    assert offloaded.workers_plan[0].model == max(two, *(cell.kept for cell in cells)) < whole.workers_plan[0].model
