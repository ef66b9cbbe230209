"""Calls a module with a micro-batch's tensors: which argument each becomes, and what of its answer is the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

Constructor = Callable[[], nn.Module]


@dataclass(frozen=True)
class Call:
    """Describes how a module is called.

    Attributes:
        inputs: the name of the argument that each tensor of a micro-batch becomes; None: they are given by position.
        output: attribute, key or index of what the module returns; None: its first tensor.
        arguments: further arguments by name, the same in every call.
        masks: the argument that marks the tokens of another which are no padding, by its name: mask -> tokens.
        pad_id: the token that is padding.
        mean, std: of the channels of images; images that come as bytes are scaled by them.
    """

    inputs: Sequence[str] | None = None
    output: str | int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    masks: Mapping[str, str] = field(default_factory=dict)
    pad_id: int = 0
    mean: Sequence[float] = (0.5, 0.5, 0.5)
    std: Sequence[float] = (0.5, 0.5, 0.5)


class Called(nn.Module):
    """Wraps a module so that tensors go in and one tensor comes out."""

    def __init__(self, module: nn.Module, call: Call) -> None:
        super().__init__()
        if "use_cache" in signature(module.forward).parameters:  # of generation; nobody reads it here
            call = replace(call, arguments={"use_cache": False, **call.arguments})
        self.module, self.call = module, call

    def forward(self, *tensors: Tensor) -> Tensor:
        call = self.call
        values = [self._scaled(tensor) if tensor.dtype is torch.uint8 else tensor for tensor in tensors]
        if call.inputs is None:
            return output_of(self.module(*values, **call.arguments), call.output)
        if len(call.inputs) != len(values):
            raise ValueError(
                f"model.inputs names {len(call.inputs)} arguments, a micro-batch has {len(values)} input tensors: name "
                "as many"
            )
        named = dict(zip(call.inputs, values, strict=True))
        masks = {mask: named[tokens] != call.pad_id for mask, tokens in call.masks.items()}
        return output_of(self.module(**named, **masks, **call.arguments), call.output)

    def _scaled(self, images: Tensor) -> Tensor:
        shape = (1, -1, *([1] * (images.dim() - 2)))
        dtype = next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.float32)
        mean, std = (torch.tensor(list(values), dtype=dtype).view(shape) for values in (self.call.mean, self.call.std))
        return (images.to(dtype) / 255 - mean.to(images.device)) / std.to(images.device)


def output_of(answer: Any, wanted: str | int | None) -> Tensor:
    """Returns the tensor of a module's answer that ``wanted`` names.

    Raises:
        ValueError: there is no such tensor; the message lists what there is.
    """
    found = answer
    if wanted is None:
        if isinstance(answer, Mapping):
            answer = list(answer.values())
        if isinstance(answer, (tuple, list)):
            found = next((item for item in answer if isinstance(item, Tensor)), None)
    elif isinstance(wanted, int):
        found = answer[wanted] if isinstance(answer, (tuple, list)) and wanted < len(answer) else None
    else:
        found = answer.get(wanted) if isinstance(answer, Mapping) else getattr(answer, wanted, None)
    if not isinstance(found, Tensor):
        raise ValueError(f"model.output={wanted}: the module returns {_described(answer)}: name one of its tensors")
    return found


def _described(answer: Any) -> str:
    if isinstance(answer, Mapping):
        return f"the keys {', '.join(map(str, answer))}"
    if isinstance(answer, (tuple, list)):
        return f"{len(answer)} values"
    return type(answer).__name__
