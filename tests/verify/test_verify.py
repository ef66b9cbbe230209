"""gpipe-verify: says OK where the pipeline is the plain loop, and names what is wrong where it is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from hydra import compose, initialize_config_module
from torch import nn
from torch.nn import functional as F
from verify_jobs import WORDS, planted

from gpipe_cli.commands import verify
from gpipe_cli.commands.verify import as_text
from gpipe_cli.config import PipelineConfig
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.jobs import own_target
from gpipe_cli.jobs.job import prepare
from gpipe_cli.launch.supervisor import Job, launch_inline
from gpipe_cli.verify.batchnorm import run_together
from gpipe_cli.verify.compare import GRADIENTS, PASSED_BACK, Difference, Quantity, StepComparison
from gpipe_cli.verify.plain import PlainModel, Together
from gpipe_cli.verify.settings import require_room

JOBS = Path(__file__).parents[1] / "jobs"


def verified(run_dir: Path, *words: str, fault: str = "") -> dict[str, Any]:
    """Returns the report of a verification with every cell in this process."""
    overrides = own_target.allow_new_keys([*WORDS, "launch.inline=true", *words])
    with initialize_config_module("gpipe_cli.conf", version_base="1.3"):
        config = prepare(compose("verify", overrides=overrides), overrides).config
    run_dir.mkdir(parents=True, exist_ok=True)
    job = Job(run_dir, 1, "gpipe_cli.verify.run:main", {"settings": config, "started_at": time.time()})
    with planted(fault):
        report = launch_inline(job, lambda event: None)
    assert isinstance(report, dict)
    return report


def row(report: dict[str, Any], step: int, name: str) -> dict[str, Any]:
    (quantities,) = [one["quantities"] for one in report["steps"] if one["step"] == step]
    (found,) = [quantity for quantity in quantities if quantity["name"] == name]
    return dict(found)


# -- the same ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", get_args(get_type_hints(PipelineConfig)["schedule"]))
@pytest.mark.parametrize("remat", ["always", "except_last", "never"])
def test_every_schedule_is_the_plain_loop(tmp_path: Path, schedule: str, remat: str) -> None:
    report = verified(tmp_path, f"pipeline.schedule={schedule}", f"pipeline.remat={remat}", "verify.dtype=float64")
    assert report["agrees"], report["findings"]
    assert row(report, 2, "gradients")["relative"] < 1e-12
    assert row(report, 2, "gradients")["compared"] == 13
    assert row(report, 2, "weights after")["verdict"] == "bit for bit"


def test_float32_agrees_bit_for_bit_where_kernels_are_the_same(tmp_path: Path) -> None:
    report = verified(tmp_path, "model.batchnorm=false")
    assert report["verdict"].startswith("OK, bit for bit: the pipelined run is the plain one (4 steps, K=4, M=4")
    assert row(report, 1, "outputs recomputed")["compared"] > 0


def test_batchnorm_explains_what_m_does(tmp_path: Path) -> None:
    note = verified(tmp_path)["batchnorm"]
    assert (note["layers"], note["micro_batch"], note["mini_batch"]) == (1, 4, 16)
    assert note["first_layer"] == "norm" and note["loss_differs"] > 1e-4 and not note["explains"]
    alone = verified(tmp_path, "pipeline.M=1")
    assert alone["agrees"] and alone["batchnorm"] is None


def test_batchnorm_over_other_examples_is_what_explains_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain loop has the whole mini-batch where the pipeline has micro-batches, and the other way round."""
    run = PlainModel.run

    def exchanged(plain: PlainModel, mini_batch: Any, together: Together, load: Any, take: Any) -> Any:
        other = Together.NOTHING if together is Together.EVERYTHING else Together.EVERYTHING
        return run(plain, mini_batch, other, load, take)

    monkeypatch.setattr(PlainModel, "run", exchanged)
    report = verified(tmp_path, "verify.steps=1")
    assert not report["agrees"]
    assert report["batchnorm"]["explains"]
    assert any(report["batchnorm"]["text"] in line for line in as_text(report))


def test_run_together_gives_batchnorm_the_whole_and_dropout_its_own(tmp_path: Path) -> None:
    """Against one BatchNorm over the concatenated input, with dropout drawn one after the other before it."""
    norm, parts = nn.BatchNorm1d(3), [torch.randn(n, 3) + n for n in (2, 5, 4)]
    seeded = [partial(torch.manual_seed, number) for number in range(3)]

    def run(number: int) -> torch.Tensor:
        seeded[number]()
        before = F.dropout(parts[number], 0.5)
        return F.dropout(norm(before), 0.5)

    together = run_together([partial(run, number) for number in range(3)], [norm], torch.device("cpu"))
    dropped, masks = [], []
    for number, part in enumerate(parts):
        seeded[number]()
        dropped.append(F.dropout(part, 0.5))
        masks.append(F.dropout(torch.ones_like(part), 0.5))
    expected = nn.BatchNorm1d(3)(torch.cat(dropped)) * torch.cat(masks)
    torch.testing.assert_close(torch.cat(together), expected)
    with pytest.raises(IndexError):
        run_together([partial(run, number) for number in (0, 7)], [norm], torch.device("cpu"))


# -- planted faults ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "words", "said"),
    [
        ("scaled_by_m", [], ["step 1: ", "layer head (cell 3)", "they are 4 times too large: scaled by M = 4"]),
        (
            "wrong_seed_in_recompute",
            ["pipeline.remat=always"],
            ["step 1: forward agrees", "recompute drew other random numbers than forward in layer mix_0 (cell 0)"],
        ),
        ("wrong_seed_in_forward", [], ["step 1: first in forward", "layer mix_2 (cell 2) drew other random numbers"]),
        (
            "batchnorm_counted_twice",
            ["pipeline.remat=always"],
            ["step 1: BatchNorm norm.norm averaged over 160 values", "instead of 80", "counted twice"],
        ),
        (
            "stale_weights",
            [],
            ["step 2: first in forward, the output of layer mix_2 (cell 2)", "cell 2 used stale weights in forward"],
        ),
        (
            "boundary_gradient_dropped",
            [],
            [
                "step 1: ",
                "crosses the boundary between layer norm (cell 1) and layer mix_2 (cell 2)",
                "(micro-batch 2)",
            ],
        ),
        (
            "optimizer_state_lost",
            [],
            ["step 2: ", "state differs, first in layer head (cell 3)", "lost"],
        ),
        ("cell_not_updated", [], ["step 1: ", "weights of layer norm (cell 1) were not updated"]),
        (
            "clipping_forgotten",
            ["optimizer=sgd", "optimizer.momentum=0"],
            ["step 1: gradients agree", "by 1 in every cell: gradients were not clipped"],
        ),
        ("clipping_forgotten", [], ["clipping should have multiplied them by 0.0", "were not clipped"]),
        ("averages_never_updated", [], ["step 1: BatchNorm's norm.norm.", "differs"]),
        ("other_weights_in_one_layer", [], ["step 1: before any training layer mix_3 (cell 2) has other weights"]),
        ("", ["model.odd=dice", "pipeline.remat=always"], ["layer dice (cell 2) gives something else when it is"]),
        ("", ["model.odd=counter", "pipeline.remat=always"], ["the buffer counter.calls of layer counter (cell 2)"]),
        (
            "",
            ["model.odd=moody", "model.batchnorm=false", "pipeline.remat=always"],
            ["layer moody (cell 2) gives something else when it is computed again, and draws no random"],
        ),
    ],
)
def test_a_fault_is_caught_and_named(tmp_path: Path, fault: str, words: list[str], said: list[str]) -> None:
    report = verified(tmp_path, *words, fault=fault)
    assert not report["agrees"]
    findings = "\n".join(report["findings"])
    assert all(text in findings for text in said), findings
    assert as_text(report)[-1].startswith("DIFFERENT: ")


# -- the command, real processes -------------------------------------------------------------------------------------


def command(folder: Path, *words: str, fault: str = "") -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": str(JOBS), "FAULT": fault}
    line = [sys.executable, str(JOBS / "verify_jobs.py"), *words]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_workers_and_replicas_agree_with_one_process(tmp_path: Path) -> None:
    words = ["pipeline.workers=2", "pipeline.replicas=2", "pipeline.sync_batchnorm=true", "verify.dtype=float64"]
    done = command(tmp_path, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the pipelined run is the plain one" in done.stdout.splitlines()[-1]
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert json.loads((run_dir / "verify.json").read_text())["agrees"]
    assert not (run_dir / "checkpoints").exists() and not (run_dir / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["transformer", "transformer_lm_small", "amoebanet"])
def test_both_families_are_the_plain_loop(family: str, tmp_path: Path) -> None:
    words = ["debug=tiny", f"model={family}", "pipeline.K=2", "pipeline.workers=2", f"hydra.run.dir={tmp_path / 'run'}"]
    line = [sys.executable, "-m", "gpipe_cli.commands.verify", *words]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("OK")


@pytest.mark.slow
def test_a_fault_between_processes_is_named_and_the_exit_code_is_1(tmp_path: Path) -> None:
    done = command(tmp_path, "pipeline.workers=1", "pipeline.replicas=2", fault="replicas_not_added_up")
    assert done.returncode == 1, done.stderr
    assert "walking back from the loss, the first gradient that differs is that of layer head" in done.stdout


def test_json_is_all_that_standard_output_has(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["launch.inline=true", "verify.format=json", "verify.steps=1", f"hydra.run.dir={tmp_path / 'run'}"]
    assert verify.main([*WORDS, *words]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["agrees"] and [step["step"] for step in report["steps"]] == [1, 2, 5]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["verify.dtype=float64", "precision=bf16"], "use precision=fp32"),
        (["checkpoint.resume=somewhere"], "leave out checkpoint.resume"),
    ],
)
def test_what_has_no_plain_counterpart_is_refused(tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        verified(tmp_path, *words)


def test_too_little_room_for_a_cell_in_memory_or_the_model_on_disk_is_refused(tmp_path: Path) -> None:
    require_room(1000, 4000, 4, tmp_path)
    with pytest.raises(ConfigurationError, match=r"GB in memory, 6 times its largest cell.*debug=tiny"):
        require_room(10**12, 10**12, 4, tmp_path)
    with pytest.raises(ConfigurationError, match=f"GB in {tmp_path}, 10 times the model"):
        require_room(1000, 10**14, 4, tmp_path)


def test_a_gradient_between_layers_decides_nothing_when_all_gradients_of_weights_agree() -> None:
    tied = Difference(0, "stem, micro-batch 1", 11.0, 6e-4)
    weights = Quantity(GRADIENTS, 597, Difference(0, "stem.weight", 1e-5, 1e-9))
    assert StepComparison([Quantity(PASSED_BACK, 144, tied, [tied]), weights]).agrees
    assert not StepComparison([Quantity(GRADIENTS, 597, tied, [tied])]).agrees
