"""Tests that a cell's state can lie in a file while the cell does not run: same values, little memory, no name."""

import gc
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from schedule_rules import check_rules
from small_disk import small_disk
from torch import nn

from gpipe_cli.disk import DiskError
from gpipe_cli.pipeline.offload import CellState, StateFile
from gpipe_cli.schedule.instruction import MOVES, Op, ScheduleError
from gpipe_cli.schedule.orders import KINDS
from gpipe_cli.schedule.rules import check_lists
from gpipe_cli.schedule.schedule import forward_only, schedule

MEGABYTES = 32


def resident() -> int:
    """Returns the bytes of files that are mapped and in this process's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssFile:"))


def offloaded(folder: Path, *parameters: torch.Tensor) -> tuple[CellState, list[nn.Parameter]]:
    own = [nn.Parameter(parameter) for parameter in parameters]
    return CellState(StateFile(str(folder)), own), own


def test_values_strides_and_gradients_stay_and_the_memory_is_given_back(tmp_path: Path) -> None:
    large, last = torch.rand(MEGABYTES << 18), torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    state, own = offloaded(tmp_path, large, last)
    for parameter in own:
        parameter.grad = torch.rand_like(parameter)
    gradients = [parameter.grad.clone() for parameter in own if parameter.grad is not None]
    assert own[0].detach().equal(large)
    there = resident()
    state.take_away()
    assert resident() <= there - (MEGABYTES << 20)
    state.bring()
    for parameter, value, gradient in zip(own, (large, last), gradients, strict=True):
        assert parameter.detach().equal(value) and parameter.stride() == value.stride()
        assert parameter.grad is not None and parameter.grad.equal(gradient)
        assert parameter.grad.data_ptr() in state._held


def test_what_an_optimizer_keeps_lies_in_the_file_too(tmp_path: Path) -> None:
    state, own = offloaded(tmp_path, torch.rand(1000))
    optimizer = torch.optim.Adam(own)
    own[0].grad = torch.rand(1000)
    optimizer.step()
    before = {key: value.clone() for key, value in optimizer.state[own[0]].items()}
    state.keep(optimizer.state)
    assert all(optimizer.state[own[0]][key].equal(value) for key, value in before.items())
    assert optimizer.state[own[0]]["exp_avg"].data_ptr() in state._held


def test_the_file_has_no_name(tmp_path: Path) -> None:
    kept = offloaded(tmp_path, torch.rand(10))
    assert list(tmp_path.iterdir()) == [] and kept


def test_a_disk_without_room_is_told_with_the_key(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=100k") as folder:
        with pytest.raises(DiskError, match=r"pipeline\.offload_dir=.*No space left"):
            offloaded(folder, torch.rand(100_000))
        gc.collect()


@pytest.mark.parametrize("kind", ["gpipe", "breadth_first"])
@pytest.mark.parametrize("placement", [(0,), (0, 0, 0), (0, 1), (0, 0, 1, 1), (0, 1) * 3], ids=str)
def test_a_cell_is_there_while_it_runs_and_comes_twice_a_step(kind: str, placement: Sequence[int]) -> None:
    lists = schedule(kind, placement, 7, (1,) * len(placement), offload=True)
    check_rules(lists, placement, 7, "except_last")
    check_lists(forward_only(placement, 7, offload=True), placement, 7, trains=False)
    for instructions in lists:
        moves = [i for i in instructions if i.op in MOVES]
        cells, there = {i.cell for i in instructions}, set[int]()
        assert len(moves) <= 4 * len(cells)
        for i in moves:
            there = there | {i.cell} if i.op is Op.BRING else there - {i.cell}
            assert len(there) <= 2


@pytest.mark.parametrize("kind", KINDS)
def test_any_kind_serves_one_cell_a_worker(kind: str) -> None:
    check_rules(schedule(kind, (0, 1, 2), 5, (9,) * 3, offload=True), (0, 1, 2), 5, "never")


@pytest.mark.parametrize(("kind", "placement"), [("1f1b", (0, 0, 1)), ("interleaved_1f1b", (0, 1) * 2)])
def test_a_kind_that_turns_to_and_fro_between_cells_is_refused(kind: str, placement: Sequence[int]) -> None:
    with pytest.raises(ScheduleError, match=r"pipeline\.offload=true: worker 0 .* use pipeline\.schedule="):
        schedule(kind, placement, 8, (9,) * len(placement), offload=True)
