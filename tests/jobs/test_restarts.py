"""Tests that a run starts again by itself after a worker's death, from its newest checkpoint."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoint_tools import make_layers, save
from composed import checked
from inline_run import train_inline
from launch_command import free_port, wait_for
from own_model import WORDS
from processes import TORCHRUN, TRAIN, run, succeeded
from run_files import rows

from benchmarks.gpu.checks import same_end
from gpipe_cli.checkpoint.files import step_directory
from gpipe_cli.jobs.beginning import RESTARTS, Restarts
from gpipe_cli.launch.report import Failure, WorkerFailed
from gpipe_cli.terminal.console import Console

KILLED = {"cause": "worker 1 was killed by SIGKILL", "from_outside": True}
EXCEPTION = {"cause": "worker 1 failed: ValueError: no"}


def failed(rank: int = 1, **values: Any) -> WorkerFailed:
    error = Failure(rank, 0, 0.0, "the whole text", **values).exception()
    assert isinstance(error, WorkerFailed)
    return error


class Script:
    """Takes the place of a run: fails as told at each start, and keeps the settings of all starts."""

    def __init__(self, run_dir: Path, *words: str) -> None:
        self.config, self.run_dir = checked("launch.restarts=9", "pipeline.workers=4", *words).config, run_dir
        self.starts: list[dict[str, Any]] = []

    def run(self, *failures: WorkerFailed, save_steps: tuple[int, ...] = ()) -> Restarts:
        """Starts again after each failure; start number i saves the checkpoint of step save_steps[i] before."""
        steps = list(save_steps)
        with Console(1, "plain") as console:
            made = Restarts(self.config, self.run_dir, console)
            for failure in (*failures, None):
                self.starts.append(made.settings)
                if steps:
                    save(self.run_dir, steps.pop(0), make_layers())
                    made.begun = True
                if failure is None:
                    break
                made.prepare_next(failure)
        return made

    @property
    def resumed(self) -> list[str | None]:
        return [None if (path := start["checkpoint"]["resume"]) is None else Path(path).name for start in self.starts]


def test_a_killed_run_goes_on_from_the_newest_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(tmp_path)
    made = script.run(failed(**KILLED), failed(**KILLED), save_steps=(5, 7))
    assert script.resumed == [None, "step_00000005", "step_00000007"]
    assert [record["from_step"] for record in made.records] == [5, 7]
    assert made.records[0]["cause"] == KILLED["cause"]
    assert "worker 1 was killed by SIGKILL: restart 2 of 9 from step 7" in capsys.readouterr().out
    assert rows(tmp_path / RESTARTS) == made.records


def test_a_checkpoint_that_the_run_was_told_to_go_back_behind_is_not_used(tmp_path: Path) -> None:
    save(tmp_path, 3, make_layers())
    save(tmp_path, 5, make_layers())
    script = Script(tmp_path)
    script.config["checkpoint"]["resume"] = str(step_directory(tmp_path, 3))
    script.run(failed(**KILLED))
    assert script.resumed == ["step_00000003", "step_00000003"]


def test_what_the_run_found_out_itself_is_not_tried_again(tmp_path: Path) -> None:
    script = Script(tmp_path)
    with pytest.raises(WorkerFailed):
        script.run(failed(cause="worker 0 failed: NonFinite: …", is_plain=True))
    assert len(script.starts) == 1


@pytest.mark.parametrize(("steps", "starts"), [((4,), 2), ((4, 5), 3)], ids=["the same place", "further on"])
def test_an_exception_is_tried_once_more_at_each_place(steps: tuple[int, ...], starts: int, tmp_path: Path) -> None:
    script = Script(tmp_path)
    failures = [failed(**EXCEPTION) for _ in range(9)]
    with pytest.raises(WorkerFailed):
        script.run(*failures, save_steps=steps)
    assert len(script.starts) == starts


@pytest.mark.slow(2)
def test_under_torchrun_a_restart_finds_its_run_and_continues_it_bit_for_bit(tmp_path: Path) -> None:
    words = [*WORDS, "pipeline.K=2", "trainer.steps=8", "checkpoint.every=2", "trainer.average=null"]
    train_inline(tmp_path / "whole", *words, "++model.middle=Dying")
    run_dir = tmp_path / "run"
    started = [*TORCHRUN, "--max-restarts=1", *TRAIN, *words, "model.middle=Dying", f"hydra.run.dir={run_dir}"]
    said = succeeded(run(*started, cwd=tmp_path, HOW="kill"))
    assert same_end(tmp_path / "whole", run_dir)
    (record,) = json.loads((run_dir / "summary.json").read_text())["restarts"]
    assert record["from_step"] in (2, 4)
    assert record["cause"] == "a rank ended"
    assert f"torchrun's restart 1 from step {record['from_step']}" in said


@pytest.mark.slow(2)
@pytest.mark.parametrize("serves_the_store", [False, True])
def test_a_run_goes_on_bit_for_bit_when_a_node_has_died(serves_the_store: bool, tmp_path: Path) -> None:
    words = [*WORDS, "pipeline.K=2", "trainer.steps=300", "checkpoint.every=10", "trainer.average=null"]
    run_dir, elastic = tmp_path / "run", ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"]
    where = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-conf=last_call_timeout=20"]
    launcher = [sys.executable, "-m", "torch.distributed.run", *elastic, *where, *TRAIN, *words]
    launcher += [f"hydra.run.dir={run_dir}", "checkpoint.resume=auto"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for node in range(2):
            with (tmp_path / f"{node}.log").open("wb") as log:
                nodes.append(subprocess.Popen(launcher, env=environment, stdout=log, stderr=log))
            port = int(where[1].rpartition(":")[2])
            wait_for(lambda port=port: socket.socket().connect_ex(("localhost", port)) == 0)  # the first one serves
        wait_for(lambda: (run_dir / "checkpoints" / "step_00000010").is_dir(), 300)
        nodes[not serves_the_store].kill()
        code = nodes[serves_the_store].wait(300)
    finally:
        for process in nodes:
            process.kill()
            process.wait()
    if serves_the_store:  # the other node ends as well
        assert code != 0
        succeeded(run(sys.executable, *TRAIN, *words, f"hydra.run.dir={run_dir}", "checkpoint.resume=auto"))
    else:
        assert code == 0 and "2 cells on 1 worker (WORLD_SIZE=1)" in (tmp_path / "0.log").read_text()
        (record,) = json.loads((run_dir / "summary.json").read_text())["restarts"]
        assert record["from_step"] >= 10
    train_inline(tmp_path / "whole", *words)
    assert same_end(tmp_path / "whole", run_dir)
