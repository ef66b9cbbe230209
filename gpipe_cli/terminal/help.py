"""Makes the page of ``gpipe-train --help``; values and options are read from ``conf/``. Imports no Hydra."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

from gpipe_cli import __version__
from gpipe_cli.terminal.text import relative_paths
from gpipe_cli.typed_section import shown

KEYS = (
    ("pipeline.K", "cells that the model is cut into"),
    ("pipeline.M", "micro-batches in a mini-batch"),
    ("pipeline.remat", "recompute each forward before its backward: always, except_last, never"),
    ("pipeline.schedule", "gpipe, 1f1b, interleaved_1f1b, zero_bubble"),
    ("pipeline.workers", "processes; auto: one for each cell, up to the number of devices"),
    ("pipeline.replicas", "copies of the whole pipeline"),
    ("data.batch_size", "examples in a mini-batch, over all replicas"),
    ("trainer.steps", "mini-batches to train on"),
    ("trainer.evaluate_every", "steps between evaluations"),
    ("optimizer.lr", "peak learning rate"),
    ("checkpoint.every", "steps between checkpoints"),
    ("checkpoint.resume", "auto, or the path of a run to resume"),
    ("launch.restarts", "restarts after a worker's death"),
    ("seed", "seed of weights, dropout and data order"),
)
GROUPS = (
    *("model", "data", "task", "optimizer", "lr_schedule", "pipeline", "precision"),
    *("checkpoint", "logging", "experiment", "debug"),
)
TEXT = """\
gpipe-train {version}: trains a list of layers that is cut into K cells, each on a worker of its own, with every
mini-batch split into M micro-batches (GPipe). The result is the same for every K.

    gpipe-train model=transformer pipeline.K=16             the main job: 102 languages into English, embedded data
    gpipe-train -m pipeline.K=1,2,4 pipeline.M=4,8,16       a sweep: nine runs, one table at the end
    gpipe-train debug=tiny                                  the same code in seconds
    gpipe-train model=transformer_lm_small data=text data.root=FOLDER      a language model of your own text
    gpipe-train model=module model.module._target_=NAME     any nn.Module: NAME makes it, as torchvision.models.vgg11
    gpipe-train model._target_=my_module.my_layers          your own list of layers, from ./my_module.py

Keys (key=value) and their defaults:
{keys}

Groups (group=option, the default marked *):
{groups}

-m runs a sweep, --cfg job prints the whole configuration, --config-dir DIR adds YAML files of your own.
Every key with its meaning: {conf}. More: README.md and docs/.
Also: gpipe-plan (before a run), gpipe-verify, -eval, -translate, -generate, -report, -bench and -export.
"""


def help_text() -> str:
    """Returns the page."""
    conf = conf_folder()
    main = yaml.safe_load((conf / "train.yaml").read_text(encoding="utf-8"))
    chosen = {group: option for entry in main["defaults"] if isinstance(entry, dict) for group, option in entry.items()}
    keys = [f"    {key:<23} {shown(_default(conf, main, chosen, key)):<12} {text}" for key, text in KEYS]
    groups = [_wrapped(f"    {group:<11} ", _options(conf, group, chosen.get(group))) for group in GROUPS]
    return TEXT.format(
        version=__version__, keys="\n".join(keys), groups="\n".join(groups), conf=relative_paths(str(conf))
    ).rstrip()


def conf_folder() -> Path:
    """Returns the folder of the YAML files, in the clone or in the installed package."""
    import gpipe_cli.conf

    return Path(next(iter(gpipe_cli.conf.__path__)))


def _default(conf: Path, main: dict[str, Any], chosen: dict[str, Any], key: str) -> Any:
    section, _, name = key.rpartition(".")
    if not section:
        return main[name]
    if section in main:
        return main[section][name]
    return yaml.safe_load((conf / section / f"{chosen[section]}.yaml").read_text(encoding="utf-8")).get(name)


def _wrapped(head: str, text: str) -> str:
    return textwrap.fill(text, 110, initial_indent=head, subsequent_indent=" " * len(head))


def _options(conf: Path, group: str, default: str | None) -> str:
    found = (conf / group).glob("*/*.yaml" if group == "experiment" else "*.yaml")
    names = sorted(path.relative_to(conf / group).with_suffix("").as_posix() for path in found)
    return "  ".join(f"{name}*" if name == default else name for name in names) or "(none yet)"
