"""Tells how a traced model compares with the module itself, at the start of a run and in gpipe-verify.

What was found the same is kept on disk under a digest of all that it depends on, so that a module pays for it once.
"""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from ..config import Settings
from ..cpu import free_memory
from ..data.cache import writing_cache
from ..disk import cache_folder, write_whole
from ..errors import ConfigurationError
from ..json_files import DamagedJson, read_json
from ..layers import LayerBuilder
from ..micro_batch import MicroBatch
from ..models.traced.layers import LayerMaker, TracedLayer
from ..models.traced.refusals import WAY_OUT, name_of, told_with_place
from ..partition.cost import count_parameters, layer_costs
from ..pipeline.cell import BuiltLayer
from ..tasks.base import Task
from .build import build_optimizer
from .groups import Groups
from .module_itself import COPIES, Compared, Given, Loss, ModuleFailed, compare, maker_of

LONGEST = 8.0  # seconds that a comparison at a start may take, where tracing did not take longer
TRAINING, EVALUATION = 7, 2  # forwards' worth of one example on both sides: one side computes its forward again
FLOPS, PARAMETERS = 4e10, 2.5e6  # a second, of one core: parameters constructed, trained and compared on both sides
SMALLER = "a smaller one with the same code, as by model.module.n_layer=2 or what its arguments are called"
USUALLY = (
    "A trace loses what forward changes in the module (counts, values kept, parameters and buffers made or replaced), "
    "memory that two tensors share (use .clone(), or one nn.Parameter), what an autograd function changes in place, "
    "hooks on gradients, and what Python and numpy draw (use torch.rand, and multiply by it in place of `if`)"
)
OURS = ("gpipe_cli.models.traced", "gpipe_cli.pipeline", "gpipe_cli.factory.module_itself")


@dataclass(frozen=True)
class ModuleReport:
    """Says how the traced layers compare with the module itself.

    Attributes:
        line: in one sentence.
        agrees: None where they were not compared.
        fewest: examples that a micro-batch must have.
    """

    line: str
    agrees: bool | None
    fewest: int = 1


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


def mean_loss(task: Task) -> Loss:
    """Returns the loss of a micro-batch, for each unit of its weight."""
    return lambda outputs, targets: task.loss(outputs, targets)[0] / (task.weight(targets) or 1.0)


def compare_at_start(
    builders: Sequence[LayerBuilder],
    given: Given,
    settings: Settings | None,
    say: Callable[[str], None],
    warn: Callable[[str], None],
) -> int:
    """Compares a traced module with itself where that takes no longer than tracing did, or a few seconds.

    Args:
        settings: of the run; None in a loop of one's own, where nothing is kept.
        say, warn: receive a line about what was compared, or not.

    Returns:
        the fewest examples that a micro-batch may have.

    Raises:
        ConfigurationError: they differ.
    """
    known = settings is not None and _kept(_file(builders, given, settings)) is not None
    if not known and seconds_of(builders, given) > max(LONGEST, maker_of(builders[0]).seconds):
        way = f"gpipe-verify with the same words compares it once for all starts, or {SMALLER}"
        warn(
            "the module itself: NOT COMPARED, as it is too large for a start: what tracing got wrong would train in "
            f"silence. {'Try a smaller one with the same code' if settings is None else way}"
        )
        return 1
    report = _compared(builders, given) if settings is None else compare_with_module(builders, given, settings)
    if report.agrees is False:
        raise ConfigurationError(
            f"{name_of(maker_of(builders[0]).traced_from.constructor)}: its layers, traced, do not compute what the "
            f"module itself does: {report.line}. {USUALLY}; {WAY_OUT}"
        )
    (warn if report.agrees is None else say)(f"the module itself: {report.line}")
    return report.fewest


def refuse_fewer(layers: Sequence[BuiltLayer], examples: int) -> None:
    """Makes the first layer of a traced module refuse micro-batches of fewer examples, on the worker that has it."""
    for layer in layers:
        if layer.index == 0 and isinstance(layer.module, TracedLayer) and examples > 1:
            layer.module.require(examples)


def seconds_of(builders: Sequence[LayerBuilder], given: Given) -> float:
    """Returns about how many seconds a comparison takes on one core."""
    inputs, _ = given.call("T", 0)
    costs = layer_costs(builders, inputs, "flops")
    forwards = (TRAINING * given.examples("TLS") + EVALUATION * given.examples("E")) / len(inputs[0])
    return forwards * sum(layer.cost for layer in costs) / FLOPS + sum(layer.parameters for layer in costs) / PARAMETERS


def compare_with_module(builders: Sequence[LayerBuilder], given: Given, settings: Settings) -> ModuleReport:
    """Compares the layers of a traced module with the module itself, on the CPU, unless it is known that they agree.

    Raises:
        DiskError: the cache cannot be written.
    """
    file = _file(builders, given, settings)
    if (kept := _kept(file)) is not None:
        return kept
    if (report := _compared(builders, given)).agrees:
        with writing_cache(file.parent):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps(asdict(report)))
    return report


def _compared(builders: Sequence[LayerBuilder], given: Given) -> ModuleReport:
    parameters, free = sum(count_parameters(builders)), free_memory()
    needed = parameters * 4 * COPIES
    if needed > free:
        short = f"{COPIES} times its {parameters:,} parameters take {needed / 1e9:.1f} GB, {free / 1e9:.1f} are free"
        return ModuleReport(f"not compared: {short}; verify {SMALLER}", None)
    try:
        return _report(compare(builders, given))
    except ModuleFailed as error:
        said = told_with_place(error.__cause__ or error)
        return ModuleReport(f"DIFFERENT: the module itself fails where its layers do not: {said}", False)
    except Exception as error:
        return ModuleReport(f"not compared: {told_with_place(error)}", None)


def _report(compared: Compared) -> ModuleReport:
    found, decided = compared.all, f"; in float64, for in float32 {compared.float32}" if compared.float32 else ""
    what = f"{found.compared} outputs, gradients, buffers and updated weights of calls in training and in evaluation"
    if found.beyond:
        named = "; ".join(map(str, found.beyond[:3]))
        return ModuleReport(f"DIFFERENT in {len(found.beyond)} of {what}: {named}", False)
    alone = "; with one example they differ, and the run refuses such micro-batches" if compared.fewest > 1 else ""
    same = f"the same but for rounding, at most {found.worst}" if found.relative else "the same bits"
    return ModuleReport(f"{same} ({what}{decided}){alone}", True, compared.fewest)


# -- kept --------------------------------------------------------------------------------------------------------------


def _file(builders: Sequence[LayerBuilder], given: Given, settings: Settings) -> Path:
    """Returns the file that exists where both were the same for this code, these arguments and these releases."""
    shapes = [[str(tensor.shape) for side in given.call(which, 0) for tensor in side] for which in "SL"]
    names = [builder.name for builder in builders]
    keys = [{**settings.model, "example": None}, settings.task, settings.optimizer, shapes, names]
    releases = sorted(release.name for folder in sys.path for release in Path(folder).glob("*.dist-info"))
    digest = hashlib.sha256(json.dumps([*keys, releases, sys.version], sort_keys=True, default=str).encode())
    for file in sorted({*_code()}):
        digest.update(file.read_bytes())
    return cache_folder(None) / "compared" / f"{digest.hexdigest()[:32]}.json"


def _kept(file: Path) -> ModuleReport | None:
    """Returns the report in a file; None without one that is whole."""
    with suppress(FileNotFoundError, DamagedJson):
        return read_json(file, ModuleReport)
    return None


def _code() -> Iterator[Path]:
    """Yields the files of all loaded code that no release stands for, and of ours what decides."""
    for name, module in [*sys.modules.items()]:
        file = Path(getattr(module, "__file__", None) or "")
        installed = "site-packages" in file.parts or file.is_relative_to(sysconfig.get_paths()["stdlib"])
        others = name.partition(".")[0] in ("gpipe_cli", "__main__") and not name.startswith(OURS)
        if file.suffix == ".py" and not installed and not others and file.exists():
            yield file
