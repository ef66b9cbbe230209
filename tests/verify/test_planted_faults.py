"""Tests that gpipe-verify catches every planted fault, says where it is, and what a user can act on."""

import re
from pathlib import Path

import pytest
from planted_faults import FAULTS, verified

from gpipe_cli.commands.verify import as_text
from gpipe_cli.verify.compare import ORDER

FAST = {
    *("another_input_recomputed", "boundary_gradient_halved", "clipping_forgotten_in_a_cell", "mini_batch_skipped"),
    *("weight_casts_without_a_graph", "boundary_cast_left_out"),
}


@pytest.mark.parametrize("name", [pytest.param(of, marks=() if of in FAST else pytest.mark.slow) for of in FAULTS])
def test_a_planted_fault_is_caught(tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    report = verified(tmp_path, *fault.words, fault=name)
    different = {q["name"] for step in report["steps"] for q in step["quantities"] if q["beyond"]}
    assert not report["agrees"]
    assert different >= {*fault.differs}, report["findings"]
    assert re.search(fault.said, "\n".join(report["findings"]), re.DOTALL), report["findings"]


def test_every_compared_quantity_is_held_by_a_fault() -> None:
    held = {name for fault in FAULTS.values() for name in fault.differs}
    assert held == {*ORDER}


def test_a_layer_that_changes_between_two_calls_is_named(tmp_path: Path) -> None:
    report = verified(tmp_path, "pipeline.remat=always", "model.odd=dice")
    said = r"layer dice \(cell 2\) gives something else when it is computed again: it depends on something"
    assert re.search(said, "\n".join(report["findings"]))
    assert as_text(report)[-1].startswith("DIFFERENT: ")
