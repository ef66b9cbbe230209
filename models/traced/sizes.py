"""Finds for which sizes of its inputs a trace holds: code that branches on a size was traced for one branch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram


class SizeError(ValueError):
    """Raised for inputs of a size for which a module was not traced; names the size and the line that asks for it."""


@dataclass(frozen=True)
class SizeCondition:
    """Describes what the sizes of the inputs must fulfil.

    Attributes:
        code: a Python expression of `tensors`, as ``tensors[0].size()[1] <= 64``.
        place: file and line of the code that asks for it; None where it is a library's.
    """

    code: str
    place: str | None = None

    @cached_property
    def holds(self) -> Callable[[Sequence[Tensor]], bool]:
        """Returns a function that says whether inputs fulfil it."""
        names = {"math": math, "torch": torch}  # which torch.export's conditions use
        function: Callable[[Sequence[Tensor]], bool] = eval(f"lambda tensors: {self.code}", names)
        return function

    def __str__(self) -> str:
        shown = re.sub(r"tensors\[(\d+)\]\.size\(\)\[(\d+)\]", _shown, self.code)
        return f"{shown} ({self.place})" if self.place else shown


def _shown(size: re.Match[str]) -> str:
    number, dimension = size.groups()
    return f"(size {dimension} of input {number})" if int(dimension) else "(number of examples)"


def conditions_of(program: ExportedProgram, inputs: Sequence[fx.Node]) -> list[SizeCondition]:
    """Returns what torch.export has assumed of the sizes of the inputs, and the sizes that it took for constants."""
    place = _place_of_guards(inputs)
    assumed: list[str] = getattr(program, "_guards_code", [])  # not in every release of torch
    codes = [code.replace("L['tensors']", "tensors") for code in assumed]
    for number, node in enumerate(inputs):
        for dimension, size in enumerate(node.meta["val"].shape):
            fixed = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else size
            if fixed is not None:
                codes.append(f"tensors[{number}].size()[{dimension}] == {fixed}")
    return [SizeCondition(code, place) for code in dict.fromkeys(codes)]


def _place_of_guards(inputs: Sequence[fx.Node]) -> str | None:
    sizes = [size for node in inputs for size in node.meta["val"].shape if isinstance(size, torch.SymInt)]
    environment: Any = sizes[0].node.shape_env if sizes else None
    guards = environment.guards if environment is not None else []
    frames = [guard.sloc.framework_loc for guard in guards]
    own = [f for f in frames if isinstance(f, FrameSummary) and "torch" not in Path(f.filename).parts]
    return f"{own[0].filename}, line {own[0].lineno}" if own else None
