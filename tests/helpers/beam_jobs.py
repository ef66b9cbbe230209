"""Translates with a small Transformer: through the pipeline, alone or as one of several workers, and plainly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from composed import checked
from torch import Tensor

from gpipe_cli.decoding.beam import Hypothesis
from gpipe_cli.decoding.decoding import Decoder, DecodingForm
from gpipe_cli.decoding.translation import SpecialTokens, TranslationForm
from gpipe_cli.distributed.pipeline import WorkerPipeline
from gpipe_cli.distributed.step_message import BatchShape
from gpipe_cli.distributed.world import World, join_world
from gpipe_cli.launch.context import Context
from gpipe_cli.layers import LayerBuilder
from gpipe_cli.models.transformer import transformer
from gpipe_cli.partition.cut import Cut
from gpipe_cli.pipeline.cell import BuiltLayer, build_layer
from gpipe_cli.tasks.base import GenerationSettings
from gpipe_cli.tasks.translation import TranslationTask

CPU = torch.device("cpu")
PAD, BOS, EOS, VOCABULARY = 0, 2, 3, 13
SHAPE = {"L": 2, "H": 32, "A": 1, "d_model": 16, "source_vocabulary": VOCABULARY, "target_vocabulary": VOCABULARY}
SPREAD = 3.0  # times the initial weights: a model that was never trained would otherwise say the same to everything
ALONE = World(0, 1, 1, CPU, CPU, None, None, None)


def build() -> list[BuiltLayer]:
    """Builds the whole model, the same in every process."""
    builders = transformer(**SHAPE)  # type: ignore[arg-type]
    layers = [BuiltLayer(i, b.name, build_layer(b, i, 5, CPU).eval()) for i, b in enumerate(builders)]
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.module.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(SPREAD)
    return layers


def sentences(count: int = 11) -> list[list[int]]:
    """Returns sources of 2 to 8 tokens, each with its end mark."""
    random = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 8, (count,), generator=random).tolist()
    return [[*torch.randint(4, VOCABULARY, (n,), generator=random).tolist(), EOS] for n in lengths]


def settings(**changes: Any) -> GenerationSettings:
    return GenerationSettings(**{"per_language": 1, "per_language_at_end": 1, "group": 3, "max_length": 9, **changes})


def through_pipeline(
    K: int, beam: int, chosen: GenerationSettings, sources: Sequence[Sequence[int]], world: World = ALONE
) -> list[Hypothesis]:
    """Decodes with K cells over the workers of ``world``, three groups in flight."""
    form = TranslationForm(TranslationTask(pad_id=PAD), chosen, SpecialTokens(BOS, EOS, PAD))
    decoder = decoder_of(build(), K, form, BatchShape((2, 2), (2,)), world)
    return decoder.decode(sources if world.reads_data else [], beam)


def decoder_of(
    layers: Sequence[BuiltLayer], K: int, form: DecodingForm, shape: BatchShape, world: World = ALONE
) -> Decoder:
    """Makes a decoder with K cells over the workers of ``world``, three groups in flight."""
    placement = tuple(k * world.workers // K for k in range(K))
    sizes = [len(part) for part in torch.arange(len(layers)).tensor_split(K)]
    builders = [LayerBuilder(layer.name, lambda layer=layer: layer.module) for layer in layers]
    cut = Cut(sizes, placement, [], 0, [{} for _ in layers])
    config = checked(f"pipeline.K={K}", "pipeline.M=3").settings.pipeline
    pipeline = WorkerPipeline(builders, cut, config, TranslationTask(pad_id=PAD), shape, world)
    for cell in pipeline.cells:
        cell.train(False)
    return Decoder(pipeline, form)


def log_probabilities(layers: Sequence[BuiltLayer], source: Sequence[int], prefixes: Tensor) -> Tensor:
    """Returns those of the next token after each prefix [rows, t], by the whole model without cache or padding."""
    values: Any = (torch.tensor([list(source)] * len(prefixes)), prefixes)
    with torch.no_grad():
        for layer in layers:
            values = layer.module(values)
    return TranslationTask(pad_id=PAD).log_probabilities(values)


def translate(context: Context, config: dict[str, Any]) -> list[list[Any]]:
    """Runs one worker; returns the fields of each hypothesis on the workers that read."""
    world = join_world(context, config["workers"], context.world_size // config["workers"], "cpu", "gloo")
    found = through_pipeline(config["K"], config["beam"], settings(), sentences(), world)
    return [[*vars(hypothesis).values()] for hypothesis in found]
