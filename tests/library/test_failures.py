"""Tests that a call that fails leaves everything as it was, and the workers together."""

from __future__ import annotations

import pickle
import re

import failing_loop
import pytest
import torch
from failing_loop import PLACES, ends_of
from processes import TORCHRUN, run, succeeded

from gpipe_cli.pipeline.cell import LayerFailed, failed


@pytest.mark.parametrize("kind", ["gpipe", "zero_bubble"])
def test_steps_and_evaluations_that_fail_change_nothing(kind: str) -> None:
    right, _ = ends_of(kind, ())
    found, caught = ends_of(kind, PLACES, 2)
    assert found == right
    assert len(caught) == len(PLACES) + 1


def test_what_a_layer_raises_is_caught_by_its_own_class() -> None:
    _, caught = ends_of("gpipe", ("b forward",))
    assert isinstance(caught[0], torch.OutOfMemoryError)
    assert isinstance(caught[0], LayerFailed)
    assert str(caught[0]) == "cell 1, layer 'b', micro-batch 0"
    for kind in (torch.OutOfMemoryError, KeyError, FileNotFoundError, UnicodeDecodeError, StopIteration):
        again = pickle.loads(pickle.dumps(failed("cell 0", kind)))
        assert (str(again), type(again).__name__) == ("cell 0", "LayerFailed")
        assert isinstance(again, kind) == (kind is not StopIteration)


@pytest.mark.slow
def test_the_other_workers_raise_the_same_and_all_go_on() -> None:
    """Each case is a pipeline of its own in processes that have a group; the last have one process each."""
    said = succeeded(run(*TORCHRUN, failing_loop.__file__))
    cases = re.findall(r"^rank (\d), (\w+), ([\w ]+): True, 2 caught, (.*)$", said, re.MULTILINE)
    assert len(cases) == 2 * 2 * len(PLACES), said
    for rank, _, place, text in cases:
        failed_here = rank == ("1" if place[0] == "b" else "0")
        assert failed_here or f"rank {1 - int(rank)} has failed, and all is as before this call" in text
    assert len(re.findall(r"^rank \d, alone: 23$", said, re.MULTILINE)) == 2, said
