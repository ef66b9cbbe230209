"""Tests `pipeline.schedule=FILE`: lists of one's own are checked, planned and run as the kinds are."""

import json
import time
from pathlib import Path

import pytest
from composed import checked
from inline_run import train_inline
from schedule_rules import scheduled

from gpipe_cli.commands import plan
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.launch.supervisor import Job, launch
from gpipe_cli.schedule.instruction import ScheduleError
from gpipe_cli.schedule.own_lists import as_text, read_lists
from gpipe_cli.schedule.rules import check_lists

# Two workers, the first of which has the first and the last of four cells: no kind places them so.
IN_A_V = """
    F0.0 sa0.0 F0.1 sa0.1  ra3.0 F3.0 B3.0 sg3.0  ra3.1 F3.1 B3.1 sg3.1  rg0.0 B0.0 rg0.1 B0.1   # worker 0

    ra1.0 F1.0 F2.0 sa2.0  ra1.1 F1.1 F2.1 sa2.1  rg2.0 B2.0 B1.0 sg1.0  rg2.1 B2.1 B1.1 sg1.1
"""
SMALL = ["debug=tiny", "pipeline.cost=flops", "pipeline.K=4", "pipeline.M=2", "trainer.steps=3"]
SMALL += ["trainer.evaluate_every=null", "task.generation=null", "logging.tensorboard=false", "logging.every=1"]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.txt"
    path.write_text(IN_A_V, encoding="utf-8")
    return path


def test_a_file_gives_what_was_written_and_where_cells_lie(tmp_path: Path) -> None:
    lists, path = scheduled("zero_bubble", (0, 0, 1, 2), 4, "except_last"), tmp_path / "lists.txt"
    path.write_text(as_text(lists), encoding="utf-8")
    read = read_lists(str(path))
    assert (read.lists, read.placement, read.M) == (lists, (0, 0, 1, 2), 4)


def test_the_lists_of_a_smaller_mini_batch_keep_the_rules(own: Path) -> None:
    read = read_lists(str(own))
    check_lists(read.of(1), read.placement, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("F0.0 X0.0", "'X0.0' is no instruction"),
        ("F0.0 B0.0\nF2.0 B2.0", "cells from 0 on"),
        ("F0.0 sa0.0 rg0.0 W0.0 I0.0\nra1.0 F1.0 B1.0 sg1.0", "W0.0: needs I0.0 before it"),
        ("F0.0 sa0.0 rg0.0\nra1.0 F1.0 B1.0 sg1.0", "no backward 0.0"),
        ("F0.0 F1.0 B1.0 B0.0\nF1.1 B1.1", "F1.1: needs ra1.1 before it"),
        ("F0.0 rg0.0 sa0.0 B0.0\nra1.0 F1.0 B1.0 sg1.0", "sa0.0: a send stands directly behind a computation"),
        ("F0.0 sa0.0 rg0.0 B0.0\nra1.0 F1.0 sg1.0 B1.0", "sg1.0: needs B1.0 or I1.0 before it"),
        ("F0.0 sa0.0 rg0.0 B0.0\nra1.0 F1.0 B1.0", "deadlock: worker 0 waits at rg0.0"),
        (None, "No such file"),
    ],
)
def test_a_file_that_breaks_a_rule_is_refused_by_its_name(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "lists.txt"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ScheduleError) as refusal:
        read_lists(str(path))
    assert str(refusal.value).startswith(f"pipeline.schedule={path}: ") and said in str(refusal.value)


def test_another_k_is_refused_before_workers_start_with_what_to_type(own: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"is for pipeline\.K=4 pipeline\.M=2 pipeline\.workers=2$"):
        checked(*SMALL, "pipeline.K=3", f"pipeline.schedule={own}")


def test_a_word_that_is_neither_kind_nor_file_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"1f2b.*: should be 'gpipe', .* or a file"):
        checked(*SMALL, "pipeline.schedule=1f2b")


def test_written_lists_are_planned_as_the_kind_that_made_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, path = [*SMALL, "pipeline.workers=4", "plan.device=h100"], tmp_path / "lists.txt"
    assert plan.main([*words, "pipeline.schedule=1f1b", "plan.format=lists"]) == 0
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    plans = []
    for schedule in ("1f1b", path):
        assert plan.main([*words, f"pipeline.schedule={schedule}", "plan.format=json"]) == 0
        plans.append(json.loads(capsys.readouterr().out) | {"schedule": ""})
    assert plans[0] == plans[1] and plans[0]["bound_seconds"] > 0


def test_lists_in_a_v_train_with_the_bits_of_a_kind_that_adds_up_in_their_order(tmp_path: Path, own: Path) -> None:
    config = checked(*SMALL, f"pipeline.schedule={own}", "pipeline.workers=2").config
    content = {"settings": config, "started_at": time.time()}
    job = Job(tmp_path, 2, "gpipe_cli.trainer.run:main", content, preload=("torch", "torch.distributed"))
    ours = launch(job, lambda event: None)
    kind, _ = train_inline(tmp_path / "kind", *SMALL, "pipeline.schedule=1f1b", "pipeline.workers=1")
    assert ours["evaluation"] == kind["evaluation"]
