"""Does a resumed run read the data that it began with?

Its configuration may be the same and its data others: a corpus is made again with another release of babel or
sentencepiece, files under `data.root` are edited. The run would go on with other sentences, or with ids that stand for
other pieces, and nothing would show it but the loss.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory

from ..data.source import Source
from .files import CheckpointError, CheckpointInfo, vocabulary_folder

KEY = "data"  # in checkpoint.allow_changes


def fingerprint(source: Source | None) -> str | None:
    """Of the training data; None where the source gives none, or this worker reads none."""
    make = getattr(source, "fingerprint", None)
    return None if make is None else str(make())


def require_same_data(info: CheckpointInfo, source: Source | None, allow_changes: Sequence[str]) -> None:
    """Refuse to go on from ``info`` with other data; on rank 0, before anything of the run is written over.

    Other data may be insisted on, by `data` in ``allow_changes``. Other vocabularies may not: to the model their ids
    mean what they meant before.

    Raises:
        CheckpointError: the data differ; it says what to do.
    """
    _require_same_vocabularies(info, source)
    saved, now = info.state.data_fingerprint, fingerprint(source)
    if None in (saved, now) or saved == now or any(fnmatchcase(KEY, pattern) for pattern in allow_changes):
        return
    insist = shlex.quote(f"checkpoint.allow_changes=[{','.join([*allow_changes, KEY])}]")
    raise CheckpointError(
        f"{info.path} was trained on other data than there are now: {_advice(info)}\n"
        f"To go on with the change, type: {insist} (it is then no longer the same training)"
    )


def _require_same_vocabularies(info: CheckpointInfo, source: Source | None) -> None:
    keep = getattr(source, "keep_vocabularies", None)
    if keep is None:
        return
    kept = vocabulary_folder(_run_dir(info))
    with TemporaryDirectory(prefix="gpipe-vocabulary-") as folder:
        keep(Path(folder))
        for now in sorted(Path(folder).iterdir()):
            before = kept / now.name
            if before.is_file() and before.read_bytes() != now.read_bytes():
                raise CheckpointError(f"{before} is another vocabulary than the data have now: {_advice(info)}")


def _advice(info: CheckpointInfo) -> str:
    makers = [f"{name} {info.versions[name]}" for name in ("babel", "sentencepiece") if name in info.versions]
    releases = f"the former release ({', '.join(makers)})" if makers else "the former release"
    return (
        "the data have changed since the run began (another release of babel or sentencepiece makes other data, and so "
        f"do other files under data.root). To go on, install {releases}, or put the former files back; or begin "
        f"a new run: with checkpoint.init_from={_run_dir(info)} it begins with the weights of this one, if their sizes "
        "agree"
    )


def _run_dir(info: CheckpointInfo) -> Path:
    return info.path.parent.parent
