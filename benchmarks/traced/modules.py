"""Makes small modules of torchvision's and of the transformers library by their names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torchvision  # type: ignore[import-untyped]
from torch import Tensor, nn

IMAGE = 64  # pixels a side, where the module takes any
VOCABULARY, LENGTH = 96, 16
USUAL: dict[Any, str] = {  # value -> keys of configurations that get it
    32: "hidden_size d_model n_embd embedding_size dim emb_dim n_embed image_size",
    64: "encoder_ffn_dim decoder_ffn_dim intermediate_size ffn_dim d_ff n_inner hidden_dim d_inner ffn_hidden_size "
    "max_position_embeddings n_positions n_ctx max_seq_len",
    2: "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers num_decoder_layers "
    "num_encoder_layers num_key_value_heads num_experts_per_tok",
    4: "rotary_dim num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads num_experts num_local_experts",
    8: "head_dim d_kv patch_size",
    1: "bos_token_id eos_token_id decoder_start_token_id sep_token_id cls_token_id",
    0: "pad_token_id",
    10: "num_labels",
    16: "moe_intermediate_size shared_expert_intermediate_size",
    VOCABULARY: "vocab_size",
}
SIZES = {key: value for value, keys in USUAL.items() for key in keys.split()}  # tiny


@dataclass(frozen=True)
class Subject:
    """Describes one module and its inputs.

    Attributes:
        constructor: makes the module.
        inputs: makes the input tensors of a number of examples.
        call: the keys of model=module that say how it is called.
    """

    name: str
    constructor: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    call: Mapping[str, Any] = field(default_factory=dict)


NAMES = (  # one of each kind; others may be typed
    *("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "inception_v3", "mobilenet_v3_small", "resnet18"),
    *("shufflenet_v2_x0_5", "squeezenet1_1", "swin_t", "vgg11", "vit_b_16", "bloom", "gemma", "gpt2", "llama", "mamba"),
    *("mixtral", "olmoe", "opt", "qwen3", "xlnet", "albert", "bert", "convbert", "deberta", "fnet", "bart", "t5"),
    "beit",
)
WITHOUT_HEAD = {"init_weights": False, "aux_logits": False}
ARGUMENTS: dict[str, dict[str, Any]] = {"googlenet": WITHOUT_HEAD, "inception_v3": WITHOUT_HEAD}
ARGUMENTS |= {"vit_b_16": {"image_size": 32}}
SIDES = {"inception_v3": 96, "maxvit_t": 224, "vit_b_16": 32}
FAMILIES = ("Seq2SeqLM", "MaskedLM", "CausalLM", "ImageClassification")  # the first that a module has
HEADS = {"num_heads": [2, 2], "num_attention_heads": [2, 2]}
NARROW = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
OWN_SIZES: dict[str, dict[str, Any]] = {  # which no other configuration has
    "deit": {"architectures": ["DeiTForImageClassification"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "regnet": {**NARROW, "groups_width": 4},
    "resnet": NARROW,
    "swin": {"embed_dim": 16, "depths": [1, 1], "window_size": 4, "patch_size": 2, **HEADS},
}


def subject(name: str) -> Subject:
    """Returns a module of torchvision's, or an architecture of the transformers library, by its name there."""
    if callable(getattr(torchvision.models, name, None)):
        return Subject(name, partial(_without_noise, name), partial(_images, SIDES.get(name, IMAGE)))
    family = _family(name)
    if family == "ImageClassification":
        return Subject(name, partial(from_config, name), partial(_images, 32))
    if family == "Seq2SeqLM":
        both = {"inputs": ["input_ids", "decoder_input_ids"], "masks": {"attention_mask": "input_ids"}}
        return Subject(name, partial(from_config, name), _pairs, both)
    return Subject(name, partial(from_config, name), _tokens, {"inputs": ["input_ids"]})


def _family(name: str) -> str:
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    kind = type(transformers.AutoConfig.for_model(name))
    return next(each for each in FAMILIES if kind in getattr(transformers, f"AutoModelFor{each}")._model_mapping)


def _without_noise(name: str) -> nn.Module:
    module: nn.Module = getattr(torchvision.models, name)(num_classes=10, **ARGUMENTS.get(name, {}))
    for part in module.modules():
        if isinstance(part, torchvision.ops.StochasticDepth | nn.Dropout):
            part.p = 0.0
    return module


def from_config(name: str, **more: Any) -> nn.Module:
    """Returns a tiny module without dropout, with random weights; ``more``: further keys of its configuration."""
    import transformers

    usual = transformers.AutoConfig.for_model(name)
    known = {key: value for key, value in SIZES.items() if key in vars(usual) or key in usual.attribute_map}
    without = {key: 0.0 for key, value in vars(usual).items() if "drop" in key and isinstance(value, float)}
    config = transformers.AutoConfig.for_model(name, **{**known, **without, **OWN_SIZES.get(name, {}), **more})
    module: nn.Module = getattr(transformers, f"AutoModelFor{_family(name)}").from_config(config)
    return module


def _images(side: int, examples: int) -> tuple[Tensor, ...]:
    return (torch.randn(examples, 3, side, side),)


def _tokens(examples: int) -> tuple[Tensor, ...]:
    return (torch.randint(2, VOCABULARY, (examples, LENGTH)),)


def _pairs(examples: int) -> tuple[Tensor, ...]:
    source = torch.randint(2, VOCABULARY, (examples, LENGTH))
    source[:, -3:] = 0  # padding
    return source, torch.randint(2, VOCABULARY, (examples, LENGTH - 4))
