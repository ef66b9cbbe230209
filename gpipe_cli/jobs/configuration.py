"""Makes the configuration of a command line: Hydra composes it, and it is checked. The first mistake of a word is told.

A value is checked with all others, so those are told together. No torch is imported.
"""

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

import gpipe_cli.conf
from gpipe_cli.config import FREE_FORM, ROUND_ROBIN, PipelineConfig, Settings, known_keys
from gpipe_cli.cpu import usable_cores
from gpipe_cli.data.images.layout import class_folder, folders_in, unsplit
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.gpus import count_gpus
from gpipe_cli.jobs import torchrun, trust
from gpipe_cli.launch.stop import stop_noted
from gpipe_cli.schedule.own_lists import is_file, read_lists, why_not_for
from gpipe_cli.terminal.text import plural
from gpipe_cli.typed_section import nearest, shown, typed, unknown_key

# Groups whose option custom is for a `_target_` of the user's own: it has no keys of another function's.
CUSTOM = ("model", "data", "task", "optimizer", "lr_schedule")
# Words and keys of earlier releases, and what to type now.
RENAMED = {
    **{f"{group}=own": f"{group}=custom" for group in CUSTOM},
    "model=layers": "model=custom",
    "optimizer=muon_language_model": "optimizer=muon_tables",
    "lr_schedule=cosine_short": "lr_schedule=cosine_warmup_20",
    "pipeline=kept": "pipeline=laptop",
    "pipeline.devices": "pipeline.worker_devices",
    "checkpoint=default": "nothing: the section checkpoint is no group any more",
    "logging=default": "nothing: the section logging is no group any more",
}
LONGEST_NAME = 100  # bytes of a folder: file systems take 255, and people read less
LONGEST = 300  # characters of a library's message
GLOBAL = ("experiment", "debug")  # groups whose files change keys of any section


def count_folders(root: str | None, folder: str) -> int | str:
    """Returns the number of classes of images, which are folders below ``root`` (`${gpipe_folders:...}` in conf/data).

    Without any it is `MISSING`, Hydra's mark of a value that must be given.

    Args:
        folder: name of the split's folder, as "train".
    """
    return len(folders_in(class_folder(Path(root or os.devnull).expanduser(), folder))) or str(MISSING)


def folder_name(*words: str | None) -> str:
    """Returns the first word that is not empty, as part of a folder's name (`${gpipe_name:...}` in conf/train.yaml)."""
    word = re.sub(r"(^|,)\++", r"\1", str(next((word for word in words if word), "run")))
    return re.sub(r"[^\w.,=+\-\[\]]+", "_", word).encode()[:LONGEST_NAME].decode(errors="ignore")


CONF = Path(next(iter(gpipe_cli.conf.__path__)))  # the YAML files, in the clone or in the installed package
OmegaConf.register_new_resolver("gpipe_folders", count_folders, replace=True)
OmegaConf.register_new_resolver("gpipe_name", folder_name, replace=True)


@dataclass(frozen=True)
class Prepared:
    """Holds a configuration that has passed all checks.

    Attributes:
        config: plain values, with the number of workers in place of "auto".
        line: a line about the number of workers, printed before the run begins.
    """

    config: dict[str, Any]
    settings: Settings
    line: str


def for_hydra(words: Sequence[str]) -> list[str]:
    """Returns the overrides as Hydra must read them.

    A typed `model._target_` alone chooses `model=custom`, and likewise in the other groups of `CUSTOM`. Beside a typed
    `_target_` no key needs a plus.

    Raises:
        ConfigurationError: a word is of an earlier release, or a group's option is null or a number.
    """
    keys = {word.partition("=")[0] for word in words}
    if old := next((word for word in [*words, *keys] if word in RENAMED), None):
        raise ConfigurationError(f"{old} has another name by now: type {RENAMED[old]}")
    words = [word for word in words if word not in ("experiment=null", "debug=null")]  # null is their default
    for group, _, option in (word.partition("=") for word in words):
        if re.fullmatch(r"null|true|false|[-+.\d]*", option, re.IGNORECASE) and (CONF / group).is_dir():
            raise ConfigurationError(f"{group}={option}: {group} needs one of {', '.join(_options(group))}")
    chosen = [f"{group}=custom" for group in CUSTOM if f"{group}._target_" in keys and group not in keys]
    own = {word.partition(".")[0] for word in words if "_target_" in word}
    return chosen + [f"++{word}" if word.partition(".")[0] in own.intersection(FREE_FORM) else word for word in words]


def composed(config_name: str, words: Sequence[str], folder: str | None = None) -> DictConfig:
    """Composes a configuration, without Hydra's own node; see `composed_with_hydra`."""
    return without_hydra(composed_with_hydra(config_name, words, folder))


def without_hydra(config: DictConfig) -> DictConfig:
    """Returns a composed configuration without Hydra's own node."""
    return OmegaConf.masked_copy(config, cast(list[str], [key for key in config if key != "hydra"]))


def composed_with_hydra(config_name: str, words: Sequence[str], folder: str | None = None) -> DictConfig:
    """Composes a configuration.

    Args:
        config_name: the YAML file of conf/ that holds it.
        words: overrides as typed.
        folder: the folder of the user's own YAML files; None: there is none.

    Raises:
        ConfigurationError: a word or a file is wrong.
    """
    if folder and not Path(folder).is_dir():
        raise ConfigurationError(f"--config-dir {folder}: there is no such folder")
    search = [f"hydra.searchpath=[file://{Path(folder).absolute()}]"] if folder else []
    GlobalHydra.instance().clear()
    try:
        with stop_noted(), initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose(config_name, [*for_hydra(words), *search], return_hydra_config=True)
    except Exception as error:
        raise ConfigurationError(in_one_line(error, words)) from error
    if group := next((group for group in GLOBAL if group in config), None):
        raise ConfigurationError(
            f"{group}={config.hydra.runtime.choices[group]}: its file changes nothing; it has to begin with the line "
            "# @package _global_ (without a byte order mark before it)"
        )
    return config


def prepare(config: DictConfig, trains: bool = False, trusted: Sequence[str] | None = None) -> Prepared:
    """Resolves and checks a composed configuration, and chooses the number of workers.

    Modules in the current directory that it names become importable.

    Args:
        trains: True also looks for the files of the data.
        trusted: the `_target_`s that may lie in the current directory; None: all.

    Raises:
        ConfigurationError: it has one line for each wrong key or value.
    """
    values = plain(config)
    settings = Settings.from_config(values)
    if trains:
        require_data(settings)
    trust.look_here(trust.targets(values) if trusted is None else trusted)
    pipeline = settings.pipeline
    workers, line = choose_workers(pipeline, settings.launch.inline, torchrun.world_size())
    chosen: dict[str, Any] = {"workers": workers}
    if pipeline.workers != "auto" and "replicas" in pipeline.auto:  # nothing is left to choose
        chosen["replicas"] = (torchrun.world_size() or workers) // workers
    values["pipeline"] = {**values["pipeline"], **chosen}
    left = [key for key in pipeline.auto if key not in chosen]
    settings = replace(settings, pipeline=replace(pipeline, **chosen, auto=left))
    return Prepared(values, settings, line)


def resolved(config: DictConfig, key: str) -> str:
    """Returns a value of a composed configuration as text, as of `hydra.run.dir`.

    Raises:
        ConfigurationError: it refers to nothing.
    """
    try:
        return str(OmegaConf.select(config, key))
    except OmegaConfBaseException as error:
        raise ConfigurationError(in_one_line(error)) from error


def plain(config: DictConfig) -> dict[str, Any]:
    """Returns a composed configuration as plain values, interpolations resolved.

    Raises:
        ConfigurationError: a value is missing, or refers to nothing.
    """
    try:
        return dict(OmegaConf.to_container(config, resolve=True, throw_on_missing=True))  # type: ignore[arg-type]  # its keys are texts
    except OmegaConfBaseException as error:
        raise ConfigurationError(in_one_line(error)) from error


# -- what this machine has ---------------------------------------------------------------------------------------------


def require_data(settings: Settings) -> None:
    """Refuses files and folders of our data sources that are not there.

    Raises:
        ConfigurationError: it names the key and the path.
    """
    data, kinds = settings.data, ("gpipe_cli.data.parallel.", "gpipe_cli.data.images.source.", "gpipe_cli.data.text.")
    if not data["_target_"].startswith(kinds):
        return
    if data.get("root") in (None, "") and not data.get("train"):  # an unset variable of the shell is ""
        raise ConfigurationError(
            "data.root is not set: type data.root=FOLDER, the folder that holds the data (docs/data.md)"
        )
    for key in ("root", "evaluation_root", "tokenizer"):
        names = data[key] if isinstance(data.get(key), list) else [data.get(key)]
        for name in filter(None, names):
            if not os.access(Path(str(name)).expanduser(), os.F_OK):
                raise ConfigurationError(f"data.{key}={shown(data[key])}: there is no {name}")
    two_splits = data.get("dataset") in ("image_folder", "imagenet") and data.get("held_out") is None
    if two_splits and (line := unsplit(Path(str(data["root"])).expanduser(), data["folders"])):
        raise ConfigurationError(line)


def most_workers(pipeline: PipelineConfig) -> tuple[int, str]:
    """Returns the number of workers of one replica that fit this machine, at least one, and its devices in words.

    The devices are GPUs, or the CPU cores that this process may use (`pipeline.device`).
    """
    if gpus := 0 if pipeline.device == "cpu" else count_gpus():
        return max(1, gpus // pipeline.replicas), plural(gpus, "GPU")
    cores = usable_cores()
    return max(1, cores // pipeline.replicas // pipeline.threads), plural(cores, "core")


def choose_workers(pipeline: PipelineConfig, inline: bool, world_size: int | None) -> tuple[int, str]:
    """Returns the number of workers of one replica, and a line about it for the console.

    Args:
        inline: one worker inside the command's process.
        world_size: number of processes of the torchrun job; None if the command starts its own workers.

    Raises:
        ConfigurationError: `world_size` or the lists of a file do not fit the configuration.
    """
    if world_size is not None:
        workers, why = _workers_of_job(pipeline, world_size), f"WORLD_SIZE={world_size}"
    elif inline:
        workers, why = 1, "launch.inline=true"
    elif pipeline.workers == "auto" and is_file(pipeline.schedule):
        workers, why = len(read_lists(pipeline.schedule).lists), pipeline.schedule
    elif pipeline.workers == "auto":
        most, why = most_workers(pipeline)
        workers = pipeline.workers_in(most)
    else:
        workers, why = pipeline.workers, f"pipeline.workers={pipeline.workers}"
    if is_file(pipeline.schedule) and (unfit := why_not_for(pipeline.schedule, pipeline.K, pipeline.M, workers)):
        raise ConfigurationError(unfit)
    replicas = f" × {plural(pipeline.replicas, 'replica')}" if pipeline.replicas > 1 else ""
    cells = "cells to be chosen" if "K" in pipeline.auto else plural(pipeline.K, "cell")
    return workers, f"{cells} on {plural(workers, 'worker')}{replicas} ({why})"


def _workers_of_job(pipeline: PipelineConfig, world_size: int) -> int:
    """Returns the workers of one replica in a torchrun job.

    Raises:
        ConfigurationError: the processes do not fit the configuration.
    """
    replicas, K = pipeline.replicas, pipeline.K
    workers, rest = divmod(world_size, replicas)
    uneven = pipeline.schedule in ROUND_ROBIN and workers and K % workers
    if rest or not 1 <= workers <= K or pipeline.workers not in ("auto", workers) or uneven:
        raise ConfigurationError(
            f"WORLD_SIZE={world_size} does not fit pipeline.workers={pipeline.workers} × pipeline.replicas={replicas} "
            f"and pipeline.K={K}: start torchrun with pipeline.replicas times 1 to {K} processes"
            + (f", a number that divides pipeline.K ({pipeline.schedule})" if uneven else "")
        )
    return workers


# -- what Hydra says ---------------------------------------------------------------------------------------------------


def in_one_line(error: BaseException, words: Sequence[str] = ()) -> str:
    """Returns an error of Hydra or OmegaConf as one line with the words to type instead.

    Args:
        words: those that were typed.
    """
    cause = error.__cause__ or error
    if isinstance(error, RecursionError):
        groups = " ".join(word for word in words if (CONF / word.partition("=")[0]).is_dir())
        return f"{groups}: a YAML file is in its own list of defaults, or in that of one it names there"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _no_such_option(error)
    if isinstance(error, OverrideParseException):
        name, _, value = str(error.override).partition("=")
        return f"could not read {error.override!r}: write key=value, a text as {shlex.join([f'{name}={typed(value)}'])}"
    key = getattr(cause, "full_key", None)
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)):
        match = re.match(r"Could not override '(.+)'", str(error))
        return _no_such_key(match[1] if match else str(key), cause, words)
    if isinstance(cause, MissingMandatoryValue):
        return f"{key} needs a value: type {key}=…"
    if match := re.match(r"(?:Ambiguous value for argument|Sweep parameters) '(.+)'", str(error)):
        return f"{match[1]} is a sweep: give one value (a list has brackets), or, to gpipe-train, type -m too"
    lines = [line.strip() for line in str(cause).splitlines()]
    said = " ".join(line for line in lines if not line.startswith(("object_type", "full_key", "See https")))[:LONGEST]
    return f"{key}: {said}" if key else said or type(cause).__name__


def _no_such_key(key: str, cause: ConfigAttributeError | ConfigKeyError, words: Sequence[str]) -> str:
    """Returns the message that refuses an unknown key and names the nearest keys of its section."""
    missing, parent = str(cause.full_key), cause.parent_node  # of modle.L: modle, and all sections
    section = missing.rpartition(".")[0]
    names = [*parent] if isinstance(parent, Mapping) else []
    if section and not names:
        off = f"{section}=null"
        way = f"leave out {off}" if off in words else f"type {section} as a whole: {section}='{{…}}'"
        return f"there is no key {key}: {section} is null, so it is switched off; {way}"
    known = [f"{section}.{name}" for name in names] if section else [*known_keys(), *GLOBAL]
    return unknown_key(missing, known).replace(missing, key, 1)


def _no_such_option(error: MissingConfigException) -> str:
    """Returns the message that refuses an option which its group does not have."""
    path = (error.missing_cfg_file or "").removesuffix(".yaml")
    group, slash, option = path.rpartition("/") if path.startswith("hydra/") else path.partition("/")
    if not slash:
        return f"there is no {path}.yaml in conf/, nor in the folder of --config-dir"
    options = sorted({*(error.options or ()), *_options(group, re.findall(r"path=file://(.+)", str(error)))})
    near = nearest(option, options) or [name for name in options if name.startswith(f"{option.strip('/')}/")][:3]
    guess = f"did you mean {' or '.join(f'{group}={name}' for name in near)}? " if near else ""
    return f"there is no {group}={option}; {guess}{group} can be: {', '.join(options) or 'nothing'}"


def _options(group: str, more: Iterable[str] = ()) -> list[str]:
    """Returns the options of a group, also those in folders below it. Files named recipe are only parts of options.

    Args:
        more: folders of YAML files beside those of the package.
    """
    found = (path for place in (CONF, *map(Path, more)) for path in (place / group).rglob("*.yaml"))
    names = {str(path).rpartition(f"/{group}/")[2].removesuffix(".yaml") for path in found}
    parts = {f"{name}/" for name in names}  # debug/tiny/ holds parts of debug/tiny.yaml
    return sorted(name for name in names if "recipe" not in name and not name.startswith(tuple(parts)))
