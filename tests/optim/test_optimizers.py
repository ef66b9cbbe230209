"""Tests TensorFlow's RMSProp against numbers worked out by hand, and that only matrices decay, with every optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from gpipe_cli.factory.build import build_lr_schedule, build_optimizer
from gpipe_cli.factory.groups import Groups
from gpipe_cli.optim.optimizers import TFRMSprop

CONF = Path(__file__).parents[2] / "conf"
ON_ANOTHER = ("own", "muon_language_model")  # without a _target_ of their own
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
def test_every_optimizer_takes_groups_and_has_the_same_ones_on_every_worker(
    name: str, shapes: list[tuple[int, ...]]
) -> None:
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
