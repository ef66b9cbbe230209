"""Composes the configuration of a command line; of one that cannot be composed, it names every mistake at once.

Hydra stops at the first mistake. `find_mistakes` then looks at each word by itself: it composes the groups that can be
chosen, tries each key on the result, and checks the values as if the wrong words had not been typed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own
from hydra import compose, initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpipe_cli.config import FREE_FORM, known_keys
from gpipe_cli.errors import Problems
from gpipe_cli.jobs.own_target import complete
from gpipe_cli.terminal.flags import CommandLine
from gpipe_cli.terminal.help import conf_folder
from gpipe_cli.terminal.hydra_errors import explain, no_such_option
from gpipe_cli.typed_section import nearest, shown, unknown_key

MOST_SWEPT = 50  # values of one key of a sweep that are tried


def count_folders(root: str | None, folder: str) -> int | str:
    """Returns the number of folders in ``root/folder``, one for each class of images; `MISSING` if there are none."""
    found = 0
    with suppress(OSError), os.scandir(Path(root or os.devnull, folder).expanduser()) as entries:
        found = sum(entry.is_dir() and not entry.name.startswith(".") for entry in entries)
    return found or str(MISSING)


OmegaConf.register_new_resolver("gpipe_folders", count_folders, replace=True)
Check = Callable[[DictConfig], object]


@dataclass(frozen=True)
class Composer:
    """Composes one command's configuration.

    Attributes:
        config_name: the YAML file of conf/ that holds it.
        own_keys: dotted keys of the command beside those of gpipe-train.
        command: named in messages.
    """

    config_name: str = "train"
    own_keys: tuple[str, ...] = ()
    command: str = "gpipe-train"

    def compose(self, line: CommandLine, problems: Problems, check: Check) -> DictConfig:
        """Composes the configuration, without Hydra's own node.

        Args:
            problems: of the line's options.
            check: adds the problems of a configuration, to tell them with the mistakes of the words.

        Raises:
            ConfigurationError: one line for each mistake.
        """
        problems += misread_choices(line)
        try:
            if not problems:
                return self._composed(complete(line.overrides), [line.folder] if line.folder else [])
        except Exception as error:
            self.find_mistakes(line, problems, check, error)
        else:
            self.find_mistakes(line, problems, check)
        raise problems.error()

    def find_mistakes(
        self, line: CommandLine, problems: Problems, check: Check | None = None, error: Exception | None = None
    ) -> None:
        """Adds one line for each mistake of a command line.

        Args:
            check: see `compose`.
            error: what Hydra said; it is explained where no mistake is found.
        """
        folders = list(_user_folders(line, problems))
        words = list(parsed(replace(line, overrides=complete(line.overrides)), problems, self.command))
        groups = [override for override in words if is_group(override, folders)]
        fitting = [
            override
            for override in groups
            if not any(misread_choices(replace(line, overrides=[str(override.input_line)])))
            and not refuses(override, folders, problems)
        ]
        composed = self._base(fitting, [str(folder) for folder in folders], problems)
        if composed is not None:
            for override in words:
                if override not in groups:
                    self.apply(override, composed, problems)
            if check is not None:
                check(OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"]))
        if error is not None and not problems:
            problems += (problem for folder in folders for path in _yaml_files(folder) for problem in _misread(path))
        if error is not None and not problems:
            problems.append(explain(error))

    def _base(self, groups: Sequence[Override], folders: Sequence[str], problems: Problems) -> DictConfig | None:
        """Composes the groups alone; without the user's folders if something there is wrong."""
        words = [str(override.input_line) for override in groups]
        for overrides, places in ((words, folders), ([], [])):
            try:
                return self._composed(overrides, places, with_hydra=True)
            except Exception as wrong:
                if not problems:
                    problems.append(explain(wrong))
        return None

    def _composed(self, words: Sequence[str], folders: Sequence[str], with_hydra: bool = False) -> DictConfig:
        places = [f"file://{Path(folder).absolute()}" for folder in folders]
        search = [f"hydra.searchpath=[{','.join(places)}]"] if places else []
        GlobalHydra.instance().clear()
        with initialize_config_module("gpipe_cli.conf", version_base="1.3"):
            return compose(self.config_name, [*words, *search], return_hydra_config=with_hydra)

    def apply(self, override: Override, composed: DictConfig, problems: Problems) -> None:
        """Sets one key, or adds the reason why it cannot be set."""
        tried = [override]
        if override.is_sweep_override():
            tried = list(_values_of_sweep(override))
        for one in tried:
            try:
                ConfigLoaderImpl._apply_overrides_to_config([one], composed)
            except Exception as error:
                problems.append(self._not_set(one, composed, error))

    def _not_set(self, override: Override, composed: DictConfig, error: Exception) -> str:
        key, keys = override.key_or_group, [*known_keys(), *self.own_keys]
        section = key.partition(".")[0]
        passed_on = "." in key and section in FREE_FORM
        if passed_on or section == "hydra":
            keys = list(_dotted(composed))
        if override.is_delete():
            is_null = key in keys and OmegaConf.select(composed, key) is None
            return f"{key} is null, and so cannot be deleted: leave out ~{key}" if is_null else unknown_key(key, keys)
        if override.is_add():
            return f"{override.input_line}: {key} exists, type {key}=… without +"
        if key in keys or (section == "hydra" and not str(error).startswith("Could not override")):
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            return f"{override.input_line}: {explain(cause, key)}"
        text = unknown_key(key, keys)
        if passed_on and not nearest(key, keys):
            text += f"; to pass it to {section}._target_ all the same, type +{key}=…"
        return text


# -- words -------------------------------------------------------------------------------------------------------------


def parsed(line: CommandLine, problems: Problems, command: str | None = None) -> Iterator[Override]:
    """Yields the words that Hydra can read; adds a line for each other one.

    Args:
        command: that runs sweeps; None: this one does not.
    """
    for word in line.overrides:
        try:
            (override,) = OverridesParser.create().parse_overrides([word])
        except Exception as error:
            problems.append(explain(error))
            continue
        if not override.key_or_group:
            problems.append(f"{word}: write key=value")
        elif override.is_sweep_override() and not line.is_sweep:
            key, _, value = word.lstrip("+").partition("=")
            several = f"type {command} -m … {word}" if command else "give one value"
            problems.append(f"{word} is a sweep: {several}, or {key}=[{value}] for one list")
        else:
            yield override


def _values_of_sweep(override: Override) -> Iterator[Override]:
    """Yields an override for each of the first values of a sweep."""
    if not (override.is_choice_sweep() or override.is_range_sweep()):
        return
    for number, value in enumerate(override.sweep_string_iterator()):
        if number == MOST_SWEPT:
            return
        yield OverridesParser.create().parse_override(f"{override.get_key_element()}={value}")


# -- groups and files --------------------------------------------------------------------------------------------------


def _user_folders(line: CommandLine, problems: Problems) -> Iterator[Path]:
    """Yields the folders of YAML files that the command line names."""
    named = [] if line.folder is None else [("--config-dir", line.folder)]
    for word in line.overrides:
        if word.startswith("hydra.searchpath="):
            named += [("hydra.searchpath", name) for name in re.findall(r"file://([^,\]]+)", word)]
    for option, name in named:
        if Path(name).is_dir():
            yield Path(name).absolute()
        else:
            problems.append(f"{option} {name}: there is no such folder")


def misread_choices(line: CommandLine) -> Iterator[str]:
    """Yields a line for each word that chooses several options of a section, or a file that is no configuration."""
    for group, _, option in (word.lstrip("+").partition("=") for word in line.overrides):
        if option.startswith("[") and group in FREE_FORM:
            yield f"{group}={option}: {group} has one option, without brackets (gpipe-train --help lists them)"
        if line.folder is not None:
            path = Path(line.folder, group, f"{option.removesuffix('.yaml')}.yaml").absolute()
            with suppress(OSError, ValueError):  # such as a name that is too long: it is no file
                if path.is_file():
                    yield from _misread(path)


def _yaml_files(folder: Path) -> Iterator[Path]:
    """Yields the YAML files of a folder; not those of earlier runs in it, which lie in hidden folders."""
    for path in folder.rglob("*.yaml"):
        if not any(part.startswith(".") for part in path.relative_to(folder).parts):
            yield path


def _misread(path: Path) -> Iterator[str]:
    """Yields the reason why a YAML file cannot be read as a configuration."""
    try:
        with path.open(encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        yield f"{path}, line {line}: not UTF-8 ({error.reason}): save the file as UTF-8"
    except yaml.YAMLError as error:
        yield explain(error)
    except OSError as error:
        yield f"{path} cannot be read: {error.strerror}"
    else:
        if content is not None and not isinstance(content, Mapping):
            yield f"{path} holds {shown(content)}: a configuration is made of lines `key: value`"


def is_group(override: Override, folders: Sequence[Path] = ()) -> bool:
    """Returns whether the override chooses an option of a group, as ``precision=bf16``, and sets no single value."""
    key = override.key_or_group
    return key.startswith("hydra/") or any((folder / key).is_dir() for folder in (conf_folder(), *folders))


def refuses(override: Override, folders: Sequence[Path], problems: Problems) -> bool:
    """Returns whether an override of a group cannot be used, and adds the reason."""
    group = override.key_or_group
    if group.startswith("hydra/") or override.is_delete():
        return False
    places = [folder / group for folder in (conf_folder(), *folders)]
    options = sorted({path.relative_to(place).with_suffix("").as_posix()
                      for place in places for path in place.rglob("*.yaml")})  # fmt: skip
    values = override.value() if not override.is_sweep_override() else [
        str(one.value()) for one in _values_of_sweep(override)
    ]  # fmt: skip
    if override.type == OverrideType.ADD:
        problems.append(f"{override.input_line}: {group} is chosen already, type {group}=… without +")
        return True
    if values is None and group in ("experiment", "debug"):
        return False
    if not isinstance(values, list) or not override.is_sweep_override():
        values = [values]
    wrong = [value for value in values if str(value).removesuffix(".yaml") not in options]
    problems += [no_such_option(group, shown(value), options) for value in wrong]
    return bool(wrong) or override.is_sweep_override()


def _dotted(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in map(str, config):
        yield f"{prefix}{key}"
        value = None if OmegaConf.is_interpolation(config, key) else config._get_node(key)
        if isinstance(value, DictConfig):
            yield from _dotted(value, f"{prefix}{key}.")


# -- values ------------------------------------------------------------------------------------------------------------


def plain_values(config: DictConfig, problems: Problems, prefix: str = "") -> dict[str, Any]:
    """Returns a composed configuration as plain values, interpolations resolved.

    Args:
        problems: gets one line for each value that is missing or refers to nothing; the value is left out.
    """
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        assert isinstance(plain, dict)
        return {str(key): value for key, value in plain.items()}
    except OmegaConfBaseException:
        pass
    values: dict[str, Any] = {}
    for key in map(str, config):
        try:
            value = config[key]
        except Exception as error:  # a resolver of the user's may raise anything
            problems.append(explain(error, f"{prefix}{key}"))
            continue
        if isinstance(value, DictConfig):
            values[key] = plain_values(value, problems, f"{prefix}{key}.")
        else:
            try:
                values[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            except OmegaConfBaseException as error:
                problems.append(explain(error, f"{prefix}{key}"))
    return values
