"""Opening a run again, for commands that work with its weights: gpipe-eval, gpipe-translate. Imports no torch.

    chosen, overrides = split_words(words, ("checkpoint", "output"))
    run = open_run(chosen["checkpoint"], overrides)
    config = {"settings": run.config, "checkpoint": str(run.info.path), …}     # for from_checkpoint.py in the workers
    launch_program(EntryPoint("gpipe_cli.trainer.…:main"), config, folder, on_event)

The configuration is the one that the checkpoint was made with: it stands in the checkpoint, so a run directory can be
moved. Overrides are typed as for gpipe-train. What only suits the machine it ran on is chosen anew: workers are as many
as there are devices for, and there is one replica, unless the person says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from gpipe_cli.checkpoint.choose import choose
from gpipe_cli.checkpoint.files import CheckpointInfo
from gpipe_cli.config import FREE_FORM, TYPED
from gpipe_cli.errors import ConfigurationError
from gpipe_cli.jobs import trust
from gpipe_cli.jobs.job import Prepared, prepare, resolve
from gpipe_cli.launch.join import joined
from gpipe_cli.terminal.hydra_errors import KNOWN, explain
from gpipe_cli.typed_section import unknown_key

ANEW: Mapping[str, Any] = {
    "pipeline.workers": "auto",
    "pipeline.replicas": 1,
    "checkpoint.resume": None,
    "checkpoint.init_from": None,
    "launch.inline": False,
}


@dataclass(frozen=True)
class Checkpointed:
    """A run that has been opened again.

    Attributes:
        run_dir: of the run; the checkpoint lies in it.
        info: the checkpoint.
        prepared: the configuration, checked, the overrides applied.
        warnings: of newer checkpoints that are damaged.
    """

    run_dir: Path
    info: CheckpointInfo
    prepared: Prepared
    warnings: tuple[str, ...]

    @property
    def config(self) -> dict[str, Any]:
        """Plain values, the number of workers among them."""
        return self.prepared.config

    @property
    def workers(self) -> int:
        """Processes of all replicas."""
        pipeline = self.prepared.settings.pipeline
        return pipeline.worker_count * pipeline.replicas


def open_run(checkpoint: str, words: Sequence[str], step: str = "last", trusted: str = "") -> Checkpointed:
    """A run's configuration with overrides applied, and its checkpoint.

    Args:
        checkpoint: a run directory, or one checkpoint in it.
        words: overrides: ``pipeline.K=4``, ``task.generation.beam=1``, ``precision=bf16``.
        step: of a run directory: a number, "best" or "last".
        trusted: what the checkpoint may have called beside what is ours, as typed behind `trust=`.

    Raises:
        ConfigurationError: there is no such run or checkpoint, or the configuration is wrong; CheckpointError among it.
            Or it calls what nobody trusts. Or torchrun has started this command.
    """
    if joined():
        raise ConfigurationError("it starts its own workers: call it without torchrun")
    info, warnings = choose(Path(checkpoint).expanduser(), step)
    trust.refuse_interpolations(info.state.configuration, info.path)
    try:
        overrides = OverridesParser.create().parse_overrides(list(words))
        composed = _composed(info.state.configuration, words, overrides)
    except KNOWN as error:
        raise ConfigurationError(explain(error, words)) from error
    # Before anything else is settled: for pipeline.M=auto the planner makes the model.
    names = [*trust.trusted_names(trusted), *trust.typed_names(overrides)]
    trust.refuse_foreign(resolve(composed, words)[0], names, info.path)
    return Checkpointed(info.path.parent.parent, info, prepare(composed, words), warnings)


def _composed(recorded: Mapping[str, Any], words: Sequence[str], overrides: Sequence[Override]) -> DictConfig:
    """The recorded configuration with the overrides, not resolved; ``words`` are the overrides as typed."""
    groups = [word for word, override in zip(words, overrides, strict=True) if _is_group(override)]
    with initialize_config_module("gpipe_cli.conf", version_base="1.3"):
        default = compose("train", groups)
    config = OmegaConf.create(_with_new_keys(recorded, default))
    assert isinstance(config, DictConfig)
    for override in overrides:
        if _is_group(override):
            config[override.key_or_group] = default[override.key_or_group]
    typed = {override.key_or_group for override in overrides}
    for key, value in ANEW.items():
        OmegaConf.update(config, key, value)
    if "pipeline.K" in typed and "pipeline.partition" not in typed and not isinstance(config.pipeline.partition, str):
        config.pipeline.partition = default.pipeline.partition  # sizes for another number of cells
    for override in overrides:
        if not _is_group(override):
            _apply(config, override, default)
    return config


def _with_new_keys(recorded: Mapping[str, Any], default: DictConfig) -> dict[str, Any]:
    """What is recorded, and defaults for the keys that gpipe-cli has learned since; keys it has forgotten are left out.

    Only of the typed sections: a model, a data source and a task have defaults of their own.
    """
    defaults = OmegaConf.to_container(default, resolve=True)
    assert isinstance(defaults, dict)
    config = {str(key): recorded.get(str(key), value) for key, value in defaults.items()}
    for section, kind in TYPED.items():
        known = {field.name for field in fields(kind)}
        saved = {key: value for key, value in recorded.get(section, {}).items() if key in known}
        config[section] = {**defaults[section], **saved}
    return config


def _is_group(override: Override) -> bool:
    """``precision=bf16`` names an option of a group; ``pipeline.K=4`` a value."""
    return override.key_or_group in (*FREE_FORM, *TYPED) and isinstance(override.value(), str)


def _apply(config: DictConfig, override: Override, default: DictConfig) -> None:
    """Sets one value; ``default`` is the configuration of a run with nothing typed."""
    key = override.key_or_group
    if override.is_delete() or override.is_sweep_override():
        what = "nothing can be deleted here" if override.is_delete() else "there is one value for each key here"
        raise ConfigurationError(f"{override.input_line}: {what}")
    section = key.partition(".")[0]
    missing = OmegaConf.select(config, key, default=_NOTHING) is _NOTHING
    if missing and section in FREE_FORM and not (override.is_add() or override.is_force_add()):
        known = _flat(cast("dict[str, Any]", OmegaConf.to_container(config)))
        if default.task._target_ == config.task._target_:  # its keys, also those that the run is too old to have
            known += _flat({"task": cast("dict[str, Any]", OmegaConf.to_container(default.task))})
        if key not in known:
            raise ConfigurationError(f"{unknown_key(key, known)} (+{override.input_line} adds it)")
    with open_dict(config):
        OmegaConf.update(config, key, override.value(), force_add=True)


_NOTHING = object()


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Every key, dotted."""
    return [
        name
        for key, value in values.items()
        for name in (_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"])
    ]
