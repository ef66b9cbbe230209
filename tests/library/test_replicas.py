"""Tests replicas in a loop of one's own: together they train as one pipeline of the whole mini-batch does."""

import sys
from pathlib import Path

import pytest
import replicated_loop
import torch
from processes import run, succeeded

from gpipe_cli import Pipeline
from gpipe_cli.errors import ConfigurationError

FOUR = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["alone", "joined"])
def test_two_replicas_of_two_workers_train_as_one_pipeline(how: str, tmp_path: Path) -> None:
    """Sums of gradients, tied weights, BatchNorm, gradients of two steps, a checkpoint; an unused parameter stays."""
    said = succeeded(run(*FOUR, Path(replicated_loop.__file__), 2, tmp_path / "two", how, OMP_NUM_THREADS="1"))
    alone, right = replicated_loop.trained(1, 2, str(tmp_path / "one"))
    assert [float(word) for word in said.split()[1:]] == pytest.approx(right, rel=1e-6)
    loss, example = torch.nn.functional.mse_loss, (replicated_loop.X[:2], replicated_loop.Y[:2])
    loaded = Pipeline.of(replicated_loop.layers(), loss, example, K=1, M=8)
    loaded.load(tmp_path / "two")
    for name, value in loaded.state_dict().items():
        assert torch.allclose(value, alone.state_dict()[name], rtol=1e-5, atol=1e-6), name
    assert torch.equal(loaded.state_dict()["last.unused"], torch.ones(2))


def test_processes_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="replicas=2 does not divide 1 processes: start a multiple of it"):
        replicated_loop.trained(2, 1, "")
