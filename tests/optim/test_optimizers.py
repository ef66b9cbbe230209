"""Tests optimizers and learning-rate schedules by hand and against torch's, and that only matrices decay."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from inline_run import train_inline
from torch import Tensor, nn

from gpipe_cli.errors import ConfigurationError
from gpipe_cli.factory.build import build_lr_schedule, build_optimizer
from gpipe_cli.factory.groups import Groups
from gpipe_cli.optim import lr_schedules
from gpipe_cli.optim.adafactor import Adafactor
from gpipe_cli.optim.optimizers import TFRMSprop

CONF = Path(__file__).parents[2] / "conf"
ON_ANOTHER = ("custom", "muon_tables")  # without a _target_ of their own
OPTIMIZERS = sorted(path.stem for path in (CONF / "optimizer").glob("*.yaml") if path.stem not in ON_ANOTHER)


def weight(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


# lr 0.5, then 0.25 in the third step; decay 0.75, momentum 0.5, eps 0.75. With g = 2, 1, 0 the mean square, from 1, is
#     s = 0.75·1 + 0.25·4 = 1.75        √(s + eps) = √2.5      = 1.5811388300841898
#     s = 0.75·1.75 + 0.25·1 = 1.5625   √(s + eps) = √2.3125   = 1.5206906325745548
#     s = 0.75·1.5625 = 1.171875        √(s + eps) = √1.921875 = 1.3863170633011771
# and the momentum, which has the learning rate inside, so that the third step's does not shrink what is remembered:
#     m = 0.5·2 / 1.5811388300841898                             = 0.6324555320336759
#     m = 0.5·0.6324555320336759 + 0.5·1 / 1.5206906325745548    = 0.3162277660168379 + 0.3287979746107145
#     m = 0.5·0.6450257406275525 + 0.25·0 / 1.3863170633011771   = 0.3225128703137762
HAND = [  # gradient, lr, weight after the step, mean square, momentum; the weight begins at 3
    (2.0, 0.5, 2.3675444679663241, 1.75, 0.6324555320336759),
    (1.0, 0.5, 1.7225187273387717, 1.5625, 0.6450257406275525),
    (0.0, 0.25, 1.4000058570249954, 1.171875, 0.3225128703137762),
]


def test_rmsprop_is_tensorflows() -> None:
    parameter = weight(3.0)
    optimizer = TFRMSprop([parameter], lr=0.5, decay=0.75, momentum=0.5, eps=0.75)
    for gradient, lr, *expected in HAND:
        optimizer.param_groups[0]["lr"] = lr
        parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
        state = optimizer.state[parameter]
        found = [parameter.item(), state["mean_square"].item(), state["momentum_buffer"].item()]
        assert found == pytest.approx(expected, rel=1e-14)


# -- groups ----------------------------------------------------------------------------------------------------------


def section(name: str, **keys: object) -> dict[str, object]:
    return {**yaml.safe_load((CONF / "optimizer" / f"{name}.yaml").read_text()), **keys}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("shapes", [[(2, 3), (3,)], []], ids=["both", "nothing"])
def test_every_optimizer_takes_groups_the_same_ones_on_every_worker(name: str, shapes: list[tuple[int, ...]]) -> None:
    words = section(name, lr=0.5, groups=[{"only": "vectors", "weight_decay": 0.25, "lr_factor": 3}])
    groups = Groups(words)
    vectors, matrices = groups.key("b", [3]), groups.key("embedding", [2, 3])
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    members = {matrices: parameters[:1], vectors: parameters[1:]}
    optimizer = build_optimizer(words, members)
    schedule = build_lr_schedule({"_target_": "gpipe_cli.optim.lr_schedules.constant"}, optimizer)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    schedule.step()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [words["weight_decay"], 0.25]
    assert schedule.get_last_lr() == [0.5, 1.5]
    assert all((parameter != 1).all() for parameter in parameters)


# -- Adafactor -------------------------------------------------------------------------------------------------------


def step(optimizer: Adafactor, parameter: nn.Parameter, gradient: list[object]) -> None:
    parameter.grad = torch.tensor(gradient, dtype=torch.float64)
    optimizer.step()


# A vector, beta1 0.5, beta2 0.75, no eps, clip 1, lr 0.5, then 0.25; w begins at (1, 1).
# t = 1, g = (3, 4): V = 0.25·(9, 16) = (2.25, 4); u = (3/1.5, 4/2) = (2, 2), rms 2, clipped (1, 1);
#     m = 0.5·0.5·(1, 1) = (0.25, 0.25)
# t = 2, g = (0, 2): V = 0.75·(2.25, 4) + 0.25·(0, 4) = (1.6875, 4); u = (0, 1), rms √½, not clipped;
#     m = 0.5·(0.25, 0.25) + 0.5·0.25·(0, 1) = (0.125, 0.25)
def test_a_vector_by_hand() -> None:
    parameter = weight(1.0, 1.0)
    optimizer = Adafactor([parameter], lr=0.5, beta1=0.5, beta2=0.75, eps=0.0)
    step(optimizer, parameter, [3.0, 4.0])
    assert parameter.tolist() == pytest.approx([0.75, 0.75], rel=1e-14)
    optimizer.param_groups[0]["lr"] = 0.25
    step(optimizer, parameter, [0.0, 2.0])
    assert parameter.tolist() == pytest.approx([0.625, 0.5], rel=1e-14)


# Their squares are eps = 1e-30 alone, and the product of two of those is 0 in float32.
@pytest.mark.parametrize("gradient", [[[0.0, 0.0], [0.0, 0.0]], [[2.0, 0.0], [0.0, 0.0]]], ids=["all", "row, column"])
def test_zeros_in_the_first_gradient_of_a_matrix_move_nothing(gradient: list[list[float]]) -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.tensor(gradient)
    Adafactor([parameter], lr=0.5, beta1=0.0).step()
    assert parameter[parameter.grad == 0].tolist() == pytest.approx([1.0] * int((parameter.grad == 0).sum()), abs=0)
    assert bool(parameter.isfinite().all())


def test_the_squares_decay_as_one_minus_t_to_the_minus_exponent() -> None:
    parameter = weight(0.0)
    optimizer = Adafactor([parameter], lr=1.0, beta1=0.0, decay_exponent=0.5, eps=0.0, clip=None)
    for gradient in (1.0, 1.0, 1.0, 3.0):  # 1 − 4^−0.5 = ½: V = ½·1 + ½·9 = 5
        step(optimizer, parameter, [gradient])
    assert parameter.item() == pytest.approx(-3 - 3 / math.sqrt(5), rel=1e-14)


def test_without_momentum_it_is_torchs() -> None:
    """There updates are scaled by the parameter, and lr counts while it is below 1/√t."""
    torch.manual_seed(0)
    values: list[Tensor] = [torch.randn(3, 4, 5, dtype=torch.float64), torch.randn(6, dtype=torch.float64)]
    ours, theirs = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    own = Adafactor(ours, lr=0.01, beta1=0.0, eps=0.0, parameter_scale=True, weight_decay=0.1)
    reference = torch.optim.Adafactor(theirs, lr=0.01, eps=(None, 1e-3), weight_decay=0.1)
    for _ in range(5):
        for left, right in zip(ours, theirs, strict=True):
            left.grad = torch.randn_like(left)
            right.grad = left.grad.clone()
        own.step()
        reference.step()
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=0.0)


# -- learning-rate schedules -----------------------------------------------------------------------------------------


STAIRS = {"rate": 0.5, "decay_every": 2.5, "warmup_steps": 2, "floor": 0.2}  # they end after steps 2.5, 5, 7.5
EPOCHS = {"rate": 0.5, "decay_epochs": 2.0, "warmup_epochs": 1.6, "floor": 0.0, "examples": 10, "batch_size": 8}
RATES: list[tuple[str, dict[str, float], list[float]]] = [
    ("inverse_sqrt", {"warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, (4 / 5) ** 0.5, (4 / 6) ** 0.5]),
    (
        "transformer",
        {"d_model": 16, "factor": 3.0, "warmup_steps": 4},
        [3 * 0.25 * min((t + 1) ** -0.5, (t + 1) / 8) for t in range(6)],
    ),
    ("cosine", {"steps": 4, "warmup_steps": 2, "final": 0.5}, [0.5, 1.0, 1.0, 0.75, 0.5, 0.5]),  # stays at `final`
    ("cosine", {"steps": 4, "warmup_steps": 50}, [0.5, 1.0, 1.0, 0.5]),  # rises for half of its steps
    ("constant", {"warmup_steps": 2}, [0.5, 1.0, 1.0, 1.0]),
    ("constant", {}, [1.0, 1.0]),
    ("exponential", STAIRS, [0.5, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.25, 0.2]),
    ("exponential_epochs", EPOCHS, [0.5, 1.0, 1.0, 0.5, 0.5, 0.25]),  # of 1.25 steps each
]


@pytest.mark.parametrize(("name", "keys", "expected"), RATES, ids=str)
def test_a_schedule_rises_and_falls_as_its_formula_says(name: str, keys: Any, expected: list[float]) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = getattr(lr_schedules, name)(optimizer, **keys)
    used = []
    for _ in expected:
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert used == pytest.approx(expected)


def test_an_optimizer_that_draws_random_numbers_is_refused(tmp_path: Path) -> None:
    words = (
        "debug=tiny",
        "model=amoebanet",
        "model.L=3",
        "optimizer=custom",
        "optimizer._target_=noisy_model.Langevin",
        "optimizer.lr=0.01",
        "trainer.steps=1",
    )
    with pytest.raises(ConfigurationError, match=r"draws random numbers in its step \(aten.*depend on pipeline.K"):
        train_inline(tmp_path, *words, "lr_schedule=constant", "pipeline.workers=1")
