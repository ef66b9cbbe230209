"""Tests traces of real workers, the figures of the meter, and that all machines have one clock."""

import json
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from composed import checked
from run_files import rows
from schedule_rules import scheduled

from gpipe_cli.distributed.step_message import BatchShape, StepMessage
from gpipe_cli.distributed.world import World
from gpipe_cli.launch.supervisor import Job, launch
from gpipe_cli.metrics.trace import on_one_clock
from gpipe_cli.pipeline.step import Meter, StepPlan, StepResult
from gpipe_cli.position import Position
from gpipe_cli.schedule.instruction import Instruction
from gpipe_cli.schedule.simulate import Span
from gpipe_cli.tasks.own_loss import LossFunctionTask

CPU = torch.device("cpu")
Event = dict[str, Any]

# -- a real run ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Holds three steps of four cells on two processes; the last two are recorded."""

    directory: Path
    summary: dict[str, Any]

    @property
    def placement(self) -> list[int]:
        return [cell["worker"] for cell in self.summary["cells"]]

    @property
    def lists(self) -> list[list[Instruction]]:
        return scheduled("1f1b", self.placement, 3, "except_last")

    def events(self, step: int) -> list[Event]:
        text = (self.directory / "trace" / f"step_{step:06d}.trace.json").read_text(encoding="utf-8")
        return cast("list[Event]", json.loads(text)["traceEvents"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("run")
    words = ["debug=tiny", "pipeline.K=4", "pipeline.M=3", "pipeline.workers=2", "pipeline.schedule=1f1b"]
    words += ["trainer.steps=3", "trainer.trace_steps=[2,3]", "trainer.evaluate_first=false", "logging.every=3"]
    words += ["trainer.evaluate_every=null", "task.generation=null", "logging.tensorboard=false"]
    content = {"settings": checked(*words).config, "started_at": time.monotonic()}
    job = Job(directory, 2, "gpipe_cli.trainer.run:main", content, preload=("torch", "torch.distributed"))
    return Run(directory, launch(job, lambda event: None))


def is_instruction(event: Event) -> bool:
    return event["ph"] == "X" and event["cat"] != "phase"


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 3])
def test_the_trace_of_each_worker_is_its_list_of_the_schedule(run: Run, step: int) -> None:
    for worker, expected in enumerate(run.lists):
        slices = [event for event in run.events(step) if is_instruction(event) and event["pid"] == worker]
        slices.sort(key=lambda event: event["ts"])  # stable: the file has them in the order of execution
        assert [event["name"] for event in slices] == [str(instruction) for instruction in expected]


def test_a_worker_does_one_thing_at_a_time(run: Run) -> None:
    for pid in (0, 1):
        slices = [event for event in run.events(3) if event["ph"] == "X" and event["pid"] == pid]
        ends = [(event["ts"], event["ts"] + event["dur"]) for event in sorted(slices, key=lambda event: event["ts"])]
        assert all(end <= start + 1e-3 for (_, end), (start, _) in pairwise(ends))


def test_every_message_has_an_arrow_forward_in_time(run: Run) -> None:
    arrows = {kind: {e["id"]: e for e in run.events(2) if e["ph"] == kind} for kind in ("s", "f")}
    sent = {i.sent_message for worker in run.lists for i in worker if i.sent_message is not None}
    assert set(arrows["s"]) == set(arrows["f"]) == {".".join(["0", *map(str, message)]) for message in sent}
    assert all(arrows["s"][name]["ts"] < arrows["f"][name]["ts"] for name in arrows["s"])


def test_now_and_then_a_step_tells_the_times_of_every_cell(run: Run) -> None:
    assert 0 < run.summary["first_step_seconds"] < run.summary["wall_seconds"] < 3600  # both by one clock
    steps = rows(run.directory / "metrics.jsonl")
    assert ["cells" in row for row in steps] == [True, False, True]  # the first, and every third
    cells = steps[2]["cells"]
    assert all(cell["forward"] > 0 and cell["backward"] > 0 for cell in cells)
    # Cells 0 and 1 share a worker, 2 and 3 the other: messages pass between 1 and 2 alone.
    assert [cell["waiting_for_gradient"] > 0 for cell in cells] == [False, True, False, False]
    assert [cell["waiting_for_activation"] > 0 for cell in cells] == [False, False, True, False]
    assert [cell["sending"] > 0 for cell in cells] == [False, True, True, False]


# -- the figures, by hand ------------------------------------------------------------------------------------------


def spans(*texts: str) -> list[Span]:
    """Parses spans such as "F0.0 1 2.5": instruction, start, end."""
    words = (text.split() for text in texts)
    return [Span(Instruction.parse(name), float(start), float(end)) for name, start, end in words]


def result_of(workers: list[tuple[float, float, list[Span]]]) -> StepResult:
    """Returns the result of workers with one cell each, given as (begin, end, spans) of the step.

    The exchange before the step ended at 0.
    """
    worlds = [World(rank, len(workers), 1, CPU, CPU, None, None, None) for rank in range(len(workers))]
    message = StepMessage(worlds[0], BatchShape((), ()), 1, len(workers), [-1], {}, [], LossFunctionTask(len))
    message.ended_at = 0.0
    for message.world, (began, ended, recorded) in zip(worlds, workers, strict=True):
        meter = Meter(CPU, Position())
        meter.began, meter.spans = began, recorded
        message.write_times(meter, {}, ended - began, 0.0)
    message.run()
    return message.read_result(StepPlan((), 1.0))


def test_waiting_is_told_by_neighbour() -> None:
    middle = spans("ra1.0 0 2", "F1.0 2 3", "sa1.0 3 3.5", "rg1.0 3.5 6", "B1.0 6 8", "sg1.0 8 8.25")
    result = result_of([(0.0, 10.0, spans("F0.0 0 2", "B0.0 8 10")), (0.0, 8.25, middle)])
    cell = result.cells[1]
    assert (cell["waiting_for_activation"], cell["waiting_for_gradient"], cell["waiting"]) == (2.0, 2.5, 4.5)
    assert (cell["forward"], cell["backward"], cell["sending"]) == (1.0, 2.0, 0.75)
    assert result.bubble == pytest.approx(1 - (4 + 3) / (2 * 10))


def test_a_gpu_behind_its_host_tells_its_own_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host starts all of the step at 10; the GPU still works at the update before, until 13."""
    moments = iter([13.0, 13.0, 15.0, 16.0])  # of the GPU: begin of the step, F0.0, and what the host waits for
    meter = Meter(torch.device("meta"), Position())
    monkeypatch.setattr(meter, "mark", lambda: GpuMoment(next(moments)))
    monkeypatch.setattr("time.perf_counter", lambda: 10.0)
    meter.begin_step()
    meter.record(Instruction.parse("F0.0"), meter.mark())
    reached = meter.mark()
    monkeypatch.setattr("time.perf_counter", lambda: 16.0)
    assert meter.read_step(reached) == ({}, 2.0)
    assert meter.spans == spans("F0.0 13 15") and meter.began == 13.0


@dataclass
class GpuMoment:
    at: float

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "GpuMoment") -> float:
        return 1000 * (end.at - self.at)


def test_what_rank_0_does_between_steps_is_no_bubble() -> None:
    """Worker 1 is ready at once and waits, while rank 0 draws pictures until 5; the step itself takes 10."""
    first, second = spans("F0.0 5 8", "B0.0 12 15"), spans("ra1.0 0 8", "F1.0 8 10", "B1.0 10 12")
    result = result_of([(5.0, 15.0, first), (0.0, 12.0, second)])
    assert result.bubble == pytest.approx(1 - (6 + 4) / (2 * 10))


# -- clocks --------------------------------------------------------------------------------------------------------


def test_the_clock_of_another_machine_is_set_by_the_end_of_the_exchange() -> None:
    """Machine b's clock is 100 s ahead; the two ranks of machine a share one clock, whenever the exchange ended."""
    ranks = [
        ("a", 5.0, [("F0.0", 6.0, 7.0)]),
        ("a", 5.1, [("F1.0", 7.0, 8.0)]),
        ("b", 105.0, [("F2.0", 108.0, 109.0), ("update", 110.0, 111.0)]),
    ]
    assert on_one_clock(ranks) == [
        [("F0.0", 6.0, 7.0)],
        [("F1.0", 7.0, 8.0)],
        [("F2.0", 8.0, 9.0), ("update", 10.0, 11.0)],
    ]
