"""Opens a run again, for the commands that use its weights: gpipe-eval, -translate, -generate. Imports no torch.

    run = open_run("runs/NAME", Words(["pipeline.K=4"]))
    run.launch("gpipe_cli.inference.…:main", run.prepared.config, folder, on_event)

The configuration comes from the checkpoint, so a run directory can be moved. Overrides are typed as for gpipe-train.
What depends on the machine is chosen anew unless it is typed: as many workers as there are devices, one replica, and
this machine's cache.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpipe_cli.checkpoint.compatibility import with_vocabulary
from gpipe_cli.checkpoint.files import CheckpointInfo, find, vocabulary_folder
from gpipe_cli.config import TYPED
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.jobs import trust
from gpipe_cli.jobs.configuration import CONF, Prepared, composed, in_one_line, plain, prepare
from gpipe_cli.jobs.job import EntryPoint, launch_program
from gpipe_cli.launch.join import joined
from gpipe_cli.launch.supervisor import OnEvent
from gpipe_cli.terminal.command import Words
from gpipe_cli.terminal.runs import read_run

ANEW: Mapping[str, Any] = {
    "pipeline.workers": "auto",
    "pipeline.replicas": 1,
    "pipeline.partition": "auto",  # recorded sizes may be for another number of cells
    "pipeline.keep": None,  # likewise
    "data.cache_dir": None,  # this machine's, not a folder that a stranger has filled
    "checkpoint.resume": None,
    "checkpoint.init_from": None,
    "launch.inline": False,
}
OTHER_TEXT = {f"data.{key}" for key in ("languages", "pair", "root", "files", "train", "dev", "test")}


@dataclass(frozen=True)
class Reopened:
    """Holds a run that has been opened again.

    Attributes:
        info: the checkpoint.
        prepared: the checked configuration, overrides applied.
        warnings: about newer checkpoints that are damaged.
        named: keys that were typed, and names in `trust=`.
    """

    info: CheckpointInfo
    prepared: Prepared
    warnings: list[str]
    named: Sequence[str]

    def with_data(self, target: str, keys: Sequence[str], **given: Any) -> dict[str, Any]:
        """Returns the configuration with another source of data, which has the run's vocabularies or names of classes.

        Args:
            target: `_target_` of the source.
            keys: keys of the run's own data that it takes; those without a value are left out.
            given: its further arguments.
        """
        data = self.prepared.config["data"]
        taken = {key: data[key] for key in keys if data.get(key) is not None}
        source = {"_target_": target, "vocabularies": str(vocabulary_folder(self.info.run_dir)), **taken, **given}
        return {**self.prepared.config, "data": source}

    def launch(self, entry: str, settings: Mapping[str, Any], folder: Path, on_event: OnEvent, **more: Any) -> Any:
        """Runs an entry point in workers (`launch_program`). A refusal of the configuration names the manifest.

        Args:
            entry: "package.module:function"; it gets ``settings``, the path of the checkpoint, and ``more``.
        """
        config = {"settings": settings, "checkpoint": str(self.info.path.absolute()), **more}
        with self.info.named(self.named):
            return launch_program(EntryPoint(entry), config, folder, on_event)

    def require_named_paths(self) -> None:
        """Refuses to read files that only the checkpoint names (`trust.refuse_unnamed_paths`)."""
        manifest, record = self.info.path / "manifest.json", self.info.run_dir / ".hydra" / "config.yaml"
        is_own = record.is_file() and record.stat().st_uid == os.getuid()
        recorded = read_run(self.info.run_dir).settings if is_own else {}
        trust.refuse_unnamed_paths(self.prepared.config["data"], self.named, recorded, manifest)


def open_run(checkpoint: str, line: Words) -> Reopened:
    """Opens a checkpoint and applies overrides to the configuration recorded in it.

    Args:
        checkpoint: a run directory, or one checkpoint in it.
        line: words of the command line: overrides; `step=`, the checkpoint of a run directory; `trust=`, what the
            checkpoint may call beside gpipe-cli's own code.

    Raises:
        ConfigurationError: there is no such run or checkpoint (CheckpointError), the configuration is wrong, it calls
            code that is not trusted, or torchrun has started this command.
    """
    if joined():
        raise ConfigurationError("it starts its own workers: call it without torchrun")
    words, trusted = line.overrides, line.own.get("trust", ())
    info, warnings = find(Path(checkpoint).expanduser(), line.own.get("step", "last"))
    trust.refuse_interpolations(info.state.configuration, info.path)
    keys = ["data.cache_dir", *(word.partition("=")[0].lstrip("+") for word in words)]  # cache_dir is this machine's
    with info.named(keys):
        config = _with_overrides(info.state.configuration, words)
        if {*keys} & OTHER_TEXT:
            config.data = with_vocabulary(config.data, info)
            keys.append("data.tokenizer")
        names = [*trusted, *trust.typed_names(words)]
        trust.refuse_foreign(plain(config), names, info.path / "manifest.json")
        return Reopened(info, prepare(config, trusted=names), warnings, [*trusted, *keys])


def _with_overrides(recorded: Mapping[str, Any], words: Sequence[str]) -> DictConfig:
    """Returns the recorded configuration with overrides, not resolved.

    Raises:
        ConfigurationError: an override is wrong.
    """
    try:
        overrides = [OverridesParser.create().parse_override(word) for word in words]
        values = [override for override in overrides if not (CONF / override.key_or_group).is_dir()]
        default = composed("train", [str(each.input_line) for each in overrides if each not in values])
        config = OmegaConf.create(_with_new_keys(recorded, plain(default)))
        for group in (override.key_or_group for override in overrides if override not in values):
            config[group] = default[group]
        for key, value in ANEW.items():
            if OmegaConf.select(config, key) is not None:
                OmegaConf.update(config, key, value)
        if sweep := next((override for override in overrides if override.is_sweep_override()), None):
            raise ConfigurationError(f"{sweep.input_line} is a sweep: give one value")
        typed = {override.key_or_group for override in values}
        OmegaConf.set_struct(config, True)
        for override in values:
            key, section = override.key_or_group, override.key_or_group.partition(".")[0]
            own = f"{section}._target_" in typed or override.is_add() or override.is_force_add()
            OmegaConf.update(config, key, override.value(), force_add=own)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigurationError(in_one_line(error)) from error
    return config


def _with_new_keys(recorded: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the recorded values, without keys that exist no longer and with defaults for keys added since.

    Defaults are added in the typed sections only: the functions behind model, data and task have their own.
    """
    config = {key: recorded.get(key, value) for key, value in defaults.items()}
    for section, kind in TYPED.items():
        known = {field.name for field in fields(kind)}
        saved = values if isinstance(values := recorded.get(section), Mapping) else {}
        config[section] = {**defaults[section], **{key: value for key, value in saved.items() if key in known}}
    return config
