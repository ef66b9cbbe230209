"""Tests that a wrong `_target_` is refused with the true cause and its place in the user's own code."""

from dataclasses import replace
from pathlib import Path

import pytest
from composed import checked
from refusals import refusal_of

from gpipe_cli.errors import ConfigurationError
from gpipe_cli.factory.build import build_model, build_trackers, try_lr_schedule

ABSENT = "could not be imported: ModuleNotFoundError: "
MADE = "could not be made from the keys of `model`"
CASES = {  # target: the module's text, and what is said of it
    "nowhere_{n}.layers": ("", "was not found: there is no module nowhere_{n} here or on the PYTHONPATH"),
    "mine_{n}.layerz": ("", "was not found: mine_{n} has no layerz"),
    "mine_{n}.layers": ("x = 1\ndef layers(:\n", "could not be imported: SyntaxError: invalid syntax ({path}, line 2)"),
    "mine_{n}.other": ("import not_there\n", ABSENT + "No module named 'not_there' ({path}, line 1)"),
    "mine_{n}.raises": (
        "def raises(depth):\n    return inner(depth)\n\n\ndef inner(depth):\n    raise ValueError(f'{depth} is odd')\n",
        MADE + ": ValueError: 3 is odd ({path}, line 6)",
    ),
    "mine_{n}.shallow": (
        "def shallow():\n    return []\n",
        MADE + ": shallow() got an unexpected keyword argument 'depth'",
    ),
}


@pytest.mark.parametrize("number", range(len(CASES)), ids=[target.format(n=0) for target in CASES])
def test_a_wrong_target_is_refused_with_its_cause(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, (text, said) = list(CASES.items())[number]
    path, target = tmp_path / f"mine_{number}.py", target.format(n=number)
    path.write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    told = refusal_of(build_model, {"_target_": target, "depth": 3})
    assert told == f"model._target_={target} {said.format(n=number, path=path)}"


def test_what_computes_no_rate_or_tracks_nothing_is_refused() -> None:
    section = {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 0}
    with pytest.raises(ConfigurationError, match=r"lr_schedule.*StepLR .*modulo by zero"):
        try_lr_schedule(replace(checked("optimizer=sgd").settings, lr_schedule=section))
    with pytest.raises(ConfigurationError, match=r"logging\.trackers: os\.getcwd makes no tracker: no start"):
        build_trackers([{"_target_": "os.getcwd"}])


def test_a_wrong_target_inside_a_section_is_named_with_its_key() -> None:
    wrong = {"_target_": "torchvision.models.resnet99"}
    section = {"_target_": "gpipe_cli.models.traced.layers.layers", "module": wrong}
    said = r"^model\.module\._target_=torchvision\.models\.resnet99 was not found"
    with pytest.raises(ConfigurationError, match=said):
        build_model(section)
