"""Tests that a process that starts warm behaves as a new interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import cli_jobs
import pytest
from warm_python import PLAIN_POPEN, WarmPopen, can_be_warm, template

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only there processes start warm")
COMMAND = [sys.executable, "-m", "gpipe_cli.commands.train"]


@pytest.mark.parametrize(
    "words", [["--help"], ["pipeline.K=0"], ["--config-dir", "mine", "model=own", "--cfg", "job"]], ids=" ".join
)
def test_it_says_and_returns_the_same(words: list[str], tmp_path: Path) -> None:
    assert can_be_warm(COMMAND) and template() is not None
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "own.yaml").write_text("_target_: own.layers\nwidth: 3\n")
    environment = {**os.environ, "COLUMNS": "70"}
    found = []
    for start in (WarmPopen, PLAIN_POPEN):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with start([*COMMAND, *words], cwd=tmp_path, env=environment, **pipes) as process:
            found.append((*process.communicate(timeout=60), process.returncode))
    assert found[0] == found[1]


def test_it_is_a_child_that_signals_end(tmp_path: Path) -> None:
    words = ["pipeline.K=1", "trainer.steps=1000", f"seed={cli_jobs.SLOW}", "hydra.run.dir=run"]
    command = [sys.executable, str(Path(cli_jobs.__file__)), *words]
    with WarmPopen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert next(line for line in process.stdout if line.startswith("step "))
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        assert str(process.pid) in children
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
    assert process.returncode == 128 + signal.SIGTERM
