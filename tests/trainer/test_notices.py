"""Tests the notices about BatchNorm and about the time left to save."""

from __future__ import annotations

import math

import pytest

from gpipe_cli.launch.context import launchers_grace_seconds
from gpipe_cli.trainer.notices import batchnorm_notice, grace_warning


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((62, 64, 8, 1, False), "62 BatchNorm layers normalise over 8 examples: mini-batch 64, M=8"),
        ((1, 11, 4, 1, False), "1 BatchNorm layer normalises over 2 or 3 examples: mini-batch 11, M=4"),
        (
            (62, 64, 8, 2, False),
            "62 BatchNorm layers normalise over 4 examples: mini-batch 64, M=8, 2 replicas each by itself",
        ),
        (
            (62, 64, 8, 2, True),
            "62 BatchNorm layers normalise over 8 examples: mini-batch 64, M=8, 2 replicas together",
        ),
        (
            (3, 9, 2, 2, True),
            "3 BatchNorm layers normalise over 4 or 5 examples: mini-batch 9, M=2, 2 replicas together",
        ),
        ((62, 64, 8, 1, True), "62 BatchNorm layers normalise over 8 examples: mini-batch 64, M=8"),
    ],
)
def test_the_notice_counts_the_examples_that_each_layer_sees(
    arguments: tuple[int, int, int, int, bool], text: str
) -> None:
    notice = batchnorm_notice(*arguments)
    assert notice == (text, None)


def test_a_model_without_batchnorm_has_no_notice() -> None:
    assert batchnorm_notice(0, 64, 8, 1, False) is None


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ((62, 12, 8, 1, False), "use pipeline.M<=6, data.batch_size>=16"),
        ((62, 16, 8, 2, False), "use pipeline.M<=4, data.batch_size>=32 or pipeline.sync_batchnorm=true"),
    ],
)
def test_a_single_example_is_warned_of(arguments: tuple[int, int, int, int, bool], advice: str) -> None:
    notice = batchnorm_notice(*arguments)
    assert notice is not None and notice[1] is not None
    assert "a single example" in notice[1] and notice[1].endswith(advice)


def test_two_replicas_together_see_what_one_with_both_halves_would() -> None:
    together, alone = batchnorm_notice(62, 16, 4, 2, True), batchnorm_notice(62, 16, 4, 1, False)
    assert together is not None and alone is not None
    assert together[0].split(":")[0] == alone[0].split(":")[0]


def test_steps_too_long_for_the_time_that_a_request_to_stop_leaves() -> None:
    assert grace_warning(4.0, 8.0) is None
    said = grace_warning(167.4, 8.0)
    assert said is not None
    assert "a step takes 167 s, and 8 s after" in said and "launch.grace_seconds=670 leaves" in said


def test_under_torchrun_its_own_time_counts() -> None:
    assert grace_warning(100.0, 8.0, 600.0) is None
    said = grace_warning(100.0, 600.0, 30.0)
    assert said is not None
    assert "30 s after Ctrl-C or SIGTERM" in said and "torchrun --shutdown-timeout 400 leaves" in said


def test_a_rank_knows_of_torchruns_patience_what_its_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "TORCHELASTIC_RUN_ID", "RANK"):
        monkeypatch.delenv(name, raising=False)
    assert launchers_grace_seconds() is None
    monkeypatch.setenv("RANK", "0")
    assert launchers_grace_seconds() == math.inf
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert launchers_grace_seconds() == 30.0
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    assert launchers_grace_seconds() == 600.0
