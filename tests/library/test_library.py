"""Tests what `Pipeline` promises to a program around it: its modules, modes and random numbers stay its own."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import TORCHRUN, run, succeeded
from torch import Tensor, nn

from gpipe_cli import LayerBuilder, Pipeline
from gpipe_cli.errors import ConfigurationError

X, Y = torch.linspace(-1, 1, 16).view(8, 2), torch.zeros(8, 2)


def pipeline_of(*modules: nn.Module, K: int = 1, **others: Any) -> Pipeline:
    layers = [LayerBuilder(f"layer {number}", lambda module=module: module) for number, module in enumerate(modules)]
    return Pipeline.of(layers, nn.functional.mse_loss, (X[:2], Y[:2]), K=K, M=4, **others)


class LooksAtValues(nn.Module):
    """Cannot be counted on tensors without values; keeps statistics, a count and a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls, self.generator = nn.BatchNorm1d(2), 0, torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.norm(x) + torch.rand(2, generator=self.generator)
        return x * 2 if x.sum() > 0 else x


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return x


def test_counting_costs_leaves_the_program_s_modules_as_they_are() -> None:
    looks, counts = LooksAtValues(), Counts()
    random = looks.generator.get_state()
    pipeline_of(looks, counts)
    assert int(looks.norm.num_batches_tracked) == looks.calls == len(counts.seen) == 0
    assert looks.norm.running_mean.eq(0).all() and torch.equal(looks.generator.get_state(), random)


def test_parts_built_in_evaluation_mode_stay_in_it() -> None:
    norm, dropout = nn.BatchNorm1d(2).eval(), nn.Dropout(0.5)
    frozen = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5).eval())
    pipeline = pipeline_of(norm, dropout, frozen)
    for _ in range(2):
        pipeline.step(X, Y)
        pipeline.forward(X, Y)
    assert [part.training for layer in pipeline.layers for part in layer.module.modules()] == [
        *(False, True),
        *(True, True, False),
    ]
    assert int(pipeline.state_dict()["layer 0.num_batches_tracked"]) == 0


def test_two_layers_of_one_name_are_refused() -> None:
    two = [LayerBuilder(name, partial(nn.Linear, 2, 2)) for name in ("a", "a")]
    with pytest.raises(ConfigurationError, match="two layers named 'a': rename one"):
        Pipeline.of(two, nn.functional.mse_loss, (X[:2], Y[:2]), K=1, M=4)
    inner = LayerBuilder("b", lambda: nn.ModuleDict({"c": nn.Linear(2, 2)}))
    with pytest.raises(ConfigurationError, match=r"'b' and 'b.c' both have b.c.weight"):
        Pipeline.of([inner, LayerBuilder("b.c", two[0].build)], None, (X[:2], Y[:2]), K=1, M=4, cost="parameters")


def test_inputs_and_targets_of_unlike_length_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"inputs\[0\] 8, targets\[0\] 7"):
        pipeline_of(nn.Linear(2, 2)).step(X, Y[:7])


def test_a_module_is_traced_and_trains_as_in_a_plain_loop() -> None:
    """Its weights are those that it has; they keep their names, and the module its values."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    pipeline = Pipeline.of(module, nn.functional.mse_loss, (X[:2], Y[:2]), K=2, M=1)
    loss = pipeline.step(X, Y)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    plain = nn.functional.mse_loss(module(X), Y)
    plain.backward()
    assert loss == pytest.approx(plain.item(), rel=1e-6)
    ours = {name: parameter.grad for name, parameter in pipeline.named_parameters()}
    for name, parameter in module.named_parameters():
        assert torch.allclose(ours[name], parameter.grad, rtol=1e-5, atol=1e-7), name
    assert pipeline.state_dict().keys() == before.keys()


class Remembers(nn.Linear):
    def forward(self, x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006  # what it is about
        seen.append(1)
        return super().forward(x) * len(seen)


def test_a_module_that_remembers_its_calls_is_refused_by_its_class() -> None:
    with pytest.raises(ConfigurationError, match=r"^the module \S+\.Remembers: its layers, traced, do not compute"):
        Pipeline.of(Remembers(2, 2), nn.functional.mse_loss, (X[:2], Y[:2]), K=1, M=4)


def test_the_norm_of_all_gradients_is_torch_s_and_clips_them() -> None:
    norms = []
    for K in (1, 2):
        pipeline = pipeline_of(nn.Linear(2, 2).requires_grad_(), nn.Linear(2, 2), K=K)
        pipeline.load_state_dict({name: torch.ones_like(value) for name, value in pipeline.state_dict().items()})
        pipeline.step(X, Y)
        right = torch.nn.utils.get_total_norm([p.grad for p in pipeline.parameters() if p.grad is not None])
        norms.append(pipeline.clip_grad_norm_(0.5))
        assert norms[-1] == pytest.approx(right.item(), rel=1e-5)
        clipped = torch.nn.utils.get_total_norm([p.grad for p in pipeline.parameters() if p.grad is not None])
        assert clipped.item() == pytest.approx(0.5, rel=1e-5)
    assert norms[0] == norms[1]


def test_a_checkpoint_goes_on_at_another_k_with_the_same_bits(tmp_path: Path) -> None:
    def made(K: int) -> tuple[Pipeline, torch.optim.Optimizer]:
        layers = [LayerBuilder(str(n), partial(nn.Sequential, nn.Linear(2, 2), nn.Dropout(0.3))) for n in range(3)]
        pipeline = Pipeline.of(layers, nn.functional.mse_loss, (X[:2], Y[:2]), K=K, M=4)
        return pipeline, torch.optim.AdamW(pipeline.parameters(), lr=0.1)

    def losses(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> list[float]:
        found = []
        for _ in range(3):
            found.append(pipeline.step(X, Y))
            optimizer.step()
            pipeline.zero_grad()
        return found

    one, other = made(1), made(3)
    losses(*one)
    one[0].save(tmp_path / "new" / "folder", one[1])
    other[0].load(tmp_path / "new" / "folder", other[1])
    assert losses(*other) == losses(*one)
    with pytest.raises(ConfigurationError, match="nothing"):
        other[0].load(tmp_path / "nothing")


def test_evaluation_mode_and_autocast_are_torch_s() -> None:
    pipeline = pipeline_of(nn.Linear(2, 2), nn.Dropout(0.5), autocast=torch.bfloat16)
    pipeline.eval()
    assert pipeline.step(X, Y) == pipeline.step(X, Y)
    assert pipeline.forward(X, Y)[0][0][0].dtype is torch.bfloat16
    pipeline.train()
    assert pipeline.step(X, Y) != pipeline.step(X, Y)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"K": "2"}, 'K="2": should be a valid integer'),
    ({"schedule": "GPipe"}, "schedule=GPipe: should be 'gpipe'"),
    ({"device": "gpu"}, "device=gpu: should be 'auto', 'cpu' or 'cuda'"),
    ({"layers": [nn.Linear(2, 2)]}, r"layers are a module, which is traced, or a list of LayerBuilder\(name, build\)"),
    ({"layers": [LayerBuilder("a", nn.Linear(2, 2))]}, "build makes the module when it is called"),
    ({"example": (X.numpy(), Y)}, "the inputs, are a tensor, or a tuple of tensors, but are a ndarray"),
]


@pytest.mark.parametrize(("words", "said"), WRONG)
def test_wrong_arguments_are_refused_with_what_to_type(words: dict[str, Any], said: str) -> None:
    right = {"layers": nn.Linear(2, 2), "example": (X, Y), "loss": nn.functional.mse_loss, "K": 1, "M": 4}
    with pytest.raises(ConfigurationError, match=said):
        Pipeline.of(**right | words)


@pytest.mark.slow
def test_the_fine_tuning_example_trains_on_two_workers_as_on_one(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "fine_tuning.py"
    (tmp_path / "two").mkdir()
    alone = succeeded(run(sys.executable, script, cwd=tmp_path, OMP_NUM_THREADS="1"))
    assert succeeded(run(*TORCHRUN, script, cwd=tmp_path / "two", OMP_NUM_THREADS="1")) == alone
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", alone)]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.3
