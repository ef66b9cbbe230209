"""Chooses how many graphs each cell keeps (`pipeline.keep`), so that the memory of the devices is used for speed."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan import CellPlan, Plan


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
    return cell.recompute_seconds / max(1, cell.graph * cell.inputs_in_flight)
