"""Records the instructions of all workers in one step, on one clock, and writes them for trace viewers.

The file is in the Trace Event Format, which https://ui.perfetto.dev and chrome://tracing open: a process per worker,
its computation and its messages as threads, an arrow per message.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from ..pipeline.step import HOST_PHASES, PHASES
from ..schedule.instruction import COMPUTE, Instruction, Op
from ..schedule.picture import draw_panels
from ..schedule.schedule import StepSchedule
from ..schedule.simulate import Span, Timeline
from ..svg import Drawing
from .breakdown import simulate_with

COMPUTATION, MESSAGES, HOST = 0, 1, 2  # threads of a worker; a GPU's host reads data while the GPU computes
Recording = Sequence[tuple[str, float, float]]  # a worker's step: name of each instruction and phase, begin, end
_ARROW_MICROSECONDS = 1.0  # an arrow ends so long before its receive, because it must end inside it


def on_one_clock(ranks: Sequence[tuple[str, float, Recording]]) -> list[Recording]:
    """Shifts the recordings to rank 0's clock.

    Processes of one machine share the monotonic clock. Times of another machine are shifted so that the last exchange,
    which ends at about the same moment on all workers, ended at the same time as on rank 0.

    Args:
        ranks: machine of each rank, the end of the exchange in seconds of its clock, and its recording.
    """
    shifts = [0.0 if machine == ranks[0][0] else ranks[0][1] - met for machine, met, _ in ranks]
    return [
        [(name, start + shift, end + shift) for name, start, end in recording]
        for (_, _, recording), shift in zip(ranks, shifts, strict=True)
    ]


def draw_step(title: str, recordings: Sequence[Recording], schedule: StepSchedule) -> Drawing | None:
    """Draws a step of replica 0 above the simulation of its schedule with the mean measured durations.

    Returns:
        The picture, in milliseconds from the first computation; None before the first step.
    """
    placement = schedule.placement
    spans = [
        [Span(Instruction.parse(name), start, end) for name, start, end in recording if name not in PHASES]
        for recording in recordings[: max(placement) + 1]
    ]
    computed = [span for worker in spans for span in worker if span.instruction.op in COMPUTE]
    if not computed:
        return None
    began, taken = min(span.start for span in computed), defaultdict[tuple[Op, int], list[float]](list)
    for instruction, start, end in computed:
        taken[instruction.op, instruction.cell].append(1e3 * (end - start))
    # Some workers begin earlier and wait for the first message; the schedule does not contain that wait.
    in_step = [
        [Span(s.instruction, 1e3 * max(0.0, s.start - began), 1e3 * max(0.0, s.end - began)) for s in worker]
        for worker in spans
    ]
    measured, durations = Timeline(in_step, tuple(placement)), {key: fmean(each) for key, each in taken.items()}
    simulated = simulate_with(schedule.lists(measured.micro_batches), placement, durations)
    return draw_panels({title: measured, "planned with the same durations": simulated}, "ms")


def trace(
    step: int, recordings: Sequence[Recording], placement: Sequence[int], layers: Sequence[str]
) -> dict[str, Any]:
    """Returns a step in the Trace Event Format.

    Args:
        step: number of the step, for the file's description.
        recordings: one recording per rank, replica by replica.
        placement: worker of each cell.
        layers: the layers of each cell, in words.
    """
    workers = max(placement) + 1
    events: list[dict[str, Any]] = []
    began = min((start for recording in recordings for name, start, _ in recording if name not in PHASES), default=0.0)
    for rank, recording in enumerate(recordings):
        replica, worker = divmod(rank, workers)
        name = f"worker {worker}" + (f" of replica {replica}" if len(recordings) > workers else "")
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": name}})
        for tid, thread in ((COMPUTATION, "computation"), (MESSAGES, "messages"), (HOST, "host")):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": thread}})
        for name, start, end in recording:
            place = {"name": name, "pid": rank, "ts": 1e6 * (start - began), "dur": 1e6 * (end - start)}
            if name in PHASES:
                tid = HOST if name in HOST_PHASES else COMPUTATION
                events.append({"ph": "X", "cat": "phase", "tid": tid, **place})
            else:
                events += _slice(Instruction.parse(name), place, replica, layers)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"step": step, "placement": list(placement)}}


def _slice(
    instruction: Instruction, place: dict[str, Any], replica: int, layers: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yields the event of an instruction; if it sends or receives a message, also its end of the message's arrow."""
    tid = COMPUTATION if instruction.op in COMPUTE else MESSAGES
    about = {"cell": instruction.cell, "micro_batch": instruction.micro_batch, "layers": layers[instruction.cell]}
    yield {"ph": "X", "cat": instruction.op.name.lower(), "tid": tid, **place, "args": about}
    sent = instruction.sent_message
    message, start = sent or instruction.awaited_message, place["ts"]
    if message is not None:
        identity = ".".join(map(str, (replica, *message)))
        arrow = {"name": message[0], "cat": "message", "pid": place["pid"], "tid": MESSAGES, "id": identity}
        end = max(start, start + place["dur"] - _ARROW_MICROSECONDS)
        yield {"ph": "s", **arrow, "ts": start} if sent else {"ph": "f", **arrow, "bp": "e", "ts": end}
