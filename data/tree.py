"""Lists the files below a folder of data: links are followed, and links that lead nowhere are refused."""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
        elif _leads_on(entry, above):
            yield from files_below(entry.path, is_data, above)


def visible_entries(folder: str | Path, is_data: Callable[[str], object] = bool) -> list[os.DirEntry[str]]:
    """Returns the entries of a folder, by name, without hidden files; see `files_below`."""
    try:
        found = sorted((of for of in os.scandir(folder) if of.name[0] != "."), key=lambda entry: entry.name)
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be read: {error.strerror}") from error
    links = {of.path: is_data(of.name) or "." not in of.name for of in found if of.is_symlink()}
    refuse_dead_links(path for path, may_be_data in links.items() if may_be_data)
    return [of for of in found if of.path not in links or os.access(of.path, os.F_OK)]


def refuse_dead_links(paths: Iterable[str | Path]) -> None:
    """Raises ConfigurationError if some of these paths are links that lead nowhere: a disk may not be mounted."""
    if dead := [path for path in map(Path, paths) if path.is_symlink() and not os.access(path, os.F_OK)]:
        more, target = f" ({len(dead):,} such links)" if len(dead) > 1 else "", dead[0].readlink()
        raise ConfigurationError(
            f"{dead[0]} links to {target}, which is not there or unreadable{more}: mount it, or remove the link"
        )


def files_matching(path: Path) -> list[Path]:
    """Returns the files that a pattern finds, each once; a folder that is there is no pattern, whatever its name."""
    base = next(folder for folder in path.parents if folder.exists())
    found = list(_matching(base, path.relative_to(base).parts))
    refuse_dead_links(found)
    files = sorted((file for file in found if file.is_file()), key=lambda file: -len(file.parts))
    return sorted({file.resolve(): file for file in files}.values())  # a link may lead into its own folder


def _matching(folder: Path, parts: Sequence[str], above: Collection[str] = ()) -> Iterator[Path]:
    """Yields what a pattern finds in a folder; glob's own ** goes around in circles of links."""
    first, rest = parts[0], parts[1:]
    if first == "**":
        yield from _matching(folder, rest or ("*",))
        above = {*above, os.path.realpath(folder)}
        for entry in visible_entries(folder, lambda name: False):
            if entry.is_dir() and _leads_on(entry, above):
                yield from _matching(Path(entry.path), parts, above)
    else:
        for name in glob(first, root_dir=folder):  # noqa: PTH207  # Path.glob takes no dead links
            yield from _matching(folder / name, rest) if rest else [folder / name]


def _leads_on(folder: os.DirEntry[str], above: Collection[str]) -> bool:
    return not folder.is_symlink() or os.path.realpath(folder.path) not in above


def by_ending(names: Iterable[str]) -> str:
    """Returns how many files have each ending: "2,051 .py, 3 .heic, 1 without"."""
    counts = Counter(Path(name).suffix.lower() or "without" for name in names)
    return ", ".join(f"{count:,} {ending}" for ending, count in counts.most_common(8))
