"""Lists the files below a folder of data: links are followed, and links that lead nowhere are refused."""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from glob import glob
from pathlib import Path

from ..errors import ConfigurationError


def files_below(
    folder: str | Path, is_data: Callable[[str], object], above: Collection[str] = ()
) -> Iterator[os.DirEntry[str]]:
    """Yields the files in and below a folder, sorted, without hidden ones. A link to a folder above it is passed over.

    Args:
        folder: if it is not there, it has no files.
        is_data: whether a file of this name is read.
        above: the real paths of the folders that lead to this one.

    Raises:
        ConfigurationError: a folder cannot be read, or a link to data leads nowhere.
    """
    above = {*above, os.path.realpath(folder)}
    for entry in visible_entries(folder, is_data) if Path(folder).is_dir() else ():
        if not entry.is_dir():
            yield entry
        elif not entry.is_symlink() or os.path.realpath(entry.path) not in above:
            yield from files_below(entry.path, is_data, above)


def visible_entries(folder: str | Path, is_data: Callable[[str], object] = bool) -> list[os.DirEntry[str]]:
    """Returns the entries of a folder, by name, without hidden files; see `files_below`."""
    try:
        found = sorted((of for of in os.scandir(folder) if of.name[0] != "."), key=lambda entry: entry.name)
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be read: {error.strerror}") from error
    links = {of.path: is_data(of.name) or "." not in of.name for of in found if of.is_symlink()}
    refuse_dead_links(path for path, may_be_data in links.items() if may_be_data)
    return [of for of in found if of.path not in links or Path(of.path).exists()]


def refuse_dead_links(paths: Iterable[str | Path]) -> None:
    """Raises ConfigurationError if some of these paths are links that lead nowhere: a disk may not be mounted."""
    if dead := [path for path in map(Path, paths) if path.is_symlink() and not path.exists()]:
        more, target = f" ({len(dead):,} such links)" if len(dead) > 1 else "", dead[0].readlink()
        raise ConfigurationError(f"{dead[0]} links to {target}, which is not there{more}: mount it, or remove the link")


def files_matching(path: Path) -> list[Path]:
    """Returns the files that a pattern finds, each once; a folder that is there is no pattern, whatever its name."""
    base = next(folder for folder in path.parents if folder.exists())
    names = glob(str(path.relative_to(base)), root_dir=base, recursive=True)  # noqa: PTH207  # it follows links
    refuse_dead_links(base / name for name in names)
    files = sorted((base / name for name in names if (base / name).is_file()), key=lambda file: -len(file.parts))
    return sorted({file.resolve(): file for file in files}.values())  # a link may lead into its own folder


def by_ending(names: Iterable[str]) -> str:
    """Returns how many files have each ending: "2,051 .py, 3 .heic, 1 without"."""
    counts = Counter(Path(name).suffix.lower() or "without" for name in names)
    return ", ".join(f"{count:,} {ending}" for ending, count in counts.most_common(8))
