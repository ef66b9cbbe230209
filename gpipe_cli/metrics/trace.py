"""Records what all workers did in one step, on one clock, and writes it for trace viewers.

The file is in the Trace Event Format, which https://ui.perfetto.dev and chrome://tracing open: a process per worker,
its computation and its messages as threads, an arrow per message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..disk import write_whole
from ..distributed.pipeline import Pipeline
from ..distributed.world import machine_id
from ..pipeline.meter import Phase
from ..schedule.instruction import COMPUTE, Instruction
from ..schedule.simulate import Span, Timeline

COMPUTATION, MESSAGES = 0, 1  # threads of a worker
_ARROW_SECONDS = 1e-6  # an arrow ends so long before its receive, because it must end inside it


@dataclass(frozen=True)
class Recording:
    """Holds one worker's step, in seconds of rank 0's clock."""

    spans: list[Span]
    phases: list[Phase]

    def as_json(self) -> list[Any]:
        """Returns the recording as JSON values, for another worker."""
        return [[(str(span.instruction), span.start, span.end) for span in self.spans], self.phases]

    @classmethod
    def from_json(cls, rows: list[Any]) -> Recording:
        """Reads what `as_json` returned."""
        spans, phases = rows
        return cls([Span(Instruction.parse(text), *times) for text, *times in spans], [Phase(*row) for row in phases])

    def shifted(self, seconds: float, scale: float = 1.0) -> Recording:
        """Returns the recording with ``seconds`` added to all times, which are then multiplied by ``scale``."""
        return Recording(
            [Span(s.instruction, (s.start + seconds) * scale, (s.end + seconds) * scale) for s in self.spans],
            [Phase(p.name, (p.start + seconds) * scale, (p.end + seconds) * scale) for p in self.phases],
        )


def record_everyone(pipeline: Pipeline, met_at: float) -> list[Recording]:
    """Returns the last step of every rank, in rank order, on rank 0, else nothing; every worker calls it together.

    Processes of one machine share the monotonic clock. Times of another machine are shifted so that the last exchange,
    which ends at about the same moment on all workers, ended at the same time as on rank 0.

    Args:
        met_at: when the last exchange of all workers ended, in seconds of this worker's clock.
    """
    meter = pipeline.engine.meter
    meter.read_phases()
    everyone = pipeline.world.gather((machine_id(), met_at, Recording(meter.spans, meter.phases).as_json()))
    return on_one_clock([(machine, met, Recording.from_json(rows)) for machine, met, rows in everyone])


def on_one_clock(ranks: Sequence[tuple[str, float, Recording]]) -> list[Recording]:
    """Returns the recordings on rank 0's clock; given per rank: machine id, end of the exchange, recording."""
    return [step if place == ranks[0][0] else step.shifted(ranks[0][1] - met) for place, met, step in ranks]


def measured_timeline(recordings: Sequence[Recording], placement: Sequence[int]) -> Timeline:
    """Returns the instructions of the step in replica 0, in milliseconds from the first computation."""
    spans = [recording.spans for recording in recordings[: max(placement) + 1]]
    began = min((s.start for worker in spans for s in worker if s.instruction.op in COMPUTE), default=0.0)
    # Some workers begin earlier and wait for the first message; the schedule does not contain that wait.
    in_step = [
        [Span(s.instruction, 1e3 * max(0.0, s.start - began), 1e3 * max(0.0, s.end - began)) for s in worker]
        for worker in spans
    ]
    return Timeline(in_step, tuple(placement))


def trace(
    step: int, recordings: Sequence[Recording], placement: Sequence[int], layers: Sequence[str]
) -> dict[str, Any]:
    """Returns a step in the Trace Event Format.

    Args:
        step: its number, for the file's description.
        recordings: of every rank, replica by replica.
        placement: worker of each cell.
        layers: of each cell, in words.
    """
    workers = max(placement) + 1
    events: list[dict[str, Any]] = []
    began = min((span.start for recording in recordings for span in recording.spans), default=0.0)
    for rank, recorded in enumerate(recordings):
        replica, worker = divmod(rank, workers)
        events += _process(rank, f"worker {worker}" + (f" of replica {replica}" if len(recordings) > workers else ""))
        recording = recorded.shifted(-began, 1e6)  # microseconds, as the format wants
        for span in recording.spans:
            events.append(_slice(rank, span, layers))
            events += _arrow(rank, span, replica)
        for phase in recording.phases:
            events.append(_event(rank, MESSAGES if phase.name == "exchange" else COMPUTATION, "phase", *phase))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"step": step, "placement": list(placement)}}


def write_trace(path: Path, content: Mapping[str, Any]) -> None:
    """Writes the file atomically, in a folder of its own."""
    path.parent.mkdir(exist_ok=True)
    write_whole(path, json.dumps(content) + "\n")


def _process(pid: int, name: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for tid, thread in ((COMPUTATION, "computation"), (MESSAGES, "messages")):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": thread}}


def _slice(pid: int, span: Span, layers: Sequence[str]) -> dict[str, Any]:
    instruction, start, end = span
    tid = COMPUTATION if instruction.op in COMPUTE else MESSAGES
    place = {"cell": instruction.cell, "micro_batch": instruction.micro_batch, "layers": layers[instruction.cell]}
    return {**_event(pid, tid, instruction.op.name.lower(), str(instruction), start, end), "args": place}


def _event(pid: int, tid: int, category: str, name: str, start: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": start, "dur": end - start}


def _arrow(pid: int, span: Span, replica: int) -> Iterator[dict[str, Any]]:
    """Returns the arrow of a message, from its send to the end of its receive."""
    sent = span.instruction.sent_message
    message = sent or span.instruction.awaited_message
    if message is None:
        return
    identity = ".".join(map(str, (replica, *message)))
    common = {"name": message[0], "cat": "message", "pid": pid, "tid": MESSAGES, "id": identity}
    if sent is not None:
        yield {"ph": "s", **common, "ts": span.start}
    else:
        yield {"ph": "f", **common, "bp": "e", "ts": max(span.start, span.end - 1e6 * _ARROW_SECONDS)}
