"""Finds the files of each language and split of parallel text under a folder.

    de-en/opus.de-en-train.de  + …-train.en      OPUS-100 (en-xx folders too)
    train.de + train.en                          pairs of files, in one folder or in one for each language
    de-en/train.tsv, de/…, train.de-en.tsv       source, tab, target; plain train.tsv if one language is chosen

The language is the name beside the target language. dev may be called valid or validation. Each file may be
compressed: .gz, .zst, .xz or .bz2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigurationError
from ..packed import visible_files

SPLITS = {"train": "train", "dev": "dev", "valid": "dev", "validation": "dev", "test": "test"}
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
    folder, only = _checked_root(root), languages[0] if languages is not None and len(languages) == 1 else None
    seen = list(visible_files(folder))
    found: dict[tuple[str, str], PairFiles] = {}
    for pair in _pairs(folder, seen, target, only):
        other = found.setdefault((pair.language, pair.split), pair)
        if other != pair:
            raise ConfigurationError(
                f"data.root={folder} has two {pair.split} sets of '{pair.language}': {other.named}; {pair.named}. "
                "Move one of them elsewhere"
            )
    trained = sorted({language for language, split in found if split == "train"})
    if not trained:
        some = ", ".join(str(path.relative_to(folder)) for path in seen[:4])
        raise ConfigurationError(
            f"data.root={folder} has no training text into '{target}' (data.target). Expected {LAYOUTS}. "
            f"Found {len(seen)} files: {some}"
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


def _pairs(root: Path, paths: Iterable[Path], target: str, only: str | None) -> Iterator[PairFiles]:
    """Yields the pairs and tables among files. `only`: the language of tables without one in their name."""
    stems: dict[tuple[Path, str, str], dict[str, Path]] = {}  # (path up to the ending, split, name): ending to file
    for path in paths:
        if match := _NAME.match(path.name):
            stem = path.with_name(path.name[: match.start("ending")] + "*")
            named = match["pair"] or ("" if path.parent == root else path.parent.name)
            of_stem = stems.setdefault((stem, SPLITS[match["split"]], named), {})
            if match["ending"] in of_stem:
                raise ConfigurationError(
                    f"{of_stem[match['ending']]} and {path} are one text twice: keep one of the two"
                )
            of_stem[match["ending"]] = path
    for (_, split, named), files in stems.items():
        for ending, path in files.items():
            if ending == "tsv":
                language = _language_of_table(path, named, target, only)
                if language is not None:
                    yield PairFiles(language, split, path, None)
            elif ending != target and target in files:
                yield PairFiles(ending, split, path, files[target])


def _language_of_table(path: Path, named: str, target: str, only: str | None) -> str | None:
    """Returns the language of a table by the name of its pair or folder, "de-en", "en-de" or "de"; None: of others."""
    for other in (named.removesuffix(f"-{target}"), named.removeprefix(f"{target}-")):
        if other not in ("", named):
            return other
    language = named if re.fullmatch(_LANGUAGE, named) and "-" not in named else only
    if language is None and "-" not in named:
        raise ConfigurationError(
            f"{path} has no language in its name: put it into a folder 'xx-{target}', or use data.pair=xx"
        )
    return language
