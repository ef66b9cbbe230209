"""Notes modules with the inputs that they take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from benchmarks.traced.subject import TracedSubject

Module = TypeVar("Module", bound=type[nn.Module])
WIDTH, VOCABULARY, LENGTH, SIDE = 8, 24, 6, 8
written: list[TracedSubject] = []


def given(inputs: Callable[[int], tuple[Tensor, ...]], **call: Any) -> Callable[[Module], Module]:
    """Returns a decorator that notes a module, its inputs, and the keys of model=module that say how it is called."""
    return partial(_note, inputs, call)


def _note(inputs: Callable[[int], tuple[Tensor, ...]], call: dict[str, Any], module: Module) -> Module:
    written.append(TracedSubject(f"as_written {module.__name__}", module, inputs, call))
    return module


def vectors(examples: int) -> tuple[Tensor, ...]:
    return (torch.randn(examples, WIDTH),)


def series(examples: int) -> tuple[Tensor, ...]:
    return (torch.randn(examples, LENGTH, WIDTH),)


def images(examples: int) -> tuple[Tensor, ...]:
    return (torch.randn(examples, 3, SIDE, SIDE),)


def tokens(examples: int) -> tuple[Tensor, ...]:
    ids = torch.randint(1, VOCABULARY, (examples, LENGTH))
    ids[:, -1] = 0  # padding
    return (ids,)
