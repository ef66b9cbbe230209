"""Defines the types and limits of the keys that shipped models, data, tasks, optimizers and schedules take.

With them the command refuses a wrong value before it imports torch and starts workers. The keys of a `_target_` that
is not listed here are passed on as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from gpipe_cli.errors import Problems
from gpipe_cli.typed_section import (
    LARGEST,
    Count,
    CountOrZero,
    Length,
    Limit,
    NotNegative,
    Number,
    Positive,
    ShareOrZero,
    read_values,
    shown,
    unknown_key,
)

Choice = Literal["drop", "keep", "refuse"]
Pixels = Annotated[int, Limit(at_least=8, at_most=65_536)]  # of a side
Layers = Annotated[int, Limit(at_least=1, at_most=100_000)]
Part = Annotated[float, Limit(at_least=0, at_most=1)]
PartAboveZero = Annotated[float, Limit(above=0, at_most=1)]
Seed = Annotated[int, Limit(at_least=0, at_most=2**63 - 1)]  # hashed as a 64-bit integer
Temperature = Annotated[float, Limit(at_least=1, infinite=True)]
Tokens = Annotated[int, Limit(at_least=8, at_most=65_535)]  # of a sentence: lengths are stored in two bytes
Vocabulary = Annotated[int, Limit(at_least=8, at_most=2**31 - 1)]
Codes = Annotated[list[str], Length()]
Pair = Length(2, 2)

SIZES = {"H": Count, "A": Count, "d_model": Annotated[int, Limit(at_least=2, multiple_of=2)]}
DROPOUT = {"dropout": ShareOrZero, "input_dropout": ShareOrZero, "attention_dropout": ShareOrZero}
DEPTH = {"depth_scaled_init": bool, "depth_scale_exponent": Number, "tie_embeddings": bool}
MODELS: dict[str, dict[str, Any]] = {
    "gpipe_cli.models.transformer.transformer": {
        "L": Layers,
        **SIZES,
        "source_vocabulary": Vocabulary,
        "target_vocabulary": Vocabulary,
        **DROPOUT,
        **DEPTH,
        "depth_scale_layers": Literal["both", "one"],
        "pad_id": CountOrZero,
    },
    "gpipe_cli.models.transformer_lm.transformer_lm": {
        "L": Layers,
        **SIZES,
        "vocabulary": Vocabulary,
        **DROPOUT,
        **DEPTH,
        "final_norm": bool,
    },
    "gpipe_cli.models.amoebanet.amoebanet": {
        "L": Annotated[int, Limit(at_least=3, multiple_of=3)],
        "D": Annotated[
            int, Limit(at_least=16)
        ],  # the first stem cell is D/4 wide, and its bottlenecks a quarter of that
        "genotype": Literal["A", "B", "C", "D"],
        "classes": Count,
        "image_size": Annotated[int, Limit(at_least=3, at_most=65_536)],  # of a side: the stem's kernel
        "in_channels": Count,
        "channels_last": bool,
        "dilate": bool,
        "dropout": ShareOrZero,
        "drop_path_keep": PartAboveZero,
        "batchnorm_epsilon": Positive,
        "batchnorm_decay": ShareOrZero,
        "auxiliary_head": bool,
        "auxiliary_weight": Positive,
        "auxiliary_label_smoothing": ShareOrZero,
        "auxiliary_width": Annotated[float, Limit(at_least=1 / 128)],
    },
    "gpipe_cli.models.traced.layers.layers": {
        "inputs": list[str] | None,
        "output": str | int | None,
        "pad_id": CountOrZero,
        "labels": list[str] | None,
        "ignored": int | None,
        "mean": list[Number] | None,
        "std": list[Positive],
        **dict.fromkeys(("module", "arguments", "masks", "example", "float_type"), Any),
    },
}

PAIRS = {
    "languages": Codes | None,
    "pair": str | None,
    "max_length": Tokens,
    "temperature": Temperature,
    "batch_size": Count | None,
    "batch_tokens": Count | None,
    "cache_dir": str | None,
    "seed": Any,
    "evaluation_per_language": Count | None,
    "evaluation_split": Literal["dev", "test"],
    "corpus_seed": Seed,
}
SMALLER = {"smaller_vocabulary": bool}
CORPUS = {"largest": Count, "smallest": Count, "vocabulary": Annotated[int, Limit(at_least=8, at_most=65_536)]}
HELD_OUT = {"evaluation_per_language": Annotated[int, Limit(at_least=1, at_most=300)] | None}
DEFECTS = dict.fromkeys(
    (
        *("misaligned", "undecodable", "malformed", "empty", "too_long", "no_dev"),
        *("nul", "byte_order_mark", "held_out", "copied"),
    ),
    Choice,
)
IMAGE_SETS = (
    *("image_folder", "imagenet", "cifar10", "cifar100", "stanford_cars", "oxford_pets", "food101", "fgvc_aircraft"),
)
DATA: dict[str, dict[str, Any]] = {
    "gpipe_cli.data.cldr.source.TranslationSource": {**PAIRS, **CORPUS, **HELD_OUT, **SMALLER},
    "gpipe_cli.data.cldr.text.TextSource": {
        **CORPUS,
        **HELD_OUT,
        "sequence_length": Count,
        "batch_size": Count,
        "languages": Codes | None,
        "cache_dir": str | None,
        "seed": Any,
        "corpus_seed": Seed,
    },
    "gpipe_cli.data.text.source.TextFilesSource": {
        **SMALLER,
        "root": str | None,
        "evaluation_root": str | None,
        "document": Literal["blank_line", "line"],
        "json_key": str,
        "held_out": Annotated[float, Limit(at_least=0, at_most=0.9)],
        "tokenizer": str | None,
        "end_token": str | None,
        "vocabulary": Vocabulary,
        "character_coverage": Annotated[float, Limit(at_least=0.9, at_most=1)],
        "vocabulary_samples": Count,
        "preparation_workers": Count | None,
        "sequence_length": Count,
        "batch_size": Count,
        "pad_id": int,
        "evaluation_windows": Count | None,
        "cache_dir": str | None,
        "seed": Any,
        "corpus_seed": Seed,
    },
    "gpipe_cli.data.parallel.source.ParallelTextSource": {
        **PAIRS,
        **SMALLER,
        "root": str | None,
        "target": str,
        "vocabulary": Vocabulary | None,
        "source_vocabulary": Vocabulary,
        "target_vocabulary": Vocabulary,
        "character_coverage": Annotated[float, Limit(at_least=0.9, at_most=1)],
        "vocabulary_pairs": Count,
        "vocabulary_temperature": Temperature,
        "preparation_workers": Count | None,
    },
    "gpipe_cli.data.images.digits.DigitsSource": {
        "classes": Literal[10],
        "batch_size": Annotated[int, Limit(at_least=1, at_most=1437)],
        "image_size": Pixels,
        "rotate": Annotated[float, Limit(at_least=0, at_most=180)],
        "shift": Part,
        "scale": Annotated[float, Limit(at_least=0, at_most=0.9)],
        "seed": Any,
    },
    "gpipe_cli.data.images.source.ImageSource": {
        "dataset": Literal[IMAGE_SETS],
        "root": str | None,
        "download": bool,
        "classes": Count,
        "folders": Annotated[list[str], Pair],
        "images": Annotated[list[Count], Pair] | None,
        "image_size": Pixels,
        "batch_size": Count,
        "drop_last": bool,
        "crop_area": Annotated[list[PartAboveZero], Pair] | None,
        "flip": bool,
        "brightness": Part,
        "chroma": Part,
        "cutout": Part,
        "workers": Literal["auto"] | CountOrZero,
        "evaluation_crop": Annotated[float, Limit(at_least=0.01, at_most=1)],
        "broken_images_limit": CountOrZero,
        "cache_dir": str | None,
        "seed": Any,
    },
}

TASKS: dict[str, dict[str, Any]] = {
    "gpipe_cli.tasks.classification.ClassificationTask": {"label_smoothing": ShareOrZero},
    "gpipe_cli.tasks.language_model.LanguageModelTask": {
        "label_smoothing": ShareOrZero,
        "logit_clip": Positive | None,
        "pad_id": int | None,
    },
    "gpipe_cli.tasks.own_loss.OwnLossTask": {"targets_become": Codes, "ignored": int | None},
}
TASKS["gpipe_cli.tasks.translation.TranslationTask"] = TASKS["gpipe_cli.tasks.language_model.LanguageModelTask"]
GENERATION = {
    **dict.fromkeys(("per_language", "per_language_at_end"), Count | None),
    **dict.fromkeys(("group", "beam", "beam_during_run", "max_length"), Count),
    "length_exponent": NotNegative,
    "length_ratio": NotNegative,
    "length_extra": CountOrZero,
}

OPTIMIZER = {"lr": NotNegative, "weight_decay": NotNegative, "decay_only": Literal["matrices"] | None}
ADAM = {**OPTIMIZER, "betas": Annotated[list[ShareOrZero], Pair], "eps": NotNegative, "fused": bool | None}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "torch.optim.Adam": ADAM,
    "torch.optim.AdamW": ADAM,
    "torch.optim.Adafactor": {**OPTIMIZER, "beta2_decay": Annotated[float, Limit(below=0)], "d": Positive},
    "torch.optim.RMSprop": {**OPTIMIZER, "alpha": NotNegative, "momentum": NotNegative, "eps": NotNegative},
    "torch.optim.SGD": {**OPTIMIZER, "momentum": NotNegative, "nesterov": bool, "dampening": Number},
    "gpipe_cli.optim.adafactor.Adafactor": {
        **OPTIMIZER,
        "beta1": ShareOrZero,
        "beta2": ShareOrZero | None,
        "decay_exponent": Positive,
        "eps": NotNegative,
        "clip": Positive | None,
        "parameter_scale": bool,
    },
    "gpipe_cli.optim.optimizers.TFRMSprop": {
        **OPTIMIZER,
        "decay": ShareOrZero,
        "momentum": ShareOrZero,
        "eps": NotNegative,
    },
}

LR_SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe_cli.optim.lr_schedules.constant": {"warmup_steps": CountOrZero},
    "gpipe_cli.optim.lr_schedules.cosine": {"steps": Count | None, "warmup_steps": CountOrZero, "final": NotNegative},
    "gpipe_cli.optim.lr_schedules.exponential": {
        "rate": PartAboveZero,
        "decay_every": Positive,
        "warmup_steps": CountOrZero,
        "floor": Part,
    },
    "gpipe_cli.optim.lr_schedules.exponential_epochs": {
        "rate": PartAboveZero,
        "decay_epochs": Positive,
        "warmup_epochs": NotNegative,
        "floor": Part,
        "examples": Count,
        "batch_size": Count,
    },
    "gpipe_cli.optim.lr_schedules.inverse_sqrt": {"warmup_steps": Count},
    "gpipe_cli.optim.lr_schedules.transformer": {"d_model": Count, "factor": NotNegative, "warmup_steps": Count},
    "torch.optim.lr_scheduler.StepLR": {"step_size": Count, "gamma": NotNegative},
}

NESTED: dict[str, dict[str, Any]] = {"task": {"generation": GENERATION}, "data": {"on_defect": DEFECTS}}
OF_SECTIONS = {"model": MODELS, "data": DATA, "task": TASKS, "optimizer": OPTIMIZERS, "lr_schedule": LR_SCHEDULES}
TARGETS = {target: keys for targets in OF_SECTIONS.values() for target, keys in targets.items()}


# -- what the shipped ones are for -------------------------------------------------------------------------------------

OPTIONS = {  # for each kind of examples: options of the groups model, data and task
    "translation": {"model": "transformer", "data": "cldr", "task": "translation"},
    "text": {"model": "transformer_lm_small", "data": "cldr_text", "task": "language_model"},
    "images": {"model": "amoebanet", "data": "digits", "task": "classification"},
}
KINDS = {
    "gpipe_cli.models.transformer.transformer": "translation",
    "gpipe_cli.data.cldr.source.TranslationSource": "translation",
    "gpipe_cli.data.parallel.source.ParallelTextSource": "translation",
    "gpipe_cli.tasks.translation.TranslationTask": "translation",
    "gpipe_cli.models.transformer_lm.transformer_lm": "text",
    "gpipe_cli.data.cldr.text.TextSource": "text",
    "gpipe_cli.data.text.source.TextFilesSource": "text",
    "gpipe_cli.tasks.language_model.LanguageModelTask": "text",
    "gpipe_cli.models.amoebanet.amoebanet": "images",
    "gpipe_cli.data.images.digits.DigitsSource": "images",
    "gpipe_cli.data.images.source.ImageSource": "images",
    "gpipe_cli.tasks.classification.ClassificationTask": "images",
}


def read_target(section: str, values: Any, problems: Problems) -> dict[str, Any]:
    """Returns the section's values; those that do not fit the keys of its `_target_` are left out.

    Args:
        problems: gets one line for each value that is left out.
    """
    if not isinstance(values, Mapping):
        problems.append(f"{section} must be a section with keys, not {shown(values)}")
        return {}
    target = values.get("_target_")
    if not isinstance(target, str) or not target.strip("."):
        problems.append(
            f"{section}._target_={shown(target)}: use the dotted name of what to call, "
            f"as {section}._target_=my_module.my_{section}"
        )
        return dict(values)
    hints = TARGETS.get(target)
    if hints is None:
        return dict(values)
    fitting = read_values(hints, values, f"{section}.", problems)
    others = {key: value for key, value in values.items() if key not in hints}
    inner = NESTED.get(section, {})
    for key, nested in inner.items():
        if isinstance(others.get(key), Mapping):
            read_values(nested, others[key], f"{section}.{key}.", problems)
            problems += _unknown(f"{section}.{key}", others[key], nested)
    if target.startswith("gpipe_cli."):
        problems += _unknown(section, others, (*hints, "_target_", *inner))
    return {**others, **fitting}


def require_fitting(target: str, values: Mapping[str, Any]) -> None:
    """Refuses arguments of a shipped `_target_` outside the limits of its keys, for callers that come from Python.

    Raises:
        ConfigurationError: it has one line for each such argument.
    """
    section = next(name for name, targets in OF_SECTIONS.items() if target in targets)
    problems = Problems()
    fitting = {"_target_": target, **read_values(TARGETS[target], values, f"{section}.", problems)}
    problems += contradictions(*(fitting if name == section else {} for name in OF_SECTIONS))
    problems.refuse()


def _unknown(section: str, values: Mapping[str, Any], known: Iterable[str]) -> list[str]:
    names = [f"{section}.{key}" for key in known if key != "_target_"]
    return [unknown_key(f"{section}.{key}", names) for key in values if key not in known]


def contradictions(
    model: Mapping[str, Any],
    data: Mapping[str, Any],
    task: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    lr_schedule: Mapping[str, Any],
) -> Iterator[str]:
    """Yields what does not fit together in the sections that a `_target_` gets; a wrong value counts as absent."""
    yield from _other_kinds({"model": model, "data": data, "task": task})
    yield from _too_few_ids(model, data)
    yield from _of_data(data)
    generation = task.get("generation")
    if isinstance(generation, Mapping) and generation.get("length_ratio") == generation.get("length_extra") == 0:
        yield "task.generation.length_ratio=0 with length_extra=0 allows no token: raise one of them"
    if optimizer.get("nesterov") is True and optimizer.get("momentum") == 0:
        yield "optimizer.nesterov=true needs momentum: use optimizer.momentum=0.9 or optimizer.nesterov=false"
    if optimizer.get("decay_only") is not None and "weight_decay" not in optimizer:
        yield f"optimizer.decay_only={optimizer['decay_only']} without optimizer.weight_decay: give both, or neither"
    if str(lr_schedule.get("_target_")).endswith(".cosine") and lr_schedule.get("steps", 0) is None:
        yield "lr_schedule=cosine must know its end: set trainer.steps or lr_schedule.steps"


def _other_kinds(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Compares what shipped models, data and tasks are for; a user's own may be for anything."""
    kinds = {name: KINDS[values["_target_"]] for name, values in sections.items() if values.get("_target_") in KINDS}
    if kinds.get("task") == "text" and "translation" in kinds.values():
        del kinds["task"]  # the loss of a translation's target side
    if len(set(kinds.values())) > 1:
        chosen = kinds.get("data") or kinds["model"]
        said = ", ".join(f"{name} is for {kind}" for name, kind in kinds.items())
        fitting = " ".join(f"{name}={OPTIONS[chosen][name]}" for name in kinds if kinds[name] != chosen)
        yield f"{said}: all must be for the same, here {fitting}"


def _too_few_ids(model: Mapping[str, Any], data: Mapping[str, Any]) -> Iterator[str]:
    """Compares the numbers of tokens and classes that a shipped model has with those that the data may give."""
    if model.get("_target_") not in MODELS or data.get("_target_") not in DATA:
        return
    for key in ("source_vocabulary", "target_vocabulary", "vocabulary", "classes"):
        given = next((name for name in (key, "vocabulary") if data.get(name) is not None), None)
        if key in model and given is not None and model[key] < data[given]:
            yield (
                f"model.{key}={model[key]} but data.{given}={data[given]}: the model would not know the last of them, "
                f"use model.{key}={data[given]} (the default)"
            )


def _of_data(data: Mapping[str, Any]) -> Iterator[str]:
    if data.get("_target_") not in DATA:
        return
    if data.get("smallest", 0) > data.get("largest", LARGEST):
        yield f"data.smallest={data['smallest']} is more than data.largest={data['largest']}: exchange them"
    if data.get("pair") is not None and data.get("languages") is not None:
        yield f"data.pair={data['pair']} is one language, data.languages={shown(data['languages'])}: leave out one key"
    languages = data.get("languages") or []
    if twice := [code for code in languages if languages.count(code) > 1]:
        yield f"data.languages={shown(languages)}: {twice[0]} stands there twice, which changes nothing: once is enough"
    if data.get("batch_size", 1) is None and data.get("batch_tokens") is None:
        yield "data.batch_size=null needs data.batch_tokens: how large is a mini-batch?"
    shared, sides = data.get("vocabulary"), (data.get("source_vocabulary"), data.get("target_vocabulary"))
    if shared is not None and None not in sides and sides != (shared, shared):
        yield (
            f"data.vocabulary={shared} is one vocabulary for both sides: use data.source_vocabulary={shared} "
            f"data.target_vocabulary={shared} too, which the model reads"
        )
    area = data.get("crop_area")
    if area is not None and area[0] > area[1]:
        yield f"data.crop_area={shown(area)}: the least share comes first, use [{area[1]:g},{area[0]:g}]"
