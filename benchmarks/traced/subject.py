"""Defines what is known of a module that is traced and compared with itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class TracedSubject:
    """Describes one module and its inputs.

    Attributes:
        name: of the row.
        constructor: makes the module.
        inputs: makes the input tensors of a number of examples.
        call: the keys of model=module that say how it is called.
    """

    name: str
    constructor: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    call: Mapping[str, Any] = field(default_factory=dict)
