"""Tests what `Pipeline` promises to a program around it: what is its own stays so, and its bits are gpipe-train's."""

import pickle
import re
import sys
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import failing_loop
import pytest
import torch
from failing_loop import PLACES, ends_of
from inline_run import train_inline
from processes import TORCHRUN, run, succeeded
from run_files import losses as losses_of
from safetensors.torch import load_file
from torch import Tensor, nn
from two_processes import TOKENS
from two_processes import made as tied

from gpipe_cli import LayerBuilder, Pipeline
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.pipeline.cell import LayerFailed, failed

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


def test_counting_costs_leaves_the_program_s_modules_as_they_are() -> None:
    looks = LooksAtValues()
    random = looks.generator.get_state()
    pipeline_of(looks)
    assert int(looks.norm.num_batches_tracked) == looks.calls == 0
    assert looks.norm.running_mean.eq(0).all() and torch.equal(looks.generator.get_state(), random)


def test_parts_built_in_evaluation_mode_stay_in_it() -> None:
    norm, dropout = nn.BatchNorm1d(2).eval(), nn.Dropout(0.5)
    frozen = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5).eval())
    pipeline = pipeline_of(norm, dropout, frozen)
    for _ in range(2):
        pipeline.step(X, Y)
        pipeline.forward(X, Y)
    modes = [part.training for layer in pipeline.layers for part in layer.module.modules()]
    assert modes == [False, True, True, True, False]
    assert int(pipeline.state_dict()["layer 0.num_batches_tracked"]) == 0


def test_two_layers_of_one_name_are_refused() -> None:
    two = [LayerBuilder(name, partial(nn.Linear, 2, 2)) for name in ("a", "a")]
    with pytest.raises(ConfigurationError, match="two layers named 'a': rename one"):
        Pipeline.of(two, nn.functional.mse_loss, (X[:2], Y[:2]), K=1, M=4)
    inner = LayerBuilder("b", lambda: nn.ModuleDict({"c": nn.Linear(2, 2)}))
    with pytest.raises(ConfigurationError, match=r"'b' and 'b.c' both have b.c.weight"):
        Pipeline.of([inner, LayerBuilder("b.c", two[0].build)], print, (X[:2], Y[:2]), K=1, M=4, cost="parameters")


def test_inputs_and_targets_of_unlike_length_are_refused_by_name() -> None:
    pipeline = pipeline_of(nn.Linear(2, 2))
    for inputs, targets, said in ((X, Y[:7], r"inputs\[0\] 8, targets\[0\] 7"), (X[:0], Y[:0], "has no examples")):
        with pytest.raises(ConfigurationError, match=said):
            pipeline.step(inputs, targets)


def test_a_module_is_traced_and_trains_as_in_a_plain_loop() -> None:
    """It holds the pipeline's weights: an optimizer over them learns, as what is frozen or loaded later counts."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    pipeline, plain = Pipeline.of(module, nn.functional.mse_loss, (X[:2], Y[:2]), K=2, M=1), deepcopy(module)
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.1) for one in (module, plain)]
    for step in range(4):
        for one in (module, plain):
            if step == 2:
                one[0].requires_grad_(False)
                one[3].load_state_dict({"weight": torch.ones(2, 4), "bias": torch.ones(2)})
        loss = nn.functional.mse_loss(plain(X), Y)
        loss.backward()
        assert pipeline.step(X, Y) == pytest.approx(loss.item(), rel=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    plain.load_state_dict({"1.running_var": module[1].running_var}, strict=False)  # of another formula than torch's
    torch.testing.assert_close(module.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-6)
    assert pipeline.state_dict().keys() == module.state_dict().keys()


def test_parts_of_a_module_in_evaluation_mode_stay_in_it() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), nn.Dropout(0.5).eval(), nn.BatchNorm1d(2))
    module[0].running_mean += 5
    module[0].eval()
    plain = deepcopy(module)
    pipeline = Pipeline.of(module, nn.functional.mse_loss, (X[:2], Y[:2]), K=1, M=1)
    assert pipeline.step(X, Y) == pytest.approx(nn.functional.mse_loss(plain(X), Y).item(), rel=1e-5)
    assert module[0].running_mean.eq(5).all() and not module[3].running_mean.eq(0).any()
    with pytest.warns(UserWarning, match=r"in evaluation mode.*call model.train\(\)"):
        pipeline = Pipeline.of(module.eval(), nn.functional.mse_loss, (X[:2], Y[:2]), K=1, M=1)
    assert pipeline.step(X, Y) == pytest.approx(nn.functional.mse_loss(module(X), Y).item(), rel=1e-5)


@pytest.mark.parametrize("cut", [[3], [1, 2]])
def test_a_tied_weight_is_frozen_and_learns_again_between_steps(cut: list[int]) -> None:
    pipeline = tied(K=len(cut), partition=cut)
    weight, middle = dict(pipeline.named_parameters())["table.weight"], pipeline.layers[1].module
    for trains in (True, False, True):
        weight.requires_grad_(trains)
        pipeline.zero_grad()
        pipeline.step(TOKENS, TOKENS)
        plain = weight.detach().clone().requires_grad_()
        hidden = nn.functional.linear(plain[TOKENS], middle.weight.detach(), middle.bias.detach())
        nn.functional.cross_entropy(hidden @ plain.t(), TOKENS).backward()
        assert (weight.grad is not None) == trains
        if weight.grad is not None:
            assert torch.allclose(weight.grad, plain.grad, atol=1e-6)


def test_what_built_layers_cannot_follow_is_refused() -> None:
    pipeline = tied()
    pipeline.layers[0].module.weight.register_hook(lambda gradient: 0 * gradient)
    with pytest.raises(ConfigurationError, match=r"^table.weight is used by several layers.*change .grad after step"):
        pipeline.step(TOKENS, TOKENS)
    pipeline = pipeline_of(nn.Linear(2, 2))
    pipeline.layers[0].module.adapter = nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match=r"layer 0.adapter.weight, .* were added.*by Pipeline.of"):
        pipeline.step(X, Y)


class Remembers(nn.Linear):
    def forward(self, x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006  # what it is about
        seen.append(1)
        return super().forward(x) * len(seen)


def test_a_module_that_remembers_its_calls_is_refused_by_its_class() -> None:
    with pytest.raises(ConfigurationError, match=r"^the module \S+\.Remembers: its layers, traced, do not compute"):
        Pipeline.of(Remembers(2, 2), nn.functional.mse_loss, (X[:2], Y[:2]), K=1, M=4)


def test_a_module_whose_forward_its_copy_would_share_is_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module.forward = lambda x: module[1](module[0](x))  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match="has not registered"):
        Pipeline.of(module, nn.functional.mse_loss, (X[:2], Y[:2]), K=1, M=1)


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
        pipeline = pipeline_of(*(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.3)) for _ in range(3)), K=K)
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
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(one[1], 8)
    one[0].save(tmp_path / "new" / "folder", one[1], extra=scheduler.state_dict())
    assert other[0].load(tmp_path / "new" / "folder", other[1]) == scheduler.state_dict()
    assert losses(*other) == losses(*one)
    with pytest.raises(ConfigurationError, match="nothing"):
        other[0].load(tmp_path / "nothing")


def test_a_scheduler_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    def made() -> tuple[Pipeline, torch.optim.Optimizer, Any]:
        pipeline = pipeline_of(nn.Linear(2, 2))
        groups = [{"params": [parameter], "lr": 0.1 / (1 + n)} for n, parameter in enumerate(pipeline.parameters())]
        optimizer = torch.optim.SGD(groups)
        return pipeline, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5)

    def rates(optimizer: torch.optim.Optimizer, scheduler: Any) -> list[float]:
        found = []
        for _ in range(3):
            optimizer.step()
            scheduler.step()
            found += [group["lr"] for group in optimizer.param_groups]
        return found

    one, other = made(), made()
    rates(*one[1:])
    one[0].save(tmp_path, one[1], extra=one[2].state_dict())
    other[2].load_state_dict(other[0].load(tmp_path, other[1]))
    assert rates(*other[1:]) == rates(*one[1:])


def test_extra_values_come_back_as_they_were_or_are_refused(tmp_path: Path) -> None:
    pipeline, extra = pipeline_of(nn.Linear(2, 2)), {1: (2, None), "a": [{"b": float("inf")}, True]}
    pipeline.save(tmp_path, extra=extra)
    assert pipeline.load(tmp_path) == extra
    with pytest.raises(ConfigurationError, match=r"extra\['x'\] is a set"):
        pipeline.save(tmp_path / "other", extra={"x": {1}})
    assert not (tmp_path / "other").exists()


def test_outputs_whose_first_dimension_counts_no_examples_are_not_joined() -> None:
    class Last(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.t()

    pipeline = Pipeline.of([LayerBuilder("t", Last)], lambda outputs, targets: outputs.sum(), (X[:2], Y[:2]), K=1, M=2)
    with pytest.raises(ConfigurationError, match=r"of 4 examples one has the shape \[2, 4\]: forward\(\)"):
        pipeline.predict(X)
    assert [output[0].shape for output, _ in pipeline.forward(X, Y)] == [(2, 4)] * 2


def test_inputs_with_a_graph_are_refused_and_others_get_their_gradient() -> None:
    layer, inputs = nn.Linear(2, 2), X.clone().requires_grad_()
    pipeline = pipeline_of(layer)
    with pytest.raises(ConfigurationError, match=r"computed from what requires a gradient.*detach"):
        pipeline.step(nn.Linear(2, 2)(X), Y)
    pipeline.step(inputs, Y)
    assert torch.allclose(inputs.grad, torch.autograd.grad(nn.functional.mse_loss(layer(inputs), Y), inputs)[0])


def test_a_process_of_mpirun_is_told_how_to_join_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="start it by torchrun or srun"):
        pipeline_of(nn.Linear(2, 2))


def test_a_state_with_names_of_no_layer_is_refused_as_torch_does() -> None:
    pipeline = pipeline_of(nn.Linear(2, 2))
    state = pipeline.state_dict()
    for wrong in ({"module." + name: value for name, value in state.items()}, state | {"other": Y}):
        with pytest.raises(KeyError, match="names of no layer, such as layer 0"):
            pipeline.load_state_dict(wrong)


def test_parameters_that_the_module_replaces_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipeline = Pipeline.of(model, nn.functional.mse_loss, (X[:2], Y[:2]), K=2, M=4)
    model[1] = nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match=r"the module's 1\.weight.*replaced since"):
        pipeline.step(X, Y)


def test_the_loss_is_weighted_by_what_its_mean_is_over() -> None:
    """Compares the loss and gradients of padded texts at every M with those of the whole mini-batch."""
    tokens, lengths = torch.arange(8 * 5).view(8, 5) % 7, torch.tensor([5, 1, 5, 1, 2, 1, 5, 3])
    targets = tokens.masked_fill(torch.arange(5) >= lengths[:, None], -100)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    wanted = loss(model(tokens), targets)
    wanted.backward()
    right = model[0].weight.grad
    layers = [LayerBuilder("table", lambda: model[0]), LayerBuilder("last", lambda: model[1])]
    for M in (1, 4, 8):
        count = {"weight": lambda targets: (targets != -100).sum()}
        pipeline = Pipeline.of(layers, loss, (tokens[:2], targets[:2]), K=2, M=M, **count)
        model.zero_grad()
        assert pipeline.step(tokens, targets) == pytest.approx(wanted.item(), rel=1e-6)
        assert torch.allclose(model[0].weight.grad, right, atol=1e-7)
    with pytest.warns(UserWarning, match=r"depend on M.*weight=lambda targets: \(targets != -100\)"):
        Pipeline.of(layers, loss, (tokens[:2], targets[:2]), K=2, M=8).step(tokens, targets)


class WeighsOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(2))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs * self.factor - targets).square().mean()


def test_weights_of_the_loss_have_gradients_of_steps_alone() -> None:
    torch.manual_seed(0)
    model, loss = nn.Linear(2, 2), WeighsOutputs()
    pipeline = Pipeline.of(model, loss, (X[:2], Y[:2]), K=1, M=4)
    assert loss.factor.grad is None
    pipeline.step(X, Y)
    found = loss.factor.grad
    loss.zero_grad()
    loss(model(X), Y).backward()
    assert torch.allclose(found, loss.factor.grad, atol=1e-6)


def test_a_loss_is_watched_on_the_program_s_mini_batches_whatever_the_example_holds() -> None:
    classes, loss = torch.arange(8) % 2, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0]))
    pipeline = Pipeline.of(nn.Linear(2, 2), loss, (X[:2] * 0, classes[:2] * 0), K=1, M=4)
    with pytest.warns(UserWarning, match="depend on M"):
        pipeline.step(X, classes)


class KeepsItsPenalty(nn.Linear):
    penalty: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.penalty = y.square().mean()
        return y


def test_what_forward_keeps_for_others_is_named() -> None:
    loss = nn.functional.mse_loss
    with pytest.warns(UserWarning, match=r"KeepsItsPenalty\.penalty.*Return them as further outputs"):
        Pipeline.of(KeepsItsPenalty(2, 2), loss, (X[:2], Y[:2]), K=1, M=2)
    hooked = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    hooked[1].register_forward_hook(lambda module, inputs, outputs: None)
    with pytest.warns(UserWarning, match="1 has a forward hook"):
        Pipeline.of(hooked, loss, (X[:2], Y[:2]), K=1, M=2)


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor, *, bias: Tensor, scale: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * scale + bias.sum(0))


def test_a_module_gets_its_inputs_by_name_some_the_same_for_all_micro_batches() -> None:
    torch.manual_seed(0)
    model, bias, scale = Biased(), torch.randn(5, 2), torch.rand(8, 1)
    inputs = {"x": X, "bias": bias, "scale": scale}
    pipeline = Pipeline.of(model, nn.functional.mse_loss, (inputs, Y), cells=1, micro_batches=4, shared=["bias"])
    wanted = model(**inputs)
    loss, found = pipeline.step({"scale": scale, "bias": bias, "x": X}, Y, outputs=True)
    assert loss == pytest.approx(nn.functional.mse_loss(wanted, Y).item(), rel=1e-6)
    for outputs in (torch.cat([output for (output,), _ in found]), pipeline.predict(inputs)):
        assert torch.allclose(outputs, wanted, atol=1e-6)
    with pytest.raises(ConfigurationError, match="inputs are the tensors x, bias, scale by name, but are x, scale"):
        pipeline.step({"x": X, "scale": scale}, Y)


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(2, 2) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Any]:
        first = torch.tanh(self.first(x))
        second = torch.tanh(self.second(first))
        return {"last": self.third(second), "hidden": [first, second], "size": 2, "penalty": second.square().mean()}


def of_several(outputs: dict[str, Any], targets: Tensor) -> Tensor:
    hidden = outputs["hidden"][0].square().mean() + outputs["penalty"]
    return nn.functional.mse_loss(outputs["last"], targets) + hidden / outputs["size"]


@pytest.mark.parametrize("K", [1, 2])
def test_the_loss_gets_all_that_a_module_returns(K: int) -> None:
    torch.manual_seed(0)
    model = Several()
    wanted = model(X)
    of_several(wanted, Y).backward()
    right = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    pipeline = Pipeline.of(model, of_several, (X[:2], Y[:2]), K=K, M=4)
    assert pipeline.step(X, Y) == pytest.approx(of_several(wanted, Y).item(), rel=1e-6)
    for parameter, gradient in zip(model.parameters(), right, strict=True):
        assert torch.allclose(parameter.grad, gradient, atol=1e-6)
    found = pipeline.predict(X)
    assert found["size"] == 2 and torch.allclose(found["hidden"][1], wanted["hidden"][1], atol=1e-6)


def test_the_loss_gets_an_answer_of_one_tensor_as_the_module_made_it() -> None:
    class InDict(nn.Linear):
        def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return {"logits": super().forward(x)}

    model = InDict(2, 2)
    pipeline = Pipeline.of(model, lambda found, y: (found["logits"] - y).square().mean(), (X[:2], Y[:2]), K=1, M=4)
    assert pipeline.step(X, Y) == pytest.approx(model(X)["logits"].square().mean().item(), rel=1e-6)
    assert torch.equal(pipeline.predict(X)["logits"], model(X)["logits"])


def test_two_processes_that_hold_unlike_parts_agree() -> None:
    """One has no weights of its own: as one process does, with the same bits."""
    script = Path(__file__).parents[1] / "helpers" / "two_processes.py"
    alone = succeeded(run(sys.executable, script, OMP_NUM_THREADS="1"))
    assert "unchanged True\nhome [True, True, True] True" in alone
    both = succeeded(run(*TORCHRUN, script, OMP_NUM_THREADS="1"))
    for line in alone.splitlines():
        assert both.count(line) == (1 if line.endswith("outputs 8") else 2), both
    assert both.count("refused LBFGS") == 2
    assert both.count("refused Pipeline.of: M is 2 on rank 0, but 3 on 1") == 2


def test_evaluation_mode_and_autocast_are_torch_s() -> None:
    pipeline = pipeline_of(nn.Linear(2, 2), nn.Dropout(0.5), autocast=torch.bfloat16)
    for is_random in (False, True):
        pipeline.train(is_random)
        assert (pipeline.step(X, Y) != pipeline.step(X, Y)) == is_random
    assert pipeline.forward(X, Y)[0][0][0].dtype is torch.bfloat16


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"K": "2"}, 'K="2": should be a valid integer'),
    ({"schedule": "GPipe"}, "schedule=GPipe: should be 'gpipe'"),
    ({"device": "gpu"}, "device=gpu: should be 'auto', 'cpu' or 'cuda'"),
    ({"autocast": "bf16"}, "autocast='bf16': only None, torch.bfloat16 or torch.float16"),
    ({"group": 5}, r"group=5\): torch.distributed.new_group\(ranks\) makes a group"),
    ({"layers": [nn.Linear(2, 2)]}, r"layers are a module, or a list of LayerBuilder\(name, build\)"),
    ({"layers": [LayerBuilder("a", nn.Linear(2, 2))]}, "build makes the module when it is called"),
    ({"layers": [LayerBuilder("a", lambda: nn.Linear)]}, r"layer 'a': build\(\) makes a type, not a module"),
    ({"loss": None}, "loss is a function, with weight= or not, or a task"),
    ({"cells": 2}, "give K=, or cells= for the same, one of them"),
    ({"example": ({"input": X}, Y), "shared": ("input",)}, "some, not all, of the names of inputs"),
    ({"seed": 1.5}, "seed=1.5: should be a valid integer"),
    ({"example": (X, Y[:1])}, r"inputs\[0\] 8, targets\[0\] 1"),
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
    tuned = [load_file(folder / "tuned" / "model.safetensors") for folder in (tmp_path, tmp_path / "two")]
    assert all(torch.equal(value, tuned[1][name]) for name, value in tuned[0].items())
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", alone)]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.3


# -- calls that fail -------------------------------------------------------------------------------------------------


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
    """Each case is a pipeline of its own in processes that have a group; the last runs in a part of it, one process."""
    said = succeeded(run(*TORCHRUN, failing_loop.__file__))
    cases = re.findall(r"^rank (\d), (\w+), ([\w ]+): True, 2 caught, (.*)$", said, re.MULTILINE)
    assert len(cases) == 2 * 2 * (len(PLACES) + 2), said
    for rank, _, place, text in cases:
        failed_here = rank == ("1" if place[0] == "b" else "0")
        assert failed_here or f"rank {1 - int(rank)} has failed, and all is as before this call" in text
    alone = {*re.findall(r"^rank \d, alone: \d+$", said, re.MULTILINE)}
    assert alone == {"rank 0, alone: 23", "rank 1, alone: 0"}, said


# -- a loop of one's own ---------------------------------------------------------------------------------------------


EXAMPLES = Path(__file__).parents[2] / "examples"
SAME = (
    *("model=custom", "model._target_=own_loop.layers", "data._target_=own_loop_data.Data"),
    *("task._target_=torch.nn.functional.cross_entropy", "optimizer._target_=torch.optim.AdamW", "optimizer.lr=0.005"),
    *("lr_schedule=constant", "trainer.gradient_clip=null", "trainer.steps=8", "trainer.evaluate_every=null"),
    *("pipeline.K=2", "pipeline.workers=1", "pipeline.M=4", "pipeline.schedule=1f1b", "pipeline.remat=always"),
    *("pipeline.threads=1", "seed=0"),
)


def test_a_loop_of_one_s_own_has_the_losses_of_gpipe_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = succeeded(run(*TORCHRUN, EXAMPLES / "own_loop.py", OMP_NUM_THREADS="1"))
    assert re.search(r"^\d+ of 128 are right$", said, re.MULTILINE)
    monkeypatch.syspath_prepend(EXAMPLES)
    train_inline(tmp_path, *SAME)
    assert [float(loss) for loss in re.findall(r"loss (\S+)", said)] == losses_of(tmp_path)
    assert len(losses_of(tmp_path)) == 8


def test_an_input_that_is_changed_in_place_in_some_micro_batches_is_refused() -> None:
    class Sometimes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2) if x.max() > 0 else 1 * x

    said = "micro-batch 2: a layer changes its input in place, use inplace=False"
    for K in (1, 2):
        pipeline = pipeline_of(nn.Identity(), Sometimes(), K=K, remat="always")
        with pytest.raises(ConfigurationError, match=said):
            pipeline.step(X.clone(), Y)


def test_a_hook_that_a_layer_puts_on_its_input_runs_once() -> None:
    class Doubles(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                x.register_hook(lambda gradient: 2 * gradient)
            return super().forward(x)

    layers, found = [Doubles(2, 2), Doubles(2, 2)], []
    for remat in ("never", "always"):
        pipeline = pipeline_of(*layers, K=2, remat=remat)
        pipeline.zero_grad()
        pipeline.step(X, Y)
        found.append(torch.cat([p.grad.flatten() for p in pipeline.parameters() if p.grad is not None]))
    assert torch.equal(*found)


class Widens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double() if x[0, 0] > 1 else x


@pytest.mark.parametrize("K", [1, 2])
def test_what_a_message_could_not_follow_is_refused_by_name_at_every_k(K: int) -> None:
    pipeline = pipeline_of(Widens(), nn.Identity(), K=K)
    said = r"layer 'layer 0', micro-batch \d: it passes on float64\[2, 2\], where .* before"
    with pytest.raises(LayerFailed, match=said):
        pipeline.step(X * torch.arange(8)[:, None], Y)
