"""Tests that the engine computes the plain model's gradients, whatever the schedule, cells, micro-batches and remat."""

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from engine_jobs import CLOSE, Case, all_cases, run_case, run_plain
from own_model import in_backward
from small_models import build_all, engine_of, other_values, token_loss, train_step
from torch import Tensor, nn

from benchmarks.subject import mini_batch, small_model
from gpipe_cli.benchmarks.tables.workers import run_workers
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.pipeline.cell import BuiltLayer, Cell, LayerFailed
from gpipe_cli.pipeline.randomness import NoiseSource
from gpipe_cli.schedule.orders import KINDS


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("K", [*(pytest.param(K, marks=pytest.mark.slow) for K in (1, 2, 3)), 4])
def test_every_gradient_equals_the_plain_models(K: int) -> None:
    """A dropped branch gave its gradient to its neighbour, and what nothing used got zeros, which decay changes."""
    for case in all_cases(K):
        seen, plain = run_case(case, (0,) * K, 0, None), run_plain(replace(case, K=1, kind="", remat=""))
        assert seen[0]["gradients"].keys() == plain[0]["gradients"].keys()
        assert not other_values(seen, plain, ["gradients"], CLOSE), case
    assert plain[0]["gradients"]["first.spare.weight"] is None


def test_workers_wires_and_numbers_of_kept_graphs_change_no_bit() -> None:
    assert run_workers("engine_jobs:compare", 2, {}) == []


def test_positions_beyond_the_model_s_end_are_named() -> None:
    cell = Cell(0, [BuiltLayer(0, "positions", nn.Embedding(4, 2))], NoiseSource(1, 0, torch.device("cpu")))
    with pytest.raises(ConfigurationError, match=r"layer 'positions' looks up .* lower data\.vocabulary or "):
        cell.run_training((torch.arange(5),), (), step=0, micro_batch=0, signature=None, first_time=True)


def test_nothing_is_left_in_the_engine_after_a_step_and_no_graph_is_alive() -> None:
    def alive() -> list[torch.Tensor]:
        gc.collect()
        return [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor) and thing.grad_fn is not None]

    before = {id(tensor) for tensor in alive()}  # of other tests
    for kind in KINDS:
        run_case(Case(3, 4, kind, "except_last", 11, True, 0.3), (0,) * 3, 0, None)
    assert not [tensor for tensor in alive() if id(tensor) not in before]


def broken(gradient: Tensor) -> None:
    raise ValueError("broken")


class Broken(nn.Module):
    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return in_backward(inputs[0], broken), *inputs[1:]


def broken_loss(outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    value, statistics = token_loss(outputs, targets)
    return in_backward(value, broken), statistics


@pytest.mark.parametrize(
    ("kind", "sizes", "place"),
    [
        ("1f1b", [2, 1, 4], "cell 1, backward of layer 'broken', micro-batch 0"),
        ("zero_bubble", [7], "cell 0, backward of layers 'embed' to 'head', micro-batch 0"),
        ("gpipe", [3, 4], "cell 1, backward of layers .*, micro-batch 2"),
    ],
)
def test_a_failing_backward_names_the_layers_of_its_cell(kind: str, sizes: list[int], place: str) -> None:
    builders = small_model()
    if kind != "gpipe":  # there the loss fails
        builders[2] = LayerBuilder("broken", Broken)
    engine = engine_of(build_all(builders), sizes)
    engine.loss = broken_loss if kind == "gpipe" else token_loss
    with pytest.raises(LayerFailed, match=place) as failed:
        train_step(engine, kind, "never", mini_batch(0, 8, 3))
    assert str(failed.value.__cause__) == "broken"
