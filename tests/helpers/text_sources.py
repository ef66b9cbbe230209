"""Opens sources of a user's own text as tests need them: prepared, with a cache beside the text."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gpipe_cli.data.source import no_report
from gpipe_cli.data.store import Store

Kind = TypeVar("Kind")


def prepared(kind: Callable[..., Kind], root: Path, settings: Mapping[str, Any]) -> Kind:
    """Returns a prepared source of the text under ``root``."""
    made: Any = kind(str(root), **{"cache_dir": str(root.parent / "cache"), **settings})
    made.prepare(no_report)
    return made  # type: ignore[no-any-return]  # sources have no common base class


def defects(made: Any) -> dict[str, Any]:
    """Returns what the preparation of a source has noted of lines that cannot be used."""
    return dict(json.loads((made._store.folder / "defects.json").read_text()))


def places(made: Any) -> list[tuple[str, str, int]]:
    """Returns kind, file and line of every defect."""
    return [(one["kind"], Path(one["file"]).name, one["line"]) for one in defects(made)["defects"]]


def sentences(store: Store, code: str, side: int) -> list[str]:
    """Returns the training sentences of a language on one side of a store, decoded, in the order of the disk."""
    count, number = store.sizes[code], [*store.languages].index(code)
    ids, lengths = store.gather(store.locate(np.full(count, number), np.arange(count)))[side]
    vocabulary = (store.source_vocabulary, store.target_vocabulary)[side]
    return [vocabulary.decode(of.tolist()) for of in np.split(ids, np.cumsum(lengths)[:-1])]
