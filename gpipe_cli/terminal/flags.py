"""Separates the options of a command line, which Hydra takes, from its overrides. No slow imports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gpipe_cli.errors import Problems
from gpipe_cli.typed_section import nearest

SWITCHES = ("--hydra-help", "--resolve", "--run", "-r", "--multirun", "-m", "--shell-completion", "-sc")
CHOICES = {
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}
EXAMPLES = {  # of the options that take a value
    "--config-dir": "my_conf",
    "--config-name": "my_config",
    "--config-path": "my_conf",
    "--package": "_global_",
    "--experimental-rerun": "runs/NAME/.hydra/config.pickle",
    "--cfg": "job",
    "--info": "config",
}
LONG = {
    "-cd": "--config-dir",
    "-cn": "--config-name",
    "-cp": "--config-path",
    "-p": "--package",
    "-c": "--cfg",
    "-i": "--info",
    "-m": "--multirun",
}
KNOWN = ("--help", "-h", "--version", *SWITCHES, *EXAMPLES, *LONG)
FOR_PLANS = ("--config-dir", "-cd", "--multirun", "-m")


@dataclass(frozen=True)
class CommandLine:
    """Holds what a command line asks for.

    Attributes:
        overrides: the words that are no options.
        options: the value of each option by its long name; an empty text for a switch.
    """

    overrides: list[str] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)

    @property
    def option_words(self) -> list[str]:
        """Returns the options as Hydra reads them, in front of the overrides."""
        return [f"{name}={value}" if value else name for name, value in self.options.items()]

    @property
    def is_sweep(self) -> bool:
        return "--multirun" in self.options

    @property
    def folder(self) -> str | None:
        """Returns the folder of `--config-dir`."""
        return self.options.get("--config-dir")


def read_words(words: Sequence[str], command: str, problems: Problems, known: Sequence[str] = KNOWN) -> CommandLine:
    """Separates options from overrides, before Hydra's parser would print all of its own.

    Args:
        command: named in messages.
        problems: gets one line for each unknown option, and for each missing or wrong value of one.
        known: the options that the command has.
    """
    line, rest = CommandLine(), list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        name = LONG.get(flag, flag)
        if not word.startswith("-"):
            line.overrides.append(word)
        elif flag not in known:
            problems.append(_unknown(word, command, known))
        elif name in EXAMPLES:
            if not equals and rest and not rest[0].startswith("-") and (name != "--info" or "=" not in rest[0]):
                value = rest.pop(0)
            line.options[name] = value or ("all" if name == "--info" else "")
            _check_value(name, value, problems)
        else:
            line.options[name] = ""
    return line


def _check_value(name: str, value: str, problems: Problems) -> None:
    choices = CHOICES.get(name, ())
    if not value and name != "--info":
        problems.append(f"{name} needs a value, as {name} {EXAMPLES[name]}")
    elif value and choices and value not in choices:
        problems.append(f"{name} {value}: use {', '.join(choices)}")


def _unknown(word: str, command: str, known: Sequence[str]) -> str:
    flag, equals, _ = word.partition("=")
    if equals:
        return f"{word}: keys have no dashes, type {word.lstrip('-')}"
    near = nearest(flag, known)
    guess = f"did you mean {' or '.join(near)}? " if near else ""
    return f"there is no option {word}; {guess}`{command} --help` shows what there is"
