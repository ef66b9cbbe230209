"""Opens a run again, for the commands that use its weights: gpipe-eval, -translate, -generate. Imports no torch.

    run = open_run("runs/NAME", ["pipeline.K=4"])
    config = {"settings": run.config, "checkpoint": str(run.info.path), …}  # for assemble_from_checkpoint
    launch_program(EntryPoint("gpipe_cli.trainer.…:main"), config, folder, on_event)

The configuration comes from the checkpoint, so a run directory can be moved. Overrides are typed as for gpipe-train.
What depends on the machine is chosen anew unless it is typed: as many workers as there are devices, and one replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf

from gpipe_cli.checkpoint.choose import choose
from gpipe_cli.checkpoint.files import CheckpointInfo
from gpipe_cli.config import TYPED
from gpipe_cli.errors import ConfigurationError, Problems
from gpipe_cli.jobs import trust
from gpipe_cli.jobs.composition import Composer, is_group, parsed, refuses
from gpipe_cli.jobs.job import Prepared, check, prepare
from gpipe_cli.jobs.own_target import allow_new_keys
from gpipe_cli.launch.join import joined
from gpipe_cli.terminal.flags import CommandLine

ANEW: Mapping[str, Any] = {
    "pipeline.workers": "auto",
    "pipeline.replicas": 1,
    "checkpoint.resume": None,
    "checkpoint.init_from": None,
    "launch.inline": False,
}
OF_TRAINING = ("optimizer", "lr_schedule", "trainer", "checkpoint", "logging")  # sections that are not read here
READ = ("trainer.samples", "trainer.average")  # but these keys are


@dataclass(frozen=True)
class Checkpointed:
    """Holds a run that has been opened again.

    Attributes:
        run_dir: the run's directory, which holds the checkpoint.
        info: the checkpoint.
        prepared: the checked configuration, overrides applied.
        warnings: about newer checkpoints that are damaged.
    """

    run_dir: Path
    info: CheckpointInfo
    prepared: Prepared
    warnings: tuple[str, ...]

    @property
    def config(self) -> dict[str, Any]:
        """Returns the configuration as plain values, with the number of workers."""
        return self.prepared.config

    @property
    def workers(self) -> int:
        """Returns the number of processes of all replicas."""
        pipeline = self.prepared.settings.pipeline
        return pipeline.worker_count * pipeline.replicas


def open_run(
    checkpoint: str, words: Sequence[str], step: str = "last", trusted: str = "", problems: Problems | None = None
) -> Checkpointed:
    """Opens a checkpoint and applies overrides to the configuration recorded in it.

    Args:
        checkpoint: a run directory, or one checkpoint in it.
        words: overrides: ``pipeline.K=4``, ``task.generation.beam=1``, ``precision=bf16``.
        step: of a run directory: a number, "best" or "last".
        trusted: the value of `trust=`: what the checkpoint may call beside gpipe-cli's own code.
        problems: found before in the command line, to be told with those found here.

    Raises:
        ConfigurationError: there is no such run or checkpoint (CheckpointError), the configuration is wrong, it calls
            code that is not trusted, or torchrun has started this command.
    """
    if joined():
        raise ConfigurationError("it starts its own workers: call it without torchrun")
    problems = Problems() if problems is None else problems
    composer, line = Composer(), CommandLine(allow_new_keys(words))
    overrides = list(parsed(line, problems))
    problems += [
        f"{override.input_line}: only training reads this key, leave it out"
        for override in overrides
        if override.key_or_group.partition(".")[0] in OF_TRAINING and override.key_or_group not in READ
    ]
    try:
        info, warnings = choose(Path(checkpoint).expanduser(), step)
        trust.refuse_interpolations(info.state.configuration, info.path)
    except ConfigurationError as error:
        if checkpoint:
            problems.append(str(error))
        composer.find_mistakes(line, problems)
        problems.refuse()
        raise
    composed = _composed(info.state.configuration, overrides, composer, problems)
    # Before anything else is settled, since pipeline.M=auto makes the model.
    names = [*trust.trusted_names(trusted), *trust.typed_names(overrides)]
    with problems.collected():
        trust.refuse_foreign(check(composed, words, problems)[0], names, info.path)
    problems.refuse()
    return Checkpointed(info.path.parent.parent, info, prepare(composed, words, trusted=names), warnings)


def _composed(
    recorded: Mapping[str, Any], overrides: Sequence[Override], composer: Composer, problems: Problems
) -> DictConfig:
    """Returns the recorded configuration with those overrides that can be applied, not resolved."""
    groups = [override for override in overrides if is_group(override) and not refuses(override, [], problems)]
    values = [override for override in overrides if not is_group(override)]
    with initialize_config_module("gpipe_cli.conf", version_base="1.3"):
        default = compose("train", [str(override.input_line) for override in groups])
    config = OmegaConf.create(_with_new_keys(recorded, default))
    for group in groups:
        config[group.key_or_group] = default[group.key_or_group]
    for key, value in ANEW.items():
        OmegaConf.update(config, key, value)
    typed = {override.key_or_group for override in values}
    if "pipeline.K" in typed and "pipeline.partition" not in typed and not isinstance(config.pipeline.partition, str):
        config.pipeline.partition = default.pipeline.partition  # the recorded sizes are for another number of cells
    for override in values:
        key = override.key_or_group
        if key.startswith("task.") and default.task._target_ == config.task._target_ and _has(default, key):
            override.type = OverrideType.FORCE_ADD  # a key that is newer than the run
    OmegaConf.set_struct(config, True)
    for override in values:
        composer.apply(override, config, problems)
    return config


def _has(config: DictConfig, key: str) -> bool:
    section, _, name = key.rpartition(".")
    return name in (OmegaConf.select(config, section) or {})


def _with_new_keys(recorded: Mapping[str, Any], default: DictConfig) -> dict[str, Any]:
    """Returns the recorded values, without keys that exist no longer and with defaults for keys added since.

    Defaults are added in the typed sections only: the functions behind model, data and task have their own.
    """
    defaults: Any = OmegaConf.to_container(default, resolve=True)
    config = {key: recorded.get(key, value) for key, value in defaults.items()}
    for section, kind in TYPED.items():
        known = {field.name for field in fields(kind)}
        saved = {key: value for key, value in recorded.get(section, {}).items() if key in known}
        config[section] = {**defaults[section], **saved}
    return config
