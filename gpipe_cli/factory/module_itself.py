"""Compares a traced model with the module itself: whole for gpipe-verify, and by a quick look when a run first starts.

The digest of what a quick look depends on is the name of an empty file in the cache: the next start does without it.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..cpu import free_memory
from ..data.cache import cache_folder, made
from ..errors import ConfigurationError
from ..layers import LayerBuilder
from ..micro_batch import MicroBatch, Tensors
from ..models.traced.compare import COPIES, ModuleFailed, compare, maker_of
from ..models.traced.layer import LayerMaker
from ..models.traced.refusals import WAY_OUT, name_of
from ..partition.cost import count_parameters, layer_costs
from ..tasks.base import Task

EXAMPLES = 2  # of a quick look's micro-batch; BatchNorm needs two
LONGEST = 3.0  # seconds that a quick look may take
RUNS = 16  # forwards' worth of a quick look: two sides, two rounds, forward, backward and evaluation
FLOPS, PARAMETERS = 4e10, 1.2e7  # a second: of one core; constructed, changed and compared on both sides
SMALLER = "a smaller one with the same code, as by model.module.n_layer=2 or what its arguments are called"


@dataclass(frozen=True)
class ModuleReport:
    """Says how the traced layers compare with the module itself.

    Attributes:
        line: in one sentence.
        agrees: None where they were not compared.
    """

    line: str
    agrees: bool | None


def is_traced(builders: Sequence[LayerBuilder]) -> bool:
    """Returns whether the model is a traced module."""
    return isinstance(builders[0].build, LayerMaker)


def compare_with_module(
    builders: Sequence[LayerBuilder], micro_batches: Sequence[MicroBatch], task: Task
) -> ModuleReport:
    """Compares the layers of a traced module with the module itself, on the CPU."""

    def loss(outputs: Tensors, targets: Tensors) -> torch.Tensor:
        return task.loss(outputs, targets)[0] / (task.weight(targets) or 1.0)

    parameters, free = sum(count_parameters(builders)), free_memory()
    needed = parameters * 4 * COPIES
    if free is not None and needed > free:
        return ModuleReport(
            f"not compared: {COPIES} times its {parameters:,} parameters take {needed / 1e9:.1f} GB, and "
            f"{free / 1e9:.1f} GB are free; verify {SMALLER}",
            None,
        )
    try:
        found = compare(builders, micro_batches, loss)
    except ModuleFailed as error:
        return ModuleReport(f"DIFFERENT: it fails where its layers do not: {error}", False)
    except Exception as error:
        return ModuleReport(f"not compared: {type(error).__name__}: {error}", None)
    what = f"{found.compared} outputs, gradients, buffers and requires_grad, in training and in evaluation"
    if not found.agrees:
        named = "; ".join(map(str, found.differing[:3]))
        return ModuleReport(f"DIFFERENT in {len(found.differing)} of {what}: {named}", False)
    if found.worst is None or found.worst.relative == 0:
        return ModuleReport(f"the same bits ({what})", True)
    decided = f"; in float64, for in float32 {found.decided}" if found.decided else ""
    return ModuleReport(f"the same but for rounding, at most {found.worst} ({what}{decided})", True)


# -- when a run first starts -------------------------------------------------------------------------------------------


def look_at_first_start(
    builders: Sequence[LayerBuilder],
    model: Mapping[str, Any],
    task: Task,
    read: Callable[[], MicroBatch],
    say: Callable[[str], None],
) -> None:
    """Compares a traced module with itself where that takes a few seconds and was not done before.

    Args:
        model: the section.
        read: returns a micro-batch.
        say: receives a line about what was compared, or not.

    Raises:
        ConfigurationError: they differ.
    """
    kept = _kept(model)
    if kept.exists():
        return
    inputs, targets = map(_first, read())
    costs = layer_costs(builders, inputs, "flops")
    seconds = RUNS * sum(layer.cost for layer in costs) / FLOPS + sum(layer.parameters for layer in costs) / PARAMETERS
    if seconds > LONGEST:
        say(
            "the module itself: not compared, as it is too large for a quick look: gpipe-verify with the same words "
            f"compares it, or {SMALLER}"
        )
    else:
        report = compare_with_module(builders, [(inputs, targets)], task)
        if report.agrees is False:
            raise ConfigurationError(
                f"{name_of(maker_of(builders[0]).traced_from.constructor)}: its layers, traced, do not compute what "
                f"the module itself does: {report.line}; {WAY_OUT}"
            )
        say(f"the module itself: {report.line}")
        if report.agrees is None:
            return
    with suppress(OSError):  # without a cache the next start looks again
        made(kept, Path.touch)


def _first(tensors: Tensors) -> Tensors:
    return tuple(tensor[:EXAMPLES] if tensor.dim() else tensor for tensor in tensors)


def _kept(model: Mapping[str, Any]) -> Path:
    """Returns the file whose name stands for the arguments, the code and the releases of a model."""
    kinds = [(dtype, len(shape)) for dtype, shape in model.get("example", ())]  # sizes are checked in every forward
    section = {key: value for key, value in model.items() if key not in ("example", "seed")}
    digest = hashlib.sha256(json.dumps([section, kinds], sort_keys=True, default=str).encode())
    for name, content in sorted(_code().items()):
        digest.update(f"{name} {content}\n".encode())
    return cache_folder(None) / "compared" / digest.hexdigest()[:32]


def _code() -> dict[str, str]:
    """Returns what stands for the code of all imported modules: the release of a library, the digest of other files."""
    standard, tracing = sysconfig.get_path("stdlib"), str(Path(inspect.getfile(LayerMaker)).parent)
    found: dict[str, str] = {}
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or name in ("__main__", "__mp_main__"):
            continue
        if "site-packages" in file or "dist-packages" in file or file.startswith(standard):
            release = vars(module).get("__version__")
            if "." not in name and isinstance(release, str):
                found[name] = release
        elif not name.startswith("gpipe_cli.") or file.startswith(tracing):
            with suppress(OSError):
                found[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return found
