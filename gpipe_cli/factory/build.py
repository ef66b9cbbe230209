"""Makes the objects that the configuration names by `_target_`: model, data source, task, optimizer, lr schedule.

The only place where a `_target_` is instantiated. It draws from generators seeded by the run's seed and the section, so
that what it makes is the same in every process and in every run.
"""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from inspect import Parameter, isclass, signature
from typing import Any, cast

import torch
from hydra.utils import get_object, instantiate
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ..config import FREE_FORM, GROUP, PrecisionConfig, Settings
from ..data.source import Source
from ..errors import ConfigurationError, Problems, place_in_users_code
from ..gpus import GPU
from ..layers import LayerBuilder, checked_layers
from ..models.traced.module import autocast_of
from ..pipeline.randomness import SECTION, seeded
from ..tasks.base import Task
from ..tasks.own_loss import LossFunctionTask
from ..typed_section import read_values, unknown_key
from .groups import GroupKey, Groups
from .wrappers import ChangedSource, CheckedTask, widened, with_targets

LINES_SHOWN = 2  # of an exception's message
NOT_LOCATED = re.compile(r"Error locating target '(?P<target>[^']*)'(?:.*\nfull_key: (?P<inner>\S+))?", re.DOTALL)


def build_model(section: Mapping[str, Any], seed: int = 0) -> list[LayerBuilder]:
    """Calls ``model._target_`` with the section's other keys, and ``seed`` if it takes one, and returns its layers.

    Raises:
        ConfigurationError: it failed, or did not return a list of `LayerBuilder`s with distinct names.
    """
    model = _instantiate("model", _with_seed(section, seed), seed)
    return list(checked_layers(model, f"model._target_={section['_target_']} must return"))


def build_source(section: Mapping[str, Any], seed: int, task: Mapping[str, Any] | None = None) -> Source:
    """Makes ``data._target_``, the source of mini-batches; it gets ``seed`` if it takes one and the section has none.

    Args:
        task: the section; with the key ``targets_become`` the targets are inputs of the model, too.

    Raises:
        ConfigurationError: it failed, or is no `Source`.
    """
    source: Any = _instantiate("data", _with_seed(section, seed), seed)
    _require_subclass("data", section, source, Source)
    if (task or {}).get("targets_become"):
        source = ChangedSource(source, with_targets)
    if torch.get_default_dtype() == torch.float64:  # as gpipe-verify may compute
        source = ChangedSource(source, widened)
    return cast(Source, source)


def build_task(section: Mapping[str, Any], seed: int = 0, warn: Callable[[str], None] = warnings.warn) -> Task:
    """Makes ``task._target_``, which computes loss and metrics. Its results are checked at every call.

    The target may also be a function of outputs and targets that returns a loss, or make one, as torch.nn's losses do.

    Args:
        warn: gets one line if the loss of such a function depends on M.
    """
    is_loss = _arguments_left(section) == 2
    task = _instantiate("task", {**section, "_partial_": True} if is_loss else section, seed)
    if is_loss or (callable(task) and not isinstance(task, Task)):
        task = LossFunctionTask(task, warn=warn)
    _require_subclass("task", section, task, Task)
    return cast(Task, CheckedTask(task, section["_target_"]))


def _arguments_left(section: Mapping[str, Any]) -> int:
    """Returns how many positional arguments the section leaves to the function's caller; 0 if it names a class."""
    named = get_object(section["_target_"]) if (given := parameters_of(section)) else None
    needed = [one for name, one in given.items() if name not in section and one.default is one.empty]
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return 0 if isclass(named) else sum(one.kind in positional for one in needed)


def build_optimizer(
    section: Mapping[str, Any], members: Mapping[GroupKey, Sequence[nn.Parameter]], seed: int = 0
) -> torch.optim.Optimizer:
    """Makes ``optimizer._target_`` over this worker's parameters; without any it does nothing.

    Args:
        members: the parameters by the entries of `optimizer.groups` that apply to them (`Groups.key`). Every worker has
            the same keys, some without parameters, so that the lr schedule's state fits any cut.

    Raises:
        ConfigurationError: the optimizer does not take a key.
    """
    _refuse_unknown_in_groups(section)
    groups, own = Groups(section), {key: value for key, value in section.items() if key != "groups"}
    if not groups.entries:
        parameters: list[Any] = list(members.get((), ())) or [nn.Parameter(torch.zeros(1))]
    else:
        of_keys = {(): (), **members}
        parameters = [{"params": list(of_keys[key]), **groups.settings(key)} for key in sorted(of_keys)]
    return cast(torch.optim.Optimizer, _instantiate("optimizer", own, seed, parameters))


def _refuse_unknown_in_groups(section: Mapping[str, Any]) -> None:
    """Refuses keys that are no argument of the optimizer: torch would pass over them in silence."""
    known = {key for part in (section, section.get("rest") or {}) for key in parameters_of(part)} - {"params", "rest"}
    problems = Problems()
    for number, entry in enumerate(section.get("groups") or () if known else ()):
        prefix = f"optimizer.groups[{number}]."
        names = [prefix + key for key in (*GROUP, *known)]
        problems += [unknown_key(prefix + key, names) for key in entry if prefix + key not in names]
    problems.refuse()


def build_lr_schedule(section: Mapping[str, Any], optimizer: torch.optim.Optimizer, seed: int = 0) -> LRScheduler:
    """Makes ``lr_schedule._target_``, the learning rate over the steps.

    Raises:
        ConfigurationError: it is no learning rate schedule, does not take its keys, or its `step` needs an argument.
    """
    lr_schedule = _instantiate("lr_schedule", section, seed, optimizer)
    _require_subclass("lr_schedule", section, lr_schedule, LRScheduler)
    needed = [name for name, given in signature(lr_schedule.step).parameters.items() if given.default is given.empty]
    if needed:
        raise ConfigurationError(
            f"lr_schedule._target_={section['_target_']} needs {needed[0]} at every step: use one that counts steps, "
            "such as lr_schedule=cosine; trainer.patience ends a run that no longer gets better"
        )
    return cast(LRScheduler, lr_schedule)


def try_lr_schedule(settings: Settings) -> None:
    """Makes an optimizer without parameters and its learning-rate schedule, and takes a step of each.

    Raises:
        ConfigurationError: one cannot be made, or a value shows its fault only when the rate is computed.
    """
    optimizer = build_optimizer(settings.optimizer, {})
    schedule = build_lr_schedule(settings.lr_schedule, optimizer)
    try:
        optimizer.step()
        schedule.step()
    except Exception as error:
        raise ConfigurationError(explain("lr_schedule", settings.lr_schedule, error)) from error


def build_autocast(precision: PrecisionConfig, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Chooses a GPU's kernels, and returns a function that makes the context in which forward runs (`autocast_of`)."""
    choose_kernels(precision, device)
    return autocast_of(precision.autocast, device.type)


def boundary_type_of(precision: PrecisionConfig) -> torch.dtype | None:
    """Returns the type of floating-point tensors between two layers; None: as a layer returns them."""
    return None if precision.boundaries is None else cast(torch.dtype, getattr(torch, precision.boundaries))


def choose_kernels(precision: PrecisionConfig, device: torch.device) -> None:
    """Tells torch which kernels a GPU may use: with TF32 or without, and deterministic ones only or all.

    `warn_only` stays off, because attention's backward would not be deterministic (torch's notes on reproducibility).
    New memory is not filled: that costs time, and matters only to layers that read what nobody wrote.
    """
    if device.type == GPU:
        torch.set_float32_matmul_precision("high" if precision.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = precision.tf32
        torch.use_deterministic_algorithms(precision.deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # of its class


TRACKERS = {"wandb": "gpipe_cli.metrics.trackers.WandB"}


def build_trackers(entries: Sequence[str | Mapping[str, Any]]) -> list[Any]:
    """Makes the trackers of `logging.trackers`: "wandb", or a section with a ``_target_``.

    Raises:
        ConfigurationError: one could not be made.
    """
    made = []
    for entry in entries:
        section = {"_target_": TRACKERS[entry]} if isinstance(entry, str) else entry
        try:
            made.append(instantiate(section, _convert_="all"))
        except Exception as error:
            raise ConfigurationError(explain("logging.trackers", section, error)) from error
        if missing := [name for name in ("start", "log", "picture", "finish") if not hasattr(made[-1], name)]:
            raise ConfigurationError(f"logging.trackers: {section['_target_']} makes no tracker: no {missing[0]}")
    return made


def refuse_wrong_values(settings: Settings) -> None:
    """Checks the values of all sections with a `_target_` of ours against its signature, before anything is made.

    Raises:
        ConfigurationError: it has one line for each wrong value.
    """
    problems = Problems()
    for key in FREE_FORM:
        _fitting(key, getattr(settings, key), problems)
    problems.refuse()


def _fitting(key: str, section: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    """Returns the section with its values checked against the signature, if its `_target_` is ours.

    Each value that does not fit adds a line to ``problems``.
    """
    if not section["_target_"].startswith("gpipe_cli.") or not parameters_of(section):
        return dict(section)
    named = signature(get_object(section["_target_"]), eval_str=True).parameters
    plain = {name: one.annotation for name, one in named.items() if not _is_target(section.get(name))}
    return {**section, **read_values(plain, section, f"{key}.", problems)}


def _is_target(value: object) -> bool:
    return isinstance(value, Mapping) and "_target_" in value


def _instantiate(key: str, section: Mapping[str, Any], seed: int, *arguments: object) -> Any:
    """Calls a section's `_target_` with its other keys, under a seed of its own.

    Args:
        key: name of the section.
        arguments: positional ones, before the keys.

    Raises:
        ConfigurationError: a value does not fit, or the call fails.
    """
    problems = Problems()
    section = _fitting(key, section, problems)
    problems.refuse()
    try:
        with seeded(SECTION, seed, FREE_FORM.index(key)):
            return instantiate(section, *arguments, _convert_="all")
    except ConfigurationError:
        raise
    except Exception as error:
        if isinstance(error.__cause__, ConfigurationError):
            raise error.__cause__ from None
        raise ConfigurationError(explain(key, section, error)) from error


def _with_seed(section: Mapping[str, Any], seed: int) -> Mapping[str, Any]:
    """Returns the section with ``seed``, if its `_target_` takes one and the section has none."""
    return {**section, "seed": seed} if "seed" not in section and "seed" in parameters_of(section) else section


def parameters_of(section: Mapping[str, Any]) -> Mapping[str, Parameter]:
    """Returns the parameters of ``_target_``; none if it cannot be found, which `_instantiate` will report."""
    try:
        return signature(get_object(section["_target_"])).parameters
    except Exception:
        return {}


def _require_subclass(key: str, section: Mapping[str, Any], made: object, base: type) -> None:
    if not isinstance(made, base):
        raise ConfigurationError(
            f"{key}._target_={section['_target_']} is no subclass of {base.__module__}.{base.__qualname__}"
        )


def explain(key: str, section: Mapping[str, Any], error: Exception) -> str:
    """Returns one sentence on why a section could not be made, with the cause's place in the user's own code.

    Args:
        key: name of the section, such as "model".
        section: its `_target_` and the keys that were passed on.
        error: raised by Hydra's `instantiate`; it wraps the cause, and does not always quote all of it.
    """
    target, cause = section.get("_target_"), error.__cause__ or error
    not_located = NOT_LOCATED.match(str(error))
    if not_located is None:
        return f"{key}._target_={target} could not be made from the keys of `{key}`: {_summary(cause)}"
    cause, target, inner = cause.__cause__ or cause, not_located["target"], not_located["inner"]
    if inner:  # a section inside this one
        key = f"{key}.{inner}"
    if isinstance(cause, ModuleNotFoundError) and cause.name and f"{target}.".startswith(f"{cause.name}."):
        return f"{key}._target_={target} was not found: {_missing(cause.name)}"
    return f"{key}._target_={target} could not be imported: {_summary(cause)}"


def _missing(module: str) -> str:
    """Returns the words that say a module is not found; ``module`` is its dotted name."""
    parent, dot, last = module.rpartition(".")
    return f"{parent} has no {last}" if dot else f"there is no module {last} here or on the PYTHONPATH"


def _summary(error: BaseException) -> str:
    """Returns the exception in a line or two; its type and place only where it was raised in the user's own code."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = "\n".join(lines[:LINES_SHOWN]) or type(error).__name__
    place = place_in_users_code(error)
    return message if place is None else f"{type(error).__name__}: {message} ({place})"
