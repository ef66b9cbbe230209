"""Tests a new run that begins with weights of another run, or made elsewhere: by name, from a file or a folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from checkpoint_tools import saved
from composed import checked
from inline_run import train_inline
from own_model import DIGITS
from refusals import refusal_of
from run_files import rows
from safetensors.torch import save_file
from tiny_images import CLASSES, image_folder
from torch import Tensor, nn

from gpipe_cli.checkpoint.files import CheckpointError, read_manifest, step_directory
from gpipe_cli.checkpoint.foreign import match_names, open_foreign, weight_files
from gpipe_cli.checkpoint.layer_state import export_state_dict
from gpipe_cli.commands.train import main
from gpipe_cli.jobs.beginning import with_checkpoint
from gpipe_cli.models.transformer_lm import transformer_lm

LM = ["debug=tiny", "model=transformer_lm", "model.L=1", "data.largest=60", "data.smallest=20", "data.languages=[de]"]
LM += ["data.vocabulary=200", "trainer.steps=1", "optimizer.lr=0", "trainer.evaluate_every=null"]
LM += ["trainer.evaluate_first=false", "data.evaluation_per_language=1"]
SIZES: dict[str, Any] = {"L": 1, "H": 64, "A": 1, "vocabulary": 200, "d_model": 32}


def weights(seed: int = 3) -> dict[str, Tensor]:
    """Returns weights as another tool would have made them."""
    torch.manual_seed(seed)
    held = {builder.name: builder.build().state_dict() for builder in transformer_lm(**SIZES)}
    return {f"{layer}.{name}": torch.randn_like(p) for layer, of in held.items() for name, p in of.items()}


def begun(tmp_path: Path, origin: Path, *words: str) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the weights of a run that began with ``origin`` and learned nothing, and what it said."""
    run = tmp_path / f"run{len(list(tmp_path.glob('run*')))}"
    _, events = train_inline(run, *LM, f"checkpoint.init_from={origin}", *words)
    texts = [str(event["text"]) for event in events if event.get("kind") in ("message", "warning")]
    return export_state_dict(read_manifest(step_directory(run, 1))), texts


def one_file(path: Path, tensors: dict[str, Tensor]) -> Path:
    save_file(tensors, path / "model.safetensors")
    return path / "model.safetensors"


def torch_file(path: Path, tensors: dict[str, Tensor]) -> Path:
    torch.save({"state_dict": tensors, "epoch": 3}, path / "weights.pt")
    return path / "weights.pt"


def folder(path: Path, tensors: dict[str, Tensor]) -> Path:
    """Writes two files and an index, as the transformers library does."""
    parts = {"model-1-of-2.safetensors": list(tensors)[::2], "model-2-of-2.safetensors": list(tensors)[1::2]}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, path / file)
    places = {name: file for file, names in parts.items() for name in names}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


@pytest.mark.parametrize("write", [one_file, torch_file, folder], ids=lambda write: write.__name__)
def test_every_form_of_weights_is_read(write: Callable[[Path, dict[str, Tensor]], Path], tmp_path: Path) -> None:
    wanted = weights()
    place = tmp_path / "weights"
    place.mkdir()
    saved = open_foreign(write(place, wanted), pytest.fail)
    assert {name: tensor.shape for name, tensor in saved.items()} == {n: tuple(t.shape) for n, t in wanted.items()}
    assert all(torch.equal(saved[name].read(), tensor) for name, tensor in wanted.items())


def test_a_run_begins_with_them_whatever_its_cells(tmp_path: Path) -> None:
    wanted = weights()
    halves = {f"model.{name}": tensor.bfloat16() for name, tensor in wanted.items()}
    held, said = begun(tmp_path, one_file(tmp_path, wanted), "pipeline.K=3")
    assert held.keys() == wanted.keys() and all(torch.equal(held[name], wanted[name]) for name in wanted)
    held, said = begun(tmp_path, one_file(tmp_path, halves), "checkpoint.init_except=[softmax,hed]")
    assert all(torch.equal(held[n], wanted[n].bfloat16().float()) for n in wanted if not n.startswith("softmax"))
    assert not torch.equal(held["softmax.weight"], wanted["softmax.weight"].bfloat16().float())
    change = "; bfloat16 to float32; begun anew: softmax.weight, softmax.bias"
    assert any(change in one for one in said)
    assert any("init_except: hed is no layer" in one for one in said)


def test_what_does_not_fit_is_listed_before_any_step(tmp_path: Path) -> None:
    wrong = weights()
    wrong["embedding.weight"] = torch.zeros(7, 32)
    wrong |= {f"decoder.{number}.rotary": torch.zeros(1) for number in (0, 1)}
    del wrong["softmax.bias"]
    said = refusal_of(begun, tmp_path, one_file(tmp_path, wrong), error=CheckpointError).split("\n")
    assert said[1] == "1 names of this model are not in it: softmax.bias"
    assert said[2] == "2 of its names are not in this model: decoder.0.rotary, decoder.1.rotary"
    assert said[3] == "1 have other shapes: embedding.weight is [7, 32], this model's [200, 32]"
    advice = "checkpoint.init_except=[softmax.bias,decoder.*.rotary,embedding.weight]"
    assert advice in said[4]
    begun(tmp_path, tmp_path / "model.safetensors", advice)


def test_one_name_of_a_tied_parameter_is_enough(tmp_path: Path) -> None:
    wanted = weights()
    del wanted["softmax.weight"]
    held, _ = begun(tmp_path, one_file(tmp_path, wanted), "model.tie_embeddings=true", "pipeline.K=3")
    assert torch.equal(held["embedding.weight"], wanted["embedding.weight"])
    untied = one_file(tmp_path, weights())
    said = refusal_of(begun, tmp_path, untied, "model.tie_embeddings=true", error=CheckpointError)
    assert "other values for embedding.weight than for softmax.weight" in said
    wanted["softmax.weight"] = wanted.pop("embedding.weight")
    held, _ = begun(tmp_path, one_file(tmp_path, wanted), "model.tie_embeddings=true", "pipeline.K=3")
    assert torch.equal(held["embedding.weight"], wanted["softmax.weight"])


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("code of a file has run",))


def test_no_file_runs_code_and_each_fault_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"weight": Evil()}, tmp_path / "evil.pt")
    (tmp_path / "torn.safetensors").write_bytes(b"\x10" + b"\0" * 20)
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "notes.txt").write_text("words")
    for name, message in {
        "evil.pt": "could run code",
        "torn.safetensors": "is no safetensors file",
        "list.pt": "is no state_dict",
        "notes.txt": "holds no weights by its name",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            open_foreign(tmp_path / name, print)
    assert "has run" not in capsys.readouterr().out
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(CheckpointError, match="is missing"):
        weight_files(tmp_path)
    assert not weight_files(tmp_path / "nowhere")
    (tmp_path / "checkpoints").mkdir()
    assert not weight_files(tmp_path)  # a run whose weights were exported into its directory


NAMED = ["h.0.{}", "module._orig_mod.transformer.h.0.{}", "_orig_mod.module.h.0._orig_mod.{}"]
NAMED += ["model.module.h.0.{}", "h.0._checkpoint_wrapped_module.{}"]


@pytest.mark.parametrize("named", NAMED)
def test_first_parts_and_wrappers_of_names_do_not_matter(named: str, tmp_path: Path) -> None:
    names = {"transformer.h.0.weight": named.format("weight"), "head.weight": "head.weight"}
    saved = open_foreign(one_file(tmp_path, {name: torch.zeros(2) for name in names.values()}), print)
    assert match_names({name: [2] for name in names}, saved, [], [], tmp_path) == names


def test_a_file_that_holds_the_model_twice_is_refused_by_both_names(tmp_path: Path) -> None:
    both = {f"{part}.{name}": torch.zeros(2) for part in ("model", "ema_model") for name in ("a.weight", "b.weight")}
    saved = open_foreign(one_file(tmp_path, both), print)
    with pytest.raises(CheckpointError, match=r"more than once, as ema_model\.a\.weight and model\.a\.weight"):
        match_names({"a.weight": [2], "b.weight": [2]}, saved, [], [], tmp_path)


def test_a_single_file_is_taken_before_an_index_that_an_earlier_save_has_left(tmp_path: Path) -> None:
    folder(tmp_path, weights(1))
    later = one_file(tmp_path, weights(2))
    assert weight_files(tmp_path) == [later]


def test_averaged_weights_beside_those_that_are_used_are_named(tmp_path: Path) -> None:
    said, deep = list[str](), list[str]()
    of_both = {"model": weights(1), "model_ema": weights(2), "optimizer": {"state": {}, "param_groups": []}, "step": 3}
    torch.save(of_both, tmp_path / "both.pt")
    saved = open_foreign(tmp_path / "both.pt", said.append)
    assert torch.equal(saved["softmax.bias"].read(), weights(1)["softmax.bias"])
    optimizer = {"state": {0: {"step": torch.ones(1)}}}
    torch.save({"net": weights(1), "ema": {"module": weights(2)}, "optimizer": optimizer}, tmp_path / "deep.pt")
    open_foreign(tmp_path / "deep.pt", deep.append)
    assert len(deep) == 1 and "under net, which are used, and under ema.module, which are not" in deep[0]
    torch.save({"student": weights(1), "teacher": weights(2)}, tmp_path / "two.pt")
    with pytest.raises(CheckpointError, match="save one of student, teacher alone"):
        open_foreign(tmp_path / "two.pt", print)
    assert len(said) == 1 and "weights under model, which are used, and under model_ema, which are not" in said[0]


def of_16_bits(dtype: str = "bfloat16") -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 10)).to(getattr(torch, dtype))


@pytest.mark.parametrize("typed", [[], ["model.module.dtype=bfloat16"]])
def test_weights_of_16_bits_learn_in_float32_unless_their_type_is_typed(typed: list[str], tmp_path: Path) -> None:
    words = ["model=module", "model.module._target_=test_foreign.of_16_bits", *DIGITS, "trainer.steps=1", *typed]
    _, events = train_inline(tmp_path, *words, "trainer.evaluate_every=null", "pipeline.K=1")
    held = export_state_dict(read_manifest(step_directory(tmp_path, 1)))
    assert {tensor.dtype for tensor in held.values()} == {torch.bfloat16 if typed else torch.float32}
    assert any("were bfloat16 and learn in float32" in event.get("text", "") for event in events) != bool(typed)


# -- another run: the paper's transfer, end to end on tiny images ----------------------------------------------------


def test_other_keys_of_the_model_that_change_what_the_same_weights_mean_are_told(tmp_path: Path) -> None:
    train_inline(tmp_path / "origin", *LM)
    for word, told in (("model.dropout=0.3", False), ("model.positions=rotary", True)):
        _, texts = begun(tmp_path, step_directory(tmp_path / "origin", 1), word)
        assert any("(model.positions: sinusoids there, rotary here)" in text for text in texts) == told
        assert any("other keys of the model" in text for text in texts) == told


TINY = ["debug=tiny", "model=amoebanet", "model.L=3", "checkpoint.every=null", "trainer.evaluate_every=null"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains the run that others begin with: two steps on ten classes, with averaged weights."""
    run_dir = tmp_path_factory.mktemp("digits") / "run"
    train_inline(run_dir, *TINY, "trainer.steps=2", "trainer.average=0.9")
    return run_dir


@pytest.fixture
def birds(tmp_path: Path) -> list[str]:
    """Returns the overrides for data of three other classes."""
    image_folder(tmp_path / "birds")
    return ["data=image_folder", f"data.root={tmp_path / 'birds'}", f"data.classes={CLASSES}", "data.batch_size=8"]


def begun_with(run_dir: Path, origin: Path, *words: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Trains with learning rate 0, so that the weights stay those that the run began with."""
    still = ["trainer.steps=1", "optimizer.lr=0", "model.batchnorm_decay=0.999999"]
    return train_inline(run_dir, *TINY, *still, f"checkpoint.init_from={step_directory(origin, 2)}", *words)


def weights_of(run_dir: Path, step: int, kind: str = "weight") -> dict[str, Tensor]:
    return {name.replace(f"{kind}:", ""): value for name, value in saved(run_dir, step).items() if f"/{kind}:" in name}


@pytest.mark.slow
def test_all_but_the_classifier_comes_from_the_other_run(digits: Path, birds: list[str], tmp_path: Path) -> None:
    summary, events = begun_with(tmp_path / "run", digits, *birds, "checkpoint.init_except=[head]", "pipeline.K=3")
    before, after = weights_of(digits, 2, "average"), weights_of(tmp_path / "run", 1)
    assert after["head/classifier.weight"].shape[0] == CLASSES
    assert [name for name in after if not name.startswith("head") and not torch.equal(after[name], before[name])] == []
    assert any("begun anew: head" in event.get("text", "") for event in events)
    assert summary["steps"] == 1  # its own step 0, schedule and data


@pytest.mark.slow
def test_a_run_that_began_with_other_weights_is_resumed_by_the_same_words_and_does_not_begin_again(
    digits: Path, birds: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TINY, *birds, f"checkpoint.init_from={digits}", "checkpoint.init_except=[head]", "launch.inline=true"]
    words += ["lr_schedule.steps=2", f"hydra.run.dir={tmp_path / 'run'}"]
    for steps in (1, 2):
        assert main([*words, f"trainer.steps={steps}", "checkpoint.resume=auto"]) == 0
        assert ("weights from" in capsys.readouterr().out) == (steps == 1)
    assert [row["step"] for row in rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


def test_layers_that_begin_anew_without_weights_are_told(tmp_path: Path) -> None:
    console = Mock()
    with_checkpoint(checked("checkpoint.init_except=[head]"), tmp_path, console)
    assert "init_except has no effect: checkpoint.init_from is null" in console.warn.call_args[0][0]
