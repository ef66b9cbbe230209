"""Tests that the proof on GPUs runs as a whole, without a GPU, and that its page says what its figures say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import outcome, read, wanted
from benchmarks.gpu.page import PROMISES, page, shown
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.records import DONE, FAILED, LATE, SKIPPED, Record, Records
from benchmarks.gpu.speed import preset, ran_out_of_memory
from benchmarks.gpu.wheelhouse import requirements
from gpipe_cli.pipeline.cell import LayerFailed

ROOT = Path(__file__).parents[2]
H100 = "NVIDIA H100 80GB HBM3"


def tried(folder: Path, *parts: str) -> dict[str, Record]:
    """Runs the command on the CPU and returns what it has written down."""
    output = folder / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", *parts, "--device", "cpu", "--tiny", "--seconds", "2000"]
    command += ["--output", str(output), "--page", str(folder / "gpu.md")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    records = Records(output)
    assert (folder / "gpu.md").read_text() == page(records)
    return records.of


@pytest.mark.slow(2)
@pytest.mark.timeout(2200)
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    found = tried(tmp_path)
    assert {name: record.status for name, record in found.items()} == {part.name: DONE for part in PARTS}
    assert all(record.rows for record in found.values())


@pytest.mark.slow(2)
def test_a_part_writes_what_it_has_found(tmp_path: Path) -> None:
    rows = tried(tmp_path, "messages")["messages"].rows
    assert [row["pipeline.backend"] for row in rows] == ["auto", "gloo"]
    assert all(row["rate, GB/s"] > 0 for row in rows)


def test_a_part_that_ends_early_is_told_with_its_reason() -> None:
    assert outcome(0, [{"ok": True}], [], 9) == (DONE, "")
    assert outcome(0, [{"ok": True}, {"ok": False}], [], 9) == (FAILED, "1 of 2 checks are wrong")
    assert outcome(None, [{"ok": True}], [], 9) == (LATE, "killed after 9 s")
    assert outcome(3, [], ["needs two GPUs"], 9) == (SKIPPED, "needs two GPUs")
    assert outcome(1, [], ["Traceback", "ValueError: 7"], 9) == (FAILED, "Traceback\nValueError: 7")


def test_a_second_call_goes_on_with_what_is_open(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--output", str(tmp_path / "gpu.json")]
    records = Records(tmp_path / "gpu.json")
    for part, status in zip(PARTS, (DONE, FAILED, SKIPPED, LATE), strict=False):
        records.keep(part.name, Record(status, "CPU", torch.__version__, "2026-11-23", 1.0))
    again = Records(tmp_path / "gpu.json")
    names = [part.name for part in PARTS]
    open_parts = [part.name for part in wanted(read(words), again, "CPU")]
    assert open_parts == [*names[4:], names[1], names[3]]  # never tried first, then those that failed
    assert [part.name for part in wanted(read(words), again, H100)] == [*names[4:], *names[:4]]
    assert [part.name for part in wanted(read([*words, "--again"]), again, "CPU")] == names
    assert [part.name for part in wanted(read([*words, "bits"]), again, "CPU")] == ["bits"]


def test_a_part_or_a_device_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(["speed", "--device", "cpu"])
    assert "no part speed: use machine, exact" in capsys.readouterr().err


def test_the_page_tells_rule_and_run_apart() -> None:
    record = Record(DONE, H100, "2.11.0", "2026-11-23", 34.0)
    assert shown(record, "tests/x.py") == f"has run on {H100}, 2026-11-23; by rule: tests/x.py"
    assert shown(Record(FAILED, H100, "2.11.0", "2026-11-23", 3.0), "x").startswith("**failed** on NVIDIA")
    assert shown(Record(DONE, "CPU", "2.11.0", "2026-11-23", 3.0), "x") == "by rule only: x"
    assert shown(None, "x") == "by rule only: x"


def test_the_page_in_docs_is_that_of_its_figures() -> None:
    assert (ROOT / "docs" / "gpu.md").read_text() == page(Records(ROOT / "docs" / "gpu.json"))
    for record in json.loads((ROOT / "docs" / "gpu.json").read_text())["parts"].values():
        assert record["where"] != "CPU"


def test_every_promise_names_a_part_and_a_test() -> None:
    names = {part.name for part in PARTS}
    for _, part, test in PROMISES:
        file, _, function = test.partition("::")
        assert part in names
        assert f"def {function}" in (ROOT / file).read_text(), test


def test_a_gpu_is_known_by_its_name() -> None:
    names = (H100, "NVIDIA H200", "NVIDIA H100 PCIe", "Tesla T4")
    known = {name: None if (found := preset(name)) is None else found.name for name in names}
    assert known == {H100: "h100", "NVIDIA H200": "h200", "NVIDIA H100 PCIe": None, "Tesla T4": None}
    a100 = preset("NVIDIA A100-SXM4-80GB")
    assert a100 is not None
    assert a100.name == "a100-80gb"


def test_a_model_that_does_not_fit_is_no_failure_of_a_part() -> None:
    """The engine raises its own error with the layer's name; a plain loop torch's."""
    named, other = LayerFailed("layer 3"), LayerFailed("layer 4")
    named.__cause__, other.__cause__ = torch.OutOfMemoryError("no room"), ValueError("no room")
    found = [ran_out_of_memory(error) for error in (torch.OutOfMemoryError("no room"), named, other)]
    assert found == [True, True, False]


def test_the_wheelhouse_holds_everything_but_torch() -> None:
    names = [requirement.split(">=")[0] for requirement in requirements()]
    assert {"hydra-core", "safetensors", "pytest"} <= set(names)
    assert not {"torch", "torchvision", "mypy"} & set(names)
