"""Lists the files below a folder of data: links are followed, and links that lead nowhere are refused."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from glob import glob
from pathlib import Path

from ..errors import ConfigurationError


def files_below(
    folder: str | Path, is_data: Callable[[str], object], above: Collection[str] = ()
) -> Iterator[os.DirEntry[str]]:
    """Yields the files in and below a folder, sorted, without hidden ones and links to folders above.

    Args:
        folder: path of the folder; one that is not there has no files.
        is_data: returns whether a file of this name is read; links of other names may lead nowhere.
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
        found = sorted((entry for entry in os.scandir(folder) if entry.name[0] != "."), key=lambda entry: entry.name)
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be read: {error.strerror}") from error
    links = [entry for entry in found if entry.is_symlink()]
    refuse_dead_links(entry.path for entry in links if is_data(entry.name) or "." not in entry.name)
    return [entry for entry in found if not entry.is_symlink() or os.access(entry.path, os.F_OK)]


def refuse_dead_links(paths: Iterable[str | Path]) -> None:
    """Raises ConfigurationError if some of these paths are links that lead nowhere: a disk may not be mounted."""
    if dead := [path for path in map(Path, paths) if path.is_symlink() and not os.access(path, os.F_OK)]:
        more, target = f" ({len(dead):,} such links)" if len(dead) > 1 else "", dead[0].readlink()
        raise ConfigurationError(
            f"{dead[0]} links to {target}, which is not there or unreadable{more}: mount it, or remove the link"
        )


def files_matching(path: Path) -> list[Path]:
    """Returns the files that a glob pattern finds, each once. Folders that exist are taken by name, not as patterns."""
    base = next(folder for folder in path.parents if folder.exists())
    found = [base / name for name in glob(str(path.relative_to(base)), root_dir=base, recursive=True)]  # noqa: PTH207
    refuse_dead_links(found)
    files = sorted((file for file in found if file.is_file()), key=lambda file: -len(file.parts))
    return sorted({file.resolve(): file for file in files}.values())  # a link may lead into its own folder


def in_short(names: Sequence[str], most: int = 4) -> str:
    """Returns the first names and the number of the others: "a.txt, b.txt and 7 more"; "nothing" without any."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more or "nothing"
