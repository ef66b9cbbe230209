"""Finds the files of each language and split of parallel text: those under a folder, or those that are named.

    de-en/opus.de-en-train.de  + …-train.en      OPUS-100 (en-xx folders too)
    Europarl.de-en.de + Europarl.de-en.en        OPUS, Moses: to train on, unless named dev, test or valid
    train.de + train.en                          pairs of files, in one folder or in one for each language
    de-en/train.tsv, de/…, train.de-en.tsv       source, tab, target; plain train.tsv if one language is chosen
    de-en/train.jsonl, train-00000-of-00001.parquet      records, see `lines.texts_in`
    NAME.de-en.tmx, de-en/train.po, train.de-en.csv      likewise, see `data/records.py`

The language is the name beside the target language. dev may be called val, valid or validation; a folder may say it.
Each file may be compressed: .gz, .zst, .xz or .bz2. Several corpora of one language and split are one set.
"""

import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ...errors import ConfigurationError
from ..lines import (
    JSON,
    LANGUAGE,
    PACKED,
    PARQUET,
    SPLITS,
    ending_of,
    has_records,
    reading,
    split_of,
    unpacked,
)
from ..records import CATALOGUES, MEMORY, ROWS_OF
from ..tree import files_below, files_matching, in_short, refuse_dead_links

log = logging.getLogger(__name__)

Files = Mapping[str, str | Sequence[str | Annotated[Sequence[str], Field(min_length=2, max_length=2)]]]
"""By language: files of the source side, globs or pairs of files."""

LAYOUTS = (
    "xx-en/opus.xx-en-train.xx beside .en (OPUS-100), train.xx beside train.en, or xx-en/train.tsv (source, tab, "
    "target), .jsonl, .parquet, .csv, .tmx, .po or .mo; dev, valid or validation, and test likewise; "
    "NAME.xx-en.xx beside NAME.xx-en.en (OPUS); each may end in .gz, .zst, .xz or .bz2"
)

_PAIR = rf"{LANGUAGE}-{LANGUAGE}"
_TABLES = ("tsv", *(ending.removeprefix(".") for ending in (*JSON, PARQUET, *ROWS_OF)))
FIRST_UNITS = 100  # of a translation memory, whose languages are looked at
_CATALOGUE = re.compile(  # its path without the ending
    rf"(?:.*/)?(?P<folder>{LANGUAGE})/LC_MESSAGES/[^/]+$"
    r"|(?:.*[/.])?(?P<name>[a-z]{2}(?:[-_](?:[A-Z]{2}|[A-Z][a-z]{3}))*)$"
)
_NAME = re.compile(
    rf"^(?:(?:.*[._-])?(?:{'|'.join(SPLITS)})(?:\d{{4}})?(?:[._-](?P<pair>{_PAIR})|-\d+-of-\d+)?"
    rf"|(?:.*[._-])?(?P<corpus>{_PAIR}))"
    rf"\.(?P<ending>{'|'.join(_TABLES)}|{LANGUAGE})(?:\.(?:gz|zst|xz|bz2))?$"
)


@dataclass(frozen=True)
class PairFiles:
    """Holds the files of a corpus: two, line by line, or one table (`target` is None).

    Attributes:
        columns: names of source and target in each record of a table.
        turned: a table of two columns has the target first, as its name has.
    """

    language: str
    split: str
    source: Path
    target: Path | None
    columns: tuple[str, str] | None = None
    turned: bool = False

    @property
    def files(self) -> list[Path]:
        return [self.source] if self.target is None else [self.source, self.target]


def find_pairs(
    root: str | None,
    languages: Sequence[str] | None,
    target: str,
    named: Mapping[str, Files] | None = None,
    columns: Sequence[str] | None = None,
) -> list[PairFiles]:
    """Returns the corpora under `root`, language after language, train before dev before test.

    Args:
        languages: the source languages wanted; None: all that are found.
        target: the language of the translations.
        named: files of each split that take the place of those that are found; their paths begin at `root`.
        columns: names of source and target in records; None: the languages.

    Raises:
        ConfigurationError: the folder, a file or a language is missing, or there is no text.
    """
    named, only = named or {}, languages[0] if languages is not None and len(languages) == 1 else None
    folder = Path(root or "").expanduser()
    refuse_dead_links([folder])
    seen = [] if root is None else [Path(file) for file in files_below(folder, _NAME.match)]
    found = [*_pairs_among(folder, seen, target, only, without=named)]
    for split, files in named.items():
        found += _named(folder.absolute(), split, files, target)
    pairs: dict[tuple[str, str, Path], PairFiles] = {}
    for pair in found:
        same = pairs.setdefault((pair.language, pair.split, unpacked(pair.source.resolve())), pair)
        if same.source != pair.source:
            raise ConfigurationError(f"{same.source} and {pair.source} are one text twice: keep one of the two")
    trained = sorted({pair.language for pair in pairs.values() if pair.split == "train"})
    known = trained if languages is None else [pair.language for pair in pairs.values()]
    _tell_of_others(folder, seen, [*pairs.values()], known, target)
    where = "data.train" if "train" in named else f"data.root={root}"
    if not trained:
        names = [str(path.relative_to(folder)) for path in seen]
        alone = next((name for name in names if ending_of(Path(name)).removeprefix(".") in _TABLES), "FILE")
        raise ConfigurationError(
            f"{where} has no training text into '{target}' (data.target). Expected {LAYOUTS}. Else name the files, xx "
            f"for the language: 'data.train={{xx: [\"{alone}\"]}}'. Found {len(seen)} files: {', '.join(names[:4])}"
        )
    wanted = trained if languages is None else list(dict.fromkeys(languages))
    asked = {"data.languages": wanted, **{f"data.{split}": list(files) for split, files in named.items()}}
    for key, names in asked.items():
        if missing := [name for name in names if name not in trained]:
            others = f"into '{target}', only from {', '.join(trained)}"
            raise ConfigurationError(f"{key}: {where} has no training text from '{missing[0]}' {others}")
    chosen = [pair for pair in pairs.values() if pair.language in wanted]
    chosen.sort(key=lambda pair: (wanted.index(pair.language), ("train", "dev", "test").index(pair.split)))
    return [_with_columns(pair, target, columns) for pair in chosen]


def _tell_of_others(folder: Path, seen: list[Path], pairs: list[PairFiles], known: list[str], target: str) -> None:
    """Warns of files of pairs whose language is not known, and of those that end like a side and are in no pair."""
    used = {file.absolute() for pair in pairs if pair.language in known for file in pair.files}
    unused = {file.absolute() for pair in pairs for file in pair.files} - used
    sides = {f".{side}" for pair in pairs if pair.target is not None for side in (pair.language, target)}
    unused |= {path.absolute() for path in seen if ending_of(path) in sides} - used
    if others := [str(path.relative_to(folder)) for path in seen if path.absolute() in unused]:
        log.warning("%s: %d files are passed over (%s): data.train names files", folder, len(others), in_short(others))


def pairs_to_test(path: Path, target: str, only: str | None, columns: Sequence[str] | None) -> list[PairFiles]:
    """Returns the corpora of a file or folder; of a folder those that are named test, if there are any.

    Args:
        target: the language of the translations.
        only: the source language of files whose names say none.
        columns: names of source and target in records; None: the languages.

    Raises:
        ConfigurationError: there is no such file, or nothing that can be read as pairs.
    """
    refuse_dead_links([path])
    if not path.exists():
        raise ConfigurationError(f"test={path}: there is no such file or folder")
    folder, seen = path, [Path(file) for file in files_below(path, _NAME.match)]
    if path.is_file():
        folder, seen = path.parent, [path]
    # Files are found by the names of LAYOUTS; a single file that has none of these may have any name.
    found = [*_pairs_among(folder, seen, target, only, without=())] or [*_of_any_name(path, target, only)]
    if not found:
        raise ConfigurationError(f"test={path}: no pairs of texts into '{target}'. Expected {LAYOUTS}")
    chosen = [pair for pair in found if pair.split == "test"] or found
    return [_with_columns(pair, target, columns) for pair in chosen]


def _with_columns(pair: PairFiles, target: str, columns: Sequence[str] | None) -> PairFiles:
    """Returns the corpus, with the names of its columns if it is a table of records."""
    if pair.target is not None or not has_records(pair.source):
        return pair
    names = columns or columns_of(pair.source, pair.language, target)
    return replace(pair, columns=(names[0], names[1]))


def _of_any_name(path: Path, target: str, only: str | None) -> Iterator[PairFiles]:
    """Yields the corpora of a single file of any name: one side of two files, or a table.

    Without `only` the first record of a table names the languages.
    """
    ending = ending_of(path).removeprefix(".")
    if path.is_file() and ending not in _TABLES and re.fullmatch(LANGUAGE, ending):
        yield PairFiles(ending, "test", path, _other(path, ending, target, "test"))
    elif path.is_file() and only is not None:
        yield PairFiles(only, "test", path, None)
    elif path.is_file() and has_records(path):
        with reading(path) as lines:
            names = json.loads(next(iter(lines), b"{}"))
        if target in names:
            yield from (PairFiles(n, "test", path, None) for n in names if n != target and re.fullmatch(LANGUAGE, n))


# -- files that are named ----------------------------------------------------------------------------------------------


def _named(folder: Path, split: str, files: Files, target: str) -> Iterator[PairFiles]:
    """Yields the corpora of one split whose files are named by `data.<split>`.

    Each name is a file of the source side or a table, a glob of such files, or a pair [SOURCE, TARGET]. Beside a file
    of the source side lies the target's: `_other` finds it by its name.
    """
    for language, names in files.items():
        key = f"data.{split}.{language}"
        if language == target:
            raise ConfigurationError(f"{key}: '{language}' is data.target: name the files by the other language")
        for name in [names] if isinstance(names, str) else names:
            if not isinstance(name, str):  # [SOURCE, TARGET]
                source, other = (_matching(folder, side, key)[0] for side in name)
                yield PairFiles(language, split, source, other)
                continue
            for source in _matching(folder, name, key):
                is_table = ending_of(source).removeprefix(".") in _TABLES
                yield PairFiles(language, split, source, None if is_table else _other(source, language, target, key))


def _matching(folder: Path, name: str, key: str) -> list[Path]:
    """Returns the file of this name, or those that it finds as a glob, in the order of their names."""
    path = folder / Path(name).expanduser()
    refuse_dead_links([path])
    found = [path] if path.is_file() else files_matching(path)
    if not found:
        raise ConfigurationError(f"{key}={name}: there is no file {path}")
    return found


def _other(source: Path, language: str, target: str, key: str) -> Path:
    """Returns the target's file beside a source's: the last place of the language in its name becomes the target."""
    places = list(re.finditer(rf"(?<![A-Za-z0-9]){re.escape(language)}(?![A-Za-z0-9])", str(source)))
    if not places:
        raise ConfigurationError(
            f"{key}: {source} has no '{language}' in its name, by which the file in '{target}' is found: name both, as "
            f"{{{language}: [[SOURCE, TARGET]]}}"
        )
    other = Path(str(source)[: places[-1].start()] + target + str(source)[places[-1].end() :])
    if (found := _plain_or_packed(other)) is None:
        raise ConfigurationError(f"{key}: {source} has no {other} beside it, or name both as [[SOURCE, TARGET]]")
    return found


def _plain_or_packed(path: Path) -> Path | None:
    """Returns the file of this name, or of the same name with or without the ending of a compression; None: neither."""
    plain = unpacked(path)
    names = (path, plain, *(Path(f"{plain}{ending}") for ending in PACKED))
    return next((name for name in names if name.is_file()), None)


# -- files that are found ----------------------------------------------------------------------------------------------


def _pairs_among(
    root: Path, paths: Iterable[Path], target: str, only: str | None, without: Collection[str]
) -> Iterator[PairFiles]:
    """Yields the corpora among files: pairs of a side and the other beside it, and tables.

    Args:
        only: the language of tables that say none; None: these are refused.
        without: splits that are passed over.
    """
    for path in paths:
        split = split_of(path.relative_to(root), anywhere=True) or "train"
        match, ending = _NAME.match(path.name), ending_of(path).removeprefix(".")
        if split in without or (ending == "mo" and path.with_suffix(".po").exists()):
            continue
        if match is not None and ending not in _TABLES:
            other = _plain_or_packed(path.with_name(path.name[: match.start("ending")] + target))
            # OPUS puts NAME.de-en.xml and NAME.de-en.ids beside the two sides.
            is_side = match["corpus"] is None or re.search(rf"^{ending}-|-{ending}$", match["corpus"])
            if is_side and ending != target and other is not None:
                yield PairFiles(ending, split, path, other)
        elif match is not None or f".{ending}" in (*CATALOGUES, MEMORY):
            folder = "" if path.parent == root else path.parent.name
            named = "" if match is None else match["corpus"] or match["pair"] or folder
            for language in _languages_of(path, named, target, only):
                yield PairFiles(language, split, path, None, turned=named == f"{target}-{language}")


def _languages_of(path: Path, named: str, target: str, only: str | None) -> list[str]:
    """Returns the source languages of a table: by its name or folder, else as files of its format say them.

    A catalogue's is in its path, as locale/de/LC_MESSAGES/x.po or x.de.po; those of a translation memory are in it.

    Args:
        named: name of the pair or the folder, as "de-en", "en-de" or "de".
        only: the language of files that say none; None: they are refused.
    """
    for other in (named.removesuffix(f"-{target}"), named.removeprefix(f"{target}-")):
        if other not in ("", named):
            return [other]
    if re.fullmatch(_PAIR, named):
        return []
    if re.fullmatch(LANGUAGE, named) and "-" not in named:
        return [named]
    if ending_of(path) == MEMORY:
        with reading(path) as lines:
            names = {name for line in islice(lines, FIRST_UNITS) for name in json.loads(line)}
        found = {name for name in names if re.fullmatch("[a-z]{2,3}", name) and not target.startswith(name)}
        return sorted(found) if target in names else []
    match = _CATALOGUE.match(str(unpacked(path).with_suffix("")))
    if match is not None and ending_of(path) in CATALOGUES:
        code = match["folder"] or match["name"]
        source = "en" if code == target else code
        return [source] if _is_english(source) != _is_english(target) else []
    if only is None:
        raise ConfigurationError(
            f"{path} has no language in its name: put it into a folder 'xx-{target}', or use data.pair=xx, or "
            f"'data.train={{xx: [\"{path.name}\"]}}'"
        )
    return [only]


def columns_of(path: Path, language: str, target: str) -> tuple[str, str]:
    """Returns the names of source and target in records if data.columns gives none. A catalogue's msgid are English."""
    if ending_of(path) not in CATALOGUES:
        return language, target
    return ("msgstr", "msgid") if _is_english(target) else ("msgid", "msgstr")


def _is_english(code: str) -> bool:
    return re.split("[-_]", code.lower())[0] in ("en", "eng")
