"""Finds the files of each language and split of parallel text under a folder.

    de-en/opus.de-en-train.de  + …-train.en      OPUS-100 (en-xx folders too)
    train.de + train.en                          pairs of files, in one folder or in one for each language
    de-en/train.tsv, de/…, train.de-en.tsv       source, tab, target; plain train.tsv if one language is chosen

The language is the name beside the target language. dev may be called valid or validation. Each file may be
compressed: .gz, .zst, .xz or .bz2.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigurationError

SPLITS = {"train": "train", "dev": "dev", "valid": "dev", "validation": "dev", "test": "test"}
DEPTH = 4  # levels of folders below the root that are searched
LAYOUTS = (
    "xx-en/opus.xx-en-train.xx beside .en (OPUS-100), train.xx beside train.en, or xx-en/train.tsv (source, tab, "
    "target); dev, valid or validation, and test likewise; each may end in .gz, .zst, .xz or .bz2"
)

_LANGUAGE = r"[a-z]{2,3}(?:[-_][A-Za-z0-9]{2,8})*"
_NAME = re.compile(
    rf"^(?:.*[._-])?(?P<split>{'|'.join(SPLITS)})(?:[._-](?P<pair>{_LANGUAGE}-{_LANGUAGE}))?"
    rf"\.(?P<ending>tsv|{_LANGUAGE})(?:\.(?:gz|zst|xz|bz2))?$"
)


@dataclass(frozen=True)
class PairFiles:
    """Holds the files of one language and split: two, line by line, or one TSV file (`target` is None)."""

    language: str
    split: str
    source: Path
    target: Path | None

    @property
    def files(self) -> list[Path]:
        return [self.source] if self.target is None else [self.source, self.target]

    @property
    def named(self) -> str:
        return " and ".join(map(str, self.files))


def find_pairs(root: str | None, languages: Sequence[str] | None, target: str) -> list[PairFiles]:
    """Returns the files under `root`, language after language, train before dev before test.

    Args:
        languages: the source languages wanted; None: all that are found.
        target: the language of the translations.

    Raises:
        ConfigurationError: the folder or a language is missing, there is no text, or two sets for one split.
    """
    folder = _checked_root(root)
    found: dict[tuple[str, str], PairFiles] = {}
    seen: list[str] = []
    only = languages[0] if languages is not None and len(languages) == 1 else None
    for pair in _walk(folder, target, only, seen):
        other = found.setdefault((pair.language, pair.split), pair)
        if other != pair:
            raise ConfigurationError(
                f"data.root={folder} has two {pair.split} sets of '{pair.language}': {other.named}; {pair.named}. "
                "Move one of them elsewhere"
            )
    trained = sorted({language for language, split in found if split == "train"})
    if not trained:
        raise ConfigurationError(
            f"data.root={folder} has no training text into '{target}' (data.target). Expected {LAYOUTS}. "
            f"Found {', '.join(sorted(seen)[:4]) + (f', … ({len(seen)} files)' if len(seen) > 4 else '') or 'no files'}"
        )
    wanted = trained if languages is None else list(dict.fromkeys(languages))
    if missing := [language for language in wanted if language not in trained]:
        raise ConfigurationError(
            f"data.languages: data.root={folder} has no training text from '{missing[0]}' into '{target}', only from "
            f"{', '.join(trained)}"
        )
    return [found[language, split] for language in wanted for split in ("train", "dev", "test")
            if (language, split) in found]  # fmt: skip


def _checked_root(root: str | None) -> Path:
    if root is None:
        raise ConfigurationError(f"data.root is not set: the folder of your parallel text. Expected in it: {LAYOUTS}")
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise ConfigurationError(f"data.root={root}: there is no such folder. Expected a folder with {LAYOUTS}")
    return folder


def _walk(root: Path, target: str, only: str | None, seen: list[str]) -> Iterator[PairFiles]:
    """Yields the pairs of each folder; adds all file names to `seen`. `only`: the language of tables without one."""
    for folder, below, names in os.walk(root):
        depth = len(Path(folder).relative_to(root).parts)
        below[:] = sorted(name for name in below if not name.startswith(".")) if depth < DEPTH else []
        seen.extend(str((Path(folder) / name).relative_to(root)) for name in names if not name.startswith("."))
        yield from _pairs_of_files(Path(folder), sorted(names), target)
        yield from _pairs_of_tables(root, Path(folder), sorted(names), target, only)


def _pairs_of_files(folder: Path, names: Sequence[str], target: str) -> Iterator[PairFiles]:
    sides: dict[tuple[str, str], dict[str, Path]] = {}  # (name up to the language, split): language to file
    for name in names:
        match = _NAME.match(name)
        if match is None or match["ending"] == "tsv":
            continue
        of_stem = sides.setdefault((name[: match.start("ending")], SPLITS[match["split"]]), {})
        if match["ending"] in of_stem:
            raise ConfigurationError(
                f"{of_stem[match['ending']]} and {folder / name} are one text twice: keep one of the two"
            )
        of_stem[match["ending"]] = folder / name
    for (_, split), files in sides.items():
        for language, path in files.items():
            if language != target and target in files:
                yield PairFiles(language, split, path, files[target])


def _pairs_of_tables(
    root: Path, folder: Path, names: Sequence[str], target: str, only: str | None
) -> Iterator[PairFiles]:
    for name in names:
        match = _NAME.match(name)
        if match is None or match["ending"] != "tsv":
            continue
        named = match["pair"] or ("" if folder == root else folder.name)
        language = _other(named, target) or (named if re.fullmatch(_LANGUAGE, named) and "-" not in named else only)
        if language is None and "-" not in named:
            raise ConfigurationError(
                f"{folder / name} has no language in its name: put it into a folder 'xx-{target}', or use data.pair=xx"
            )
        if language is not None:
            yield PairFiles(language, SPLITS[match["split"]], folder / name, None)


def _other(pair: str, target: str) -> str | None:
    """Returns the other language of "de-en" or "en-de", or None."""
    if pair.endswith(f"-{target}"):
        return pair[: -len(target) - 1] or None
    return pair[len(target) + 1 :] or None if pair.startswith(f"{target}-") else None
