"""Tests groups of parameters by name and shape: what an entry selects, sets, freezes, and what is refused."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from composed import checked
from inline_run import train_inline
from torch import nn

from gpipe_cli.checkpoint.files import read_manifest, step_directory
from gpipe_cli.checkpoint.layer_state import load_layer
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.factory.build import build_optimizer
from gpipe_cli.factory.groups import Groups, is_hidden
from gpipe_cli.layers import LayerBuilder

TINY = ("debug=tiny", "task.generation=null", "pipeline.K=2", "pipeline.workers=1", "trainer.evaluate_every=null")


def section(*entries: dict[str, Any], target: str = "torch.optim.AdamW", **keys: Any) -> dict[str, Any]:
    return {"_target_": target, "lr": 0.5, **keys, "groups": list(entries)}


def test_all_entries_that_select_a_parameter_apply_and_later_ones_win() -> None:
    groups = Groups(
        section(
            {"match": ["layer.?.weight", "head.*"], "lr_factor": 0.5},
            {"only": "vectors", "weight_decay": 0},
            {"match": "head.*", "lr_factor": 4, "betas": [0.5, 0.5]},
        )
    )
    shapes = {"layer.1.weight": [2, 2], "head.bias": [2], "x": [2, 2]}
    found = {name: groups.settings(groups.key(name, shape)) for name, shape in shapes.items()}
    assert found["layer.1.weight"] == {"lr": 0.25}
    assert found["head.bias"] == {"lr": 2.0, "weight_decay": 0, "betas": [0.5, 0.5]}
    assert found["x"] == {}


TABLES = ("wte.weight", "model.embed_tokens.weight", "lm_head.weight", "fc.weight", "softmax.weight")
TABLES += ("source_embedding.weight", "heads.head.weight", "embeddings.position_embeddings.weight")


@pytest.mark.parametrize(
    ("name", "shape", "hidden"),
    [
        ("decoder.0.attention.output.weight", [384, 128], True),
        ("transformer.h.0.attn.c_attn.weight", [384, 128], True),
        ("model.layers.1.mlp.down_proj.weight", [2048, 5632], True),
        ("encoder.layers.encoder_layer_0.mlp.0.weight", [3072, 768], True),
        *((name, [512, 64], False) for name in TABLES),
        ("tied.weight", [32000, 512], False),  # a table, by its shape
        ("norm.weight", [64], False),
        ("conv1.weight", [64, 3, 7, 7], False),
    ],
)
def test_hidden_matrices_are_known_by_name_and_shape(name: str, shape: list[int], hidden: bool) -> None:
    assert is_hidden(name, shape) is hidden


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"weight_dcay": 0}, r"no key optimizer\.groups\[0\]\.weight_dcay; did you mean .*weight_decay"),
        ({"muon": True, "lr_factor": 2, "nesterov": True}, r"no key optimizer\.groups\[0\]\.nesterov"),
    ],
)
def test_a_key_that_the_optimizer_does_not_take_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build_optimizer(section({"match": "*.bias", **keys}), {})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{lr_factor: 2}", r"groups\[0\].*give match or only"),
        ("{match: 3}", r"groups\[0\]\.match=3: should be a valid string or a valid list"),
        ("{only: biases}", r"groups\[0\]\.only=biases: should be 'vectors', 'matrices' or 'hidden'"),
        ("{match: a, weight_decay: -1}", r"groups\[0\]\.weight_decay=-1: should be greater"),
    ],
)
def test_a_wrong_entry_is_refused_by_the_command(entry: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        checked("optimizer=adamw", f"optimizer.groups=[{entry}]")


def test_an_entry_that_selects_nothing_is_refused_and_the_others_are_told() -> None:
    layers = [LayerBuilder(f"layer.{n}", partial(nn.Linear, 3, 4)) for n in range(2)]
    line = Groups(section({"match": "*.1.*", "lr_factor": 2})).told(layers)
    assert line.endswith("2 parameters (16 weights) as `optimizer` says; 2 parameters (16 weights) {lr_factor:2}")
    said = r"groups\[1\].*match:.layer.2.* selects no parameter.*layer\.0\.weight"
    with pytest.raises(ConfigurationError, match=said):
        Groups(section({"only": "vectors"}, {"match": ["layer.1.*", "layer.2.*"], "lr_factor": 2})).told(layers)


def test_frozen_parts_keep_their_weights_and_a_tied_table_is_frozen_by_its_owner(tmp_path: Path) -> None:
    words = (*TINY, "model=transformer", "model.tie_embeddings=true", "optimizer.lr=1", "trainer.average=null")
    groups = "optimizer.groups=[{match: [target_embedding.*, softmax.weight, encoder.*], frozen: true}]"
    train_inline(tmp_path / "run", *words, groups, "trainer.steps=2", "checkpoint.every=1")
    first, last = (read_manifest(step_directory(tmp_path / "run", step)) for step in (1, 2))
    assert load_layer(last, "target_embedding").optimizer == {}
    for name in first.layers:
        before, after = load_layer(first, name).weights, load_layer(last, name).weights
        frozen = name == "target_embedding" or name.startswith("encoder.")
        assert all(before[key].equal(after[key]) == (frozen or key in last.layers[name].tied) for key in before), name
