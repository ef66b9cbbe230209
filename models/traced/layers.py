"""Makes a list of layers of any `nn.Module`: `model=module model.module._target_=torchvision.models.resnet50`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from pydantic import SkipValidation
from torch import nn

from ...errors import ConfigurationError
from ...layers import LayerBuilder
from ...typed_section import CountOrZero, Positive
from .cuts import choose_cuts
from .layer import LayerMaker, Weights
from .module import Call, Constructor, TracedFrom
from .segments import segments_of
from .trace import Example, traced


def layers(
    module: Constructor,
    example: SkipValidation[Example],
    seed: int = 0,
    inputs: Sequence[str] | None = None,
    output: str | int | None = None,
    arguments: Mapping[str, Any] | None = None,
    masks: Mapping[str, str] | None = None,
    pad_id: CountOrZero = 0,
    mean: Sequence[float] | None = (0.5, 0.5, 0.5),
    std: Sequence[Positive] = (0.5, 0.5, 0.5),
    labels: Sequence[str] | None = None,
    ignored: int | None = None,
    float_type: str = "float32",
) -> list[LayerBuilder]:
    """Returns the layers of a traced module; their parameters keep the module's own names.

    Args:
        module: makes it, without arguments.
        example: (dtype, shape) of each input tensor of a micro-batch; the number of examples does not matter.
        seed: for which its weights are drawn, as after ``torch.manual_seed(seed)``.
        inputs, output, arguments, masks, pad_id, mean, std, labels, ignored: see `Call`.
        float_type: of the parameters that the layers will have when they run: those in float32 are traced as such.

    Raises:
        TraceError: the module cannot be traced; the message says where and what to do.
    """
    _refuse_kinds(module, {"arguments": arguments or {}, "masks": masks or {}})
    call = Call(inputs, output, arguments or {}, masks or {}, pad_id, mean, std, labels, ignored)
    made_by = (module.func, module.args, module.keywords) if isinstance(module, partial) else (module,)
    key = repr((*made_by, example, seed, call, float_type))  # as good as identity: what it stands for is kept beside it
    if key not in _known:
        _known.clear()
        _known[key] = module, traced_layers(TracedFrom(module, call, seed), example, getattr(torch, float_type))
    return _known[key][1]


def _refuse_kinds(module: object, mappings: Mapping[str, object]) -> None:
    if not callable(module) or isinstance(module, nn.Module):
        shown = module if isinstance(module, str) else f"a {type(module).__name__}"
        raise ConfigurationError(
            f"model.module={shown}: name what makes the module, as model.module._target_=torchvision.models.resnet18, "
            "and leave model.module._partial_ as it is: it is called under the run's seed"
        )
    for key, value in mappings.items():
        if not isinstance(value, Mapping):
            raise ConfigurationError(f"model.{key}={value}: use names with values, as {{attention_mask: input_ids}}")


_known: dict[str, tuple[Constructor, list[LayerBuilder]]] = {}  # the last one: gpipe-verify asks for it again and again


def traced_layers(traced_from: TracedFrom, example: Example, float_type: torch.dtype) -> list[LayerBuilder]:
    """Returns the layers of a traced module; the arguments are those of `layers`."""
    module, seed = traced_from.constructor, traced_from.seed
    trace = traced(module, traced_from.call, example, seed, float_type)
    segments = segments_of(trace, choose_cuts(trace.training, trace.evaluation))
    holders = Counter(first for segment in segments for first in set(segment.held.values()))
    weights = Weights(trace, module, seed, [first for first, count in holders.items() if count > 1])
    makers = [LayerMaker(segment, trace, weights, traced_from) for segment in segments]
    return [LayerBuilder(segment.name, make, tied=segment.tied) for segment, make in zip(segments, makers, strict=True)]
