"""Tests the YAML files, the dataclasses that judge them, and the page of gpipe-train --help that lists them."""

import re
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own
from composed import checked, composed
from hydra.utils import get_object
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError
from pydantic import TypeAdapter
from refusals import refusal_of

from gpipe_cli.commands import train
from gpipe_cli.config import FREE_FORM, TYPED, Settings, known_keys
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.typed_section import RULES, shown

CONF = Path(__file__).parents[2] / "conf"
OTHERS = ("hydra", "__pycache__")
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name not in OTHERS)
OPTIONS = sorted(f"{path.parent.name}={path.stem}" for group in GROUPS for path in (CONF / group).glob("*.yaml"))
OPTIONS = [option for option in OPTIONS if not option.endswith("=custom")]
EXPERIMENTS = sorted(f"{path.parent.name}/{path.stem}" for path in (CONF / "experiment").glob("*/*.yaml"))

COMPLETE = [f"task={name}" for name in ("classification", "language_model", "own_loss", "translation")]
COMPLETE += ["model=transformer", "model=transformer_lm"]  # they show every key of what they name
MODELS = ["model=transformer", "model=amoebanet", "model=transformer_lm", "model._target_=my_module.layers"]


def refusal(*overrides: str) -> str:
    return refusal_of(Settings.from_config, composed(*overrides))


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes_and_passes_with_one_of_the_models(option: str) -> None:
    for model in [[model] for model in MODELS] if option.startswith(("data=", "task=")) else [[]]:
        with suppress(InterpolationKeyError, ConfigurationError):
            classes = ["data.classes=5"] if option == "data=image_folder" else []
            Settings.from_config(composed(*model, option, *classes))
            return
    raise AssertionError(f"{option} fits none of {MODELS}")


@pytest.mark.parametrize("option", [option for option in OPTIONS if option.partition("=")[0] in FREE_FORM])
def test_every_key_of_a_shipped_target_is_its_own_and_has_a_type(option: str) -> None:
    section, _, name = option.partition("=")
    keys = yaml.safe_load((CONF / section / f"{name}.yaml").read_text())
    keys = keys["model"] if section == "model" else keys
    if str(keys.get("_target_")).startswith("gpipe_cli."):
        named = signature(get_object(keys["_target_"]), eval_str=True).parameters
        shown = {*keys} - {"_target_", "defaults", "groups"}
        assert shown == {*named} if option in COMPLETE else shown <= {*named}
        for one in named.values():
            TypeAdapter(one.annotation, config=RULES)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_is_family_and_name_and_debug_tiny_shrinks_it(experiment: str) -> None:
    config = composed(f"experiment={experiment}", "debug=tiny")
    Settings.from_config(config)
    assert (config["name"], config["trainer"]["steps"]) == (experiment.replace("/", "_"), 4)


@pytest.mark.parametrize("option", [option for option in OPTIONS if option.startswith("data=")])
def test_debug_tiny_shrinks_every_data_set(option: str) -> None:
    """Its files are optional for data of one's own, so that Hydra says nothing where one is not found."""
    data = composed("model=module", option, "++data.classes=5", "debug=tiny")["data"]
    assert data["batch_size"] == 16
    assert data.get("workers", 1) == 1 and (data.get("image_size", 67) == 67 or option == "data=digits")


def test_the_classes_of_an_image_folder_are_its_folders(tmp_path: Path) -> None:
    for name in ("train/cat", "train/dog", "train/emu", "train/.cache", "val/cat"):
        (tmp_path / name).mkdir(parents=True)
    images = composed("model=amoebanet", "data=image_folder", f"data.root={tmp_path}")
    assert images["data"]["classes"] == images["model"]["classes"] == 3


def test_of_a_folder_of_data_only_the_root_is_looked_for_before_workers_start(tmp_path: Path) -> None:
    """Leaves the folders below the root to the data source, in the workers."""
    words = ["model=amoebanet", "data=imagenet", "debug=tiny"]
    checked(*words, f"data.root={tmp_path}", trains=True)
    with pytest.raises(ConfigurationError, match=f"there is no {tmp_path}/none"):
        checked(*words, f"data.root={tmp_path}/none", trains=True)


def test_every_key_of_a_typed_section_has_a_value_in_yaml() -> None:
    config = composed()
    known = {key for key in known_keys() if "." in key} - {"pipeline.auto"}  # the names of keys that are auto
    assert known == {f"{name}.{key}" for name in TYPED for key in config[name]}


MAIN = {"model._target_": "gpipe_cli.models.transformer.transformer", "pipeline.K": 4, "trainer.average": 0.98}
SCHEDULES, TEXT = "gpipe_cli.optim.lr_schedules", "gpipe_cli.data.cldr.source.TextSource"
OWN = {"trainer.average": None, "name": "my_module.layers", "lr_schedule._target_": f"{SCHEDULES}.constant"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {**MAIN, "lr_schedule._target_": f"{SCHEDULES}.inverse_sqrt"}),
        ("model=transformer_lm", {"data._target_": TEXT, "trainer.average": None}),
        ("data=cldr model=transformer_lm", {"data._target_": "gpipe_cli.data.cldr.source.TranslationSource"}),
        ("model=transformer_lm_small lr_schedule=step", {"lr_schedule.gamma": 0.5}),
        ("debug=tiny model.L=4 trainer.steps=9", {"model.L": 4, "trainer.steps": 9}),
        ("trainer.average=null", {"trainer.average": None}),
        ("model=amoebanet trainer.steps=2", {"lr_schedule._target_": f"{SCHEDULES}.cosine", "lr_schedule.steps": 2}),
        ("model=amoebanet optimizer=sgd", {"optimizer._target_": "torch.optim.SGD"}),
        ("model._target_=my_module.layers", {**OWN, "lr_schedule.warmup_steps": 0}),
        ("model._target_=my_module.layers lr_schedule.warmup_steps=20", {**OWN, "lr_schedule.warmup_steps": 20}),
        ("model._target_=my_module.layers name=mine trainer.average=0.5", {"name": "mine", "trainer.average": 0.5}),
        ("model=module model.module._target_=my.make", {"lr_schedule._target_": f"{SCHEDULES}.cosine"}),
    ],
)
def test_a_choice_brings_what_suits_it_and_what_is_typed_wins(words: str, expected: dict[str, Any]) -> None:
    config = OmegaConf.create(composed(*words.split()))
    assert {key: OmegaConf.select(config, key) for key in expected} == expected


def test_a_module_may_be_typed_as_one_value() -> None:
    words = ["model=module", "model.module={_target_:my.make,size:3,config:{_target_:my.Config,depth:2}}"]
    config = composed(*words)
    module = {"_target_": "my.make", "size": 3, "config": {"_target_": "my.Config", "depth": 2}}
    assert config["model"]["module"] == {**module, "_partial_": True}
    assert (config["name"], config["trainer"]["average"]) == ("my.make", None)
    part = ["model=module", "model.module._target_=my.make", "model.module.config={_target_:my.Config,depth:2}"]
    assert composed(*part)["model"]["module"]["config"] == module["config"]


def test_the_keys_of_gpipe_verify_are_not_gpipe_train_s() -> None:
    assert "verify" not in composed()
    assert Settings.from_config(composed("verify.steps=3", of="verify")).verify.steps == 3


# -- the page of gpipe-train --help ----------------------------------------------------------------------------------


PAGE = train.__doc__


def test_it_is_short_and_has_the_defaults() -> None:
    assert len(PAGE.splitlines()) <= 48
    assert all(len(line) <= 120 for line in PAGE.splitlines())
    shown_keys = PAGE.partition("Keys (")[2].partition("Groups (")[0]
    keys = dict(re.findall(r"^    ([a-z_.KM]+) {2,}(\S+)  ", shown_keys, re.M))
    config = OmegaConf.create(composed())
    assert len(keys) > 9 and keys == {key: shown(OmegaConf.select(config, key)) for key in keys}
    assert all(key in known_keys() or key.partition(".")[0] in FREE_FORM for key in keys)


@pytest.mark.parametrize("group", GROUPS)
def test_it_names_a_group_with_every_option(group: str) -> None:
    folder, words = CONF / group, set(PAGE.replace("*", "").split())
    assert f"\n    {group} " in PAGE
    paths = list(folder.rglob("*.yaml") if group == "experiment" else folder.glob("*.yaml"))
    paths = [path for path in paths if "recipe" not in path.parts]  # a part of experiments, and no option
    assert {path.relative_to(folder).with_suffix("").as_posix() for path in paths} <= words
