"""Tests that a traced module does what its code does, or is refused with the line and the way out."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import unusual_modules
from refusals import refusal_of
from torch import Tensor, nn

from benchmarks.traced.check import find
from benchmarks.traced.modules import Subject, from_config
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.models.traced.layers import layers
from gpipe_cli.models.traced.module import Call, Called, CallError
from gpipe_cli.models.traced.refusals import TraceError
from gpipe_cli.models.traced.trace import SizeError

OUTSIDE = nn.Linear(8, 8)
CASES = [(1, "never"), (2, "always")]


def points(examples: int) -> tuple[Tensor, ...]:
    return (torch.randn(examples, 3),)


def line_of(code: str) -> str:
    path = Path(unusual_modules.__file__)
    return f"{path}, line {1 + path.read_text(encoding='utf-8').splitlines().index(code)}"


@pytest.mark.parametrize(
    "module",
    [
        *("OwnBackward", "Recurrent", "HalfInside", "Habits", "Masked", "Pieces", "Experts", "DrawsInPlace", "Keeps"),
        *("Lower", "KeptAside", "ChangesInput", "Marked", "Rounds"),
    ],
)
def test_unusual_code_gives_the_modules_own_numbers_at_every_cut(module: str) -> None:
    found = find(Subject(module, getattr(unusual_modules, module), points), CASES)
    assert found.verified and found.difference < 1e-7, found  # an LSTM evaluates by the kernel of training


@pytest.mark.parametrize(
    ("name", "line", "said"),
    [
        ("ChangesBuffer", "        self.centre[:2].mul_(0.9)", "changes centre in place"),
        ("NormalisesTwice", None, "the BatchNorm norm is called once more"),
        ("TwoInputs", None, "model.inputs=["),
        ("Missing", '        torch.load("/nowhere/weights.pt")', "cannot be constructed: "),
        ("lazy", None, "get a shape only from the first input"),
        ("spectral_norm", None, "0._u in place, which recomputing would repeat"),
        ("ScriptedPart", None, "its module second is made by TorchScript"),
        ("BeginsSteps", None, "has begin_step(), which only a layer of a list"),
        ("HooksModule", None, "its module second has a hook on gradients"),
        ("HooksParameter", None, "its parameter second.weight has a hook on its gradient"),
        ("HasExtraState", None, "changes its state_dict by a hook or extra state"),
        ("scripted", None, "is made by TorchScript: use the class"),
        ("a_list", None, "named by model._target_ alone"),
    ],
)
def test_code_that_a_trace_would_not_repeat_is_refused(name: str, line: str | None, said: str) -> None:
    told = refusal_of(layers, getattr(unusual_modules, name), [("float32", [4, 3])], error=TraceError)
    assert said in told and (line is None or line_of(line) in told)


SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
CLIP = {"text_config": {**SMALL, "vocab_size": 64, "eos_token_id": 1}, "projection_dim": 16}
CLIP["vision_config"] = {**SMALL, "image_size": 32, "patch_size": 8}
RESNET = {"embedding_size": 8, "hidden_sizes": [8] * 4, "depths": [1] * 4, "layer_type": "basic"}
DETR = {"d_model": 16, "num_queries": 4, "dropout": 0.0, "use_timm_backbone": False, "backbone": None}
DETR |= {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
SOUNDS = {**SMALL, "conv_dim": [8, 8], "conv_stride": [5, 2], "conv_kernel": [10, 3], "apply_spec_augment": False}
SOUNDS |= dict.fromkeys(("layerdrop", "hidden_dropout", "attention_dropout", "feat_proj_dropout", "final_dropout"), 0.0)
SOUNDS |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "activation_dropout": 0.0}


def made(name: str, config: dict[str, Any]) -> nn.Module:
    library = pytest.importorskip("transformers")
    if name == "Detr":
        config = {**config, "backbone_config": library.ResNetConfig(**RESNET, out_features=["stage4"])}
    head = {"Clip": "CLIPModel", "Detr": "DetrForObjectDetection", "Wav2Vec2": "Wav2Vec2ForCTC"}[name]
    return getattr(library, head)(getattr(library, f"{name.replace('Clip', 'CLIP')}Config")(**config))


@pytest.mark.slow(2)
@pytest.mark.parametrize(
    ("name", "config", "inputs", "output"),
    [
        ("Clip", CLIP, {"input_ids": (8,), "pixel_values": (3, 32, 32)}, "logits_per_image"),
        ("Detr", DETR, {"pixel_values": (3, 32, 32)}, "logits"),
        ("Wav2Vec2", SOUNDS, {"input_values": (400,)}, "logits"),
    ],
)
def test_models_of_texts_images_and_sounds_are_their_own(name: str, config: Any, inputs: Any, output: str) -> None:
    def given(examples: int) -> tuple[Tensor, ...]:
        draws = [partial(torch.randint, 3, 64) if of == "input_ids" else torch.randn for of in inputs]
        return tuple(draw((examples, *shape)) for draw, shape in zip(draws, inputs.values(), strict=True))

    found = find(Subject(name, partial(made, name, config), given, {"inputs": [*inputs], "output": output}), CASES)
    assert found.verified, found


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda m, h: torch.stack([m.second(row) for row in h]), "all of them at once, in place of a loop"),
        (lambda m, h: m.second(h) / math.isqrt(h.shape[0]), "as in h / len(h)"),
        (lambda m, h: m.second(h.view(2, 8)), "or h.view(-1, 8)"),
        (lambda m, h: h if torch.rand([]) < 0.1 else m.second(h), "use torch.where, or multiply by a mask"),
        (lambda m, h: m.second(h.detach()).sum().backward() or h, "here forward computes a gradient"),
        (lambda m, h: h - torch.autograd.grad(m.second(h).sum(), h)[0], "here forward computes a gradient"),
        (lambda m, h: torch.func.grad(lambda v: m.second(v).sum())(h), "here forward computes a gradient"),
        (lambda m, h: OUTSIDE(m.second(h)), "that the module has not registered"),
        (lambda m, h: h + m.second.weight.data.clamp_(-1, 1).sum(), "here forward changes the parameter second.weight"),
        (lambda m, h: h if torch.manual_seed(3) is None else m.second(h), "here forward seeds the random generators"),
        (lambda m, h: m.second(h + len([torch.random.fork_rng([])])), "here forward seeds the random generators"),
        (lambda m, h: setattr(m.second.weight, "data", m.first.bias) or h, "replaces a tensor's values by .data = …"),
        (lambda m, h: print(f"{h.max():.3f}") or h, "here tracing ends with "),
        (lambda m, h: torch._assert(h.shape[1] == 4, "Expected 4") or h, "Expected 4"),
        (lambda m, h: h + torch.rand(8, generator=torch.Generator()), "leave out generator=…"),
        (lambda m, h: torch.func.vmap(m.second)(h), "write the dimension out"),
        (lambda m, h: h + torch.from_numpy(h.detach().numpy()), "becomes a numpy array: compute with torch"),
        (lambda m, h: torch.cond(h.sum() > 0, m.second, torch.neg, (h,)), "torch.cond, map or vmap runs code"),
    ],
)
def test_a_refusal_names_the_line_and_what_to_write(changed: Any, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    own = type("Own", (unusual_modules.Perceptron,), {"changed": changed})
    told = refusal_of(layers, own, [("float32", [4, 3])], error=TraceError)
    assert f"{__file__}, line {changed.__code__.co_firstlineno}: " in told and said in told
    assert "docs/your-own-model.md" in told
    assert not any(capfd.readouterr())  # torch.export prints the whole graph


def test_inputs_of_a_size_for_which_the_module_was_not_traced_are_refused() -> None:
    (first, *_) = (builder.build() for builder in layers(unusual_modules.EvenOnly, [("float32", [4, 3])]))
    first(*points(6))
    branch = line_of("        return self.second(h) if h.shape[0] % 2 == 0 else h")
    for inputs, said in ((points(3), "% 2"), ((torch.ones(2, 4),), "(size 1 of input 0) == 3")):
        told = refusal_of(first, *inputs, error=SizeError)
        assert said in told and branch in told


def test_a_constructor_may_read_its_weights_from_a_folder(tmp_path: Path) -> None:
    library = pytest.importorskip("transformers").AutoModelForCausalLM
    own = from_config("gpt2")
    own.save_pretrained(tmp_path)
    made = layers(partial(library.from_pretrained, str(tmp_path)), [("int64", [2, 8])], inputs=["input_ids"])
    held = [weight for builder in made for weight in builder.build().parameters()]
    assert all(any(torch.equal(weight, other) for other in held) for weight in own.parameters())


def test_an_output_inside_others_is_named_by_its_path_and_bytes_may_stay_bytes() -> None:
    class Nested(nn.Module):
        def forward(self, images: Tensor) -> dict[str, Any]:
            return {"heads": {"logits": images + 1, "again": images}, "number": 3}

    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    called = Called(Nested(), Call(output="heads.logits", mean=None))
    assert torch.equal(called(images), images + 1)
    with pytest.raises(CallError, match=r"the module returns the tensors heads\.logits, heads\.again: name one"):
        Called(Nested(), Call(output="heads"))(images)


def test_a_module_that_is_only_a_name_is_refused_with_what_to_type() -> None:
    named: Any = "torchvision.models.vgg11"
    with pytest.raises(ConfigurationError, match=r"^model\.module=torchvision\.models\.vgg11: name what makes"):
        layers(named, example=[("float32", [4, 3])])


def test_a_mask_of_no_input_is_refused() -> None:
    with pytest.raises(CallError, match=r"needs an input of this name: model\.inputs=\[ids, …\]"):
        Called(nn.Linear(2, 2), Call(masks={"attention_mask": "ids"}))
