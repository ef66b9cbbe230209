"""Tells how a traced model compares with the module itself, at the start of a run and in gpipe-verify.

What was found the same is kept on disk for a day, under a digest of what it depends on, so that a module pays for it
once: code that no release stands for, arguments, shapes and releases. Files that the module reads are not among these.
"""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..config import Settings
from ..cpu import free_memory
from ..data.cache import writing_cache
from ..disk import cache_folder, write_whole
from ..errors import ConfigurationError
from ..factory.build import build_optimizer
from ..factory.groups import Groups
from ..json_files import DamagedJson, read_json
from ..layers import LayerBuilder
from ..micro_batch import MicroBatch
from ..models.traced.layers import LayerMaker, TracedLayer
from ..models.traced.refusals import WAY_OUT, name_of, told_with_place
from ..partition.survey import survey
from ..pipeline.cell import BuiltLayer
from ..tasks.base import Task
from .module_itself import COPIES, LARGEST, SMALLEST, Compared, Given, Loss, ModuleFailed, compare, maker_of

KEPT = 24 * 3600.0  # seconds for which a comparison holds: files that the module reads may change
USUALLY = (
    "A trace loses what forward changes in the module (counts, values kept, parameters and buffers made or replaced), "
    "memory that two tensors share (use .clone(), or one nn.Parameter), what an autograd function changes in place, "
    "what Python and numpy draw (use torch.rand, and multiply by it in place of `if`), and zeros that torch's "
    "nn.TransformerEncoder puts on padding in evaluation (enable_nested_tensor=False)"
)
TRUSTED = (
    "compare a smaller one with the same code, by what its arguments are called; model.trust=true then trains this"
)
PLAIN = (bool, int, float, str, type(None))  # values that code branches on
OURS = ("gpipe_cli.models.traced", "gpipe_cli.pipeline", "gpipe_cli.comparison")


@dataclass(frozen=True)
class ModuleReport:
    """Says how the traced layers compare with the module itself.

    Attributes:
        line: one sentence about it.
        agrees: True if they are the same; None where they were not compared.
        fewest: examples that a micro-batch must have.
        shortest: tokens that a text must have.
    """

    line: str
    agrees: bool | None
    fewest: int = 1
    shortest: int = 1


def is_traced(builders: Sequence[LayerBuilder]) -> bool:
    """Returns whether the model is a traced module."""
    return isinstance(builders[0].build, LayerMaker)


def given_by(settings: Settings, task: Task, micro_batches: Sequence[MicroBatch]) -> Given:
    """Returns the micro-batches, loss and optimizer that a run gives to both sides."""
    groups = Groups(settings.optimizer)

    def optimizer(named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
        for name, parameter in named:
            if groups.freezes(groups.key(name, parameter.shape)):
                parameter.requires_grad_(False)
        return build_optimizer(settings.optimizer, groups.divided(named), settings.seed)

    return Given(micro_batches, mean_loss(task), optimizer)


def key_of(settings: Settings) -> list[Any]:
    """Returns what a comparison depends on beside code, shapes and releases, for `compare_with_module`."""
    model = {name: value for name, value in settings.model.items() if name not in ("example", "autocast", "trust")}
    return [model, settings.task, settings.optimizer, settings.precision.autocast]


def key_of_module(builders: Sequence[LayerBuilder]) -> list[Any] | None:
    """Returns the same for a module of a loop of one's own, its parts with their plain values; None in a notebook."""
    if not hasattr(sys.modules["__main__"], "__file__"):  # no file tells when the code changes
        return None
    traced_from = maker_of(builders[0]).traced_from
    module = traced_from.constructor()
    values = [{name: value for name, value in vars(part).items() if type(value) in PLAIN} for part in module.modules()]
    return [repr(module), values, traced_from.autocast]


def mean_loss(task: Task) -> Loss:
    """Returns the loss of a micro-batch, for each unit of its weight."""
    return lambda outputs, targets: task.loss(outputs, targets)[0] / (task.weight(targets) or 1.0)


def compare_at_start(
    builders: Sequence[LayerBuilder], given: Given, key: Sequence[Any] | None, say: Callable[[str], None]
) -> list[int]:
    """Compares a traced module with itself.

    Args:
        key: see `compare_with_module`.
        say: receives a line about what was compared.

    Returns:
        the fewest examples that a micro-batch may have, and the fewest tokens of a text: arguments of `refuse_fewer`.

    Raises:
        ConfigurationError: they differ, or could not be compared and the user does not trust them.
    """
    report, traced_from = compare_with_module(builders, given, key), maker_of(builders[0]).traced_from
    name = name_of(traced_from.constructor)
    if report.agrees is False:
        raise ConfigurationError(
            f"{name}: its layers, traced, do not compute what the module itself does: {report.line}. "
            f"{USUALLY}; {WAY_OUT}"
        )
    if report.agrees is None and not traced_from.trusted:
        raise ConfigurationError(f"{name}: {report.line}. What tracing got wrong would train in silence: {TRUSTED}")
    say(f"the module itself: {report.line}")
    return [report.fewest, report.shortest]


def refuse_fewer(layers: Sequence[BuiltLayer], fewest: int, shortest: int) -> None:
    """Makes the first layer of a traced module refuse smaller micro-batches, on the worker that has it."""
    for layer in layers:
        if layer.index == 0 and isinstance(layer.module, TracedLayer):
            layer.module.require(fewest, shortest)


def compare_with_module(builders: Sequence[LayerBuilder], given: Given, key: Sequence[Any] | None) -> ModuleReport:
    """Compares the layers of a traced module with the module itself, on the CPU, unless that was done within a day.

    Args:
        key: what the result depends on beside the code that is loaded, shapes and releases; None: nothing is kept.

    Raises:
        DiskError: the cache cannot be written.
    """
    file = None if key is None else _file(builders, given, key)
    if file is not None and (kept := _kept(file)) is not None:
        return kept
    if (report := _compared(builders, given)).agrees and file is not None:
        with writing_cache(file.parent):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps(asdict(report)))
    return report


def _compared(builders: Sequence[LayerBuilder], given: Given) -> ModuleReport:
    parameters, free = sum(survey(builders).sizes), free_memory()
    needed = parameters * 4 * COPIES
    if needed > free:
        short = f"{COPIES} times its {parameters:,} parameters take {needed / 1e9:.1f} GB, {free / 1e9:.1f} are free"
        return ModuleReport(f"not compared: {short}", None)
    try:
        return _report(compare(builders, given))
    except ModuleFailed as error:
        said = told_with_place(error.__cause__ or error)
        return ModuleReport(f"DIFFERENT: the module itself fails where its layers do not: {said}", False)
    except Exception as error:
        return ModuleReport(f"not compared: {told_with_place(error)}: {error.__cause__ or ''}", None)


def _report(compared: Compared) -> ModuleReport:
    found, decided = compared.all, f"; in float64, for before {compared.narrow}" if compared.narrow else ""
    what = f"{found.compared} outputs, gradients, buffers and updated weights of calls in training and in evaluation"
    if found.beyond:
        named = "; ".join(map(str, found.beyond[:3]))
        return ModuleReport(f"DIFFERENT in {len(found.beyond)} of {what}: {named}", False)
    same = f"the same but for rounding, at most {found.worst}" if found.relative else "the same bits"
    alone = {"one example": compared.fewest, "texts of one token": compared.shortest}
    other = " or ".join(name for name, least in alone.items() if least > 1)
    refused = f"; with {other} they differ, and the run refuses such micro-batches" if other else ""
    return ModuleReport(f"{same} ({what}{decided}){refused}", True, compared.fewest, compared.shortest)


# -- kept --------------------------------------------------------------------------------------------------------------


def _file(builders: Sequence[LayerBuilder], given: Given, key: Sequence[Any]) -> Path:
    """Returns the file that exists where both were the same for this code, these arguments and these releases."""
    micro_batches = [given.call(which, 0) for which in (SMALLEST, LARGEST)]
    shapes = [[f"{tensor.dtype} {tensor.shape}" for side in one for tensor in side] for one in micro_batches]
    names = [builder.name for builder in builders]
    releases = sorted(release.name for folder in sys.path for release in Path(folder).glob("*.dist-info"))
    text = json.dumps([*key, shapes, names, releases, sys.version], sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode())
    for file in sorted({*_code()}):
        digest.update(file.read_bytes())
    return cache_folder(None) / "compared" / f"{digest.hexdigest()[:32]}.json"


def _kept(file: Path) -> ModuleReport | None:
    """Returns the report in a file, with its age; None without one that is whole and young enough."""
    with suppress(FileNotFoundError, DamagedJson):
        report, age = read_json(file, ModuleReport), time.time() - file.stat().st_mtime
        if 0 <= age < KEPT:
            return replace(report, line=f"{report.line}, as compared {age / 3600:.1f} hours ago")
    return None


def _code() -> Iterator[Path]:
    """Yields the files of all loaded code that no release stands for, and of ours what decides."""
    for name, module in [*sys.modules.items()]:
        file = Path(getattr(module, "__file__", None) or "")
        installed = "site-packages" in file.parts or file.is_relative_to(sysconfig.get_paths()["stdlib"])
        others = name.partition(".")[0] == "gpipe_cli" and not name.startswith(OURS)
        if file.suffix == ".py" and not installed and not others and file.exists():
            yield file
