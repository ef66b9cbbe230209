"""Decides whether a run may continue from a checkpoint: same configuration, same data, same vocabularies.

Every key matters unless it stands in `MAY_DIFFER`: the engine promises that those change no bit of the training, or
they only set how long the run is, how often it does something, or where. (Another kind of device changes the last bits;
a run that goes on warns of it.) `trainer.steps` may matter to a layer, which only the worker that has built it can
know. Data may change although the configuration does not. This file imports no torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from ..typed_section import flat, shown, typed, unknown_key
from .files import CheckpointError, CheckpointInfo, Json, matches_any, sha256_of, shorten

if TYPE_CHECKING:
    from ..data.source import Source

STEPS = "trainer.steps"
_MAY_DIFFER_IN = {
    "pipeline": "K workers placement worker_devices partition cost remat keep memory backend shard_optimizer device "
    "offload offload_dir",
    "model": "trust",
    "trainer": "steps epochs seconds evaluate_every evaluate_first nonfinite_limit patience samples trace_steps",
    "data": "workers preparation_workers cache_dir evaluation_* strict held_out tokenizer",
}
MAY_DIFFER = (
    *("name", "task.generation", "checkpoint", "logging", "launch"),
    *(f"{section}.{key}" for section, keys in _MAY_DIFFER_IN.items() for key in keys.split()),
)
VOCABULARIES = ("*.vocabulary", "*.source_vocabulary", "*.target_vocabulary")
NOT_SET = "(not set)"
# Values that give the same bits. These schedules add up the gradients of the micro-batches from the first to the last,
# two others from the last to the first (`tests/golden`). Earlier runs lacked the other keys.
SCHEDULES_FROM_THE_LAST = {"gpipe", "breadth_first"}
SAME_BITS: Mapping[str, set[object]] = {
    "pipeline.schedule": {"1f1b", "interleaved_1f1b", "zero_bubble"},
    "model.positions": {NOT_SET, "sinusoids"},
    "data.normalization": {NOT_SET, "nmt_nfkc"},
    "precision.deterministic": {NOT_SET, True},
    **{
        key: {NOT_SET, None}
        for key in ("precision.boundaries", "precision.loss_scale", "optimizer.groups", "model.decoder_layers")
    },
    **{
        key: {NOT_SET, False}
        for key in ("pipeline.compile", "precision.tf32", "data.smaller_vocabulary", "model.share_embeddings")
    },
}
# Where the data lie: free where the checkpoint has their fingerprint, which is compared (`require_same_data`).
COMPARED_BY_CONTENT = ("data.root", "data.train", "data.dev", "data.test", "data.columns")
MAKERS = ("babel", "sentencepiece")  # other releases make other data


# --- configuration ---------------------------------------------------------------------------------------------------


def differences(
    saved: Mapping[str, Json], new: Mapping[str, Json], may_differ: Iterable[str] = MAY_DIFFER
) -> dict[str, tuple[Json, Json]]:
    """Returns the keys that differ and matter. If there is none, the run may continue.

    A value that gives the same bits as the saved one (`SAME_BITS`, `SCHEDULES_FROM_THE_LAST`) makes no difference, nor
    does a key of data or pipeline that only one release knows and that is null.

    Args:
        may_differ: keys that do not matter: ``optimizer.lr``, ``optimizer`` (all below it) or ``model.drop*``.

    Returns:
        Dotted key -> (saved value, new value); `NOT_SET` stands for a key that one side does not have.
    """
    patterns, before, now = list(may_differ), flat(saved), flat(new)
    found = {}
    for key in {**before, **now}:
        old, fresh = pair = before.get(key, NOT_SET), now.get(key, NOT_SET)
        same = old == fresh and isinstance(old, bool) == isinstance(fresh, bool)  # True == 1 in Python
        is_null = all(value in (NOT_SET, None) for value in pair)
        same = same or (key.startswith(("data.", "pipeline.")) and is_null)  # a newer key
        same = same or (key == "pipeline.schedule" and SCHEDULES_FROM_THE_LAST.issuperset(pair))
        if not (same or matches_any(key, patterns) or (key in SAME_BITS and SAME_BITS[key].issuperset(pair))):
            found[key] = pair
    return found


def require_compatible(
    info: CheckpointInfo, new: Mapping[str, Json], allow_changes: Sequence[str] = (), by_steps: Sequence[str] = ()
) -> None:
    """Refuses a configuration that would not continue the training of ``info``.

    Args:
        allow_changes: further keys that may differ.
        by_steps: names of layers that depend on `trainer.steps`, as scheduled drop path does. If there is none,
            `trainer.steps` may differ.

    Raises:
        CheckpointError: it names the keys with both values, and what to type to return to the old ones or to allow
            the new ones. Another size of a vocabulary cannot be allowed.
    """
    if sizes := vocabulary_sizes(info, new):
        others = ", ".join(f"{key}={typed(old)} there, {shown(now)} here" for key, (old, now) in sizes.items())
        raise CheckpointError(
            f"{info.path} has another vocabulary ({others}), which cannot change: the model has learnt its ids. Type "
            f"{shlex.join(f'{key}={typed(old)}' for key, (old, _) in sizes.items())}, and for other text "
            f"data.tokenizer={info.run_dir}"
        )
    places = () if info.state.data_fingerprint is None else COMPARED_BY_CONTENT
    may_differ = {*MAY_DIFFER, *places} - ({STEPS} if by_steps else set())
    differing = differences(info.state.configuration, new, (*may_differ, *allow_changes))
    if not differing:
        return
    lines = [f"  {key}: {shown(old)} in the checkpoint, {shown(now)} now" for key, (old, now) in differing.items()]
    if STEPS in differing:
        lines.append(f"  The number of steps decides what these layers do (begin_step): {shorten(by_steps)}")
    back = (f"~{key}" if old == NOT_SET else f"{key}={typed(old)}" for key, (old, _) in differing.items())
    raise CheckpointError(
        f"{info.path} was made with another configuration:\n"
        + "\n".join(lines)
        + f"\nTo go on as it was made, type: {shlex.join(back)}\n"
        + _how_to_allow([*allow_changes, *differing])
    )


def refuse_unknown(changes: Sequence[str], new: Mapping[str, Json], info: CheckpointInfo | None) -> None:
    """Refuses entries of `checkpoint.allow_changes` that name no key of the run or of the checkpoint it resumes.

    Raises:
        CheckpointError: it names the nearest known keys.
    """
    known = [*new, *flat(new), *({} if info is None else flat(info.state.configuration))]
    for pattern in changes:
        if not any(matches_any(key, [pattern]) for key in known):
            raise CheckpointError(f"checkpoint.allow_changes=[{pattern}]: {unknown_key(pattern, known)}")


def vocabulary_sizes(info: CheckpointInfo, new: Mapping[str, Json]) -> dict[str, tuple[Json, Json]]:
    """Returns the sizes of vocabularies that differ: key -> (saved, new). Weights of one do not fit the other."""
    now = flat(new)
    sizes = {key: size for key, size in flat(info.state.configuration).items() if matches_any(key, VOCABULARIES)}
    return {key: (size, now[key]) for key, size in sizes.items() if now.get(key, size) != size}


def _how_to_allow(changes: Sequence[str]) -> str:
    """Returns the sentence that says what to type to continue with these changed keys."""
    words = shlex.quote(f"checkpoint.allow_changes=[{','.join(changes)}]")
    return f"To go on with the change, type: {words} (it is then no longer the same training)"


# --- data ------------------------------------------------------------------------------------------------------------


def require_same_data(info: CheckpointInfo, source: Source | None, allow_changes: Sequence[str]) -> None:
    """Refuses other data than those of ``info``. Rank 0 calls it before any file of the run is overwritten.

    `data` in ``allow_changes`` allows other data. Other vocabularies are never allowed: the model has learnt their ids.

    Raises:
        CheckpointError: the data differ; the message says what to do.
    """
    require_same_vocabularies(info, vocabularies(source))
    saved, now = info.state.data_fingerprint, None if source is None else source.fingerprint()
    if None not in (saved, now) and saved != now and not matches_any("data", allow_changes):
        raise CheckpointError(
            f"{info.path} was trained on other data than there are now: {_advice(info)}\n"
            + _how_to_allow([*allow_changes, "data"])
        )


def vocabularies(source: Source | None) -> dict[str, str]:
    """Returns the SHA-256 of each vocabulary file of the source; none where it has no vocabulary."""
    if source is None:
        return {}
    with TemporaryDirectory(prefix="gpipe-vocabulary-") as folder:
        source.keep_vocabularies(Path(folder))
        return vocabularies_in(Path(folder))


def vocabularies_in(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of each file in a folder of vocabularies."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return {path.name: sha256_of(path) for path in paths if path.is_file() and not path.name.startswith(".")}


def with_vocabulary(data: Mapping[str, Json], info: CheckpointInfo) -> dict[str, Json]:
    """Returns the section `data` with a run's vocabulary as `tokenizer`, if it has that key and leaves it null."""
    takes_one = data.get("tokenizer", "") is None
    return {**data, **({"tokenizer": str(info.run_dir.absolute())} if takes_one else {})}


def other_vocabulary(info: CheckpointInfo, now: Mapping[str, str]) -> str | None:
    """Returns the name of a vocabulary that differs from the one that ``info`` was trained with; None: none does.

    Args:
        now: SHA-256 of each vocabulary file of the data (`vocabularies`).
    """
    before = info.state.vocabularies
    return next((name for name in sorted(now) if before.get(name, now[name]) != now[name]), None)


def require_same_vocabularies(info: CheckpointInfo, now: Mapping[str, str]) -> None:
    """Refuses vocabularies whose ids mean other texts than those that ``info`` was trained with.

    Raises:
        CheckpointError: one differs.
    """
    if name := other_vocabulary(info, now):
        raise CheckpointError(f"{name} is another vocabulary than {info.path} was trained with: {_advice(info)}")


def _advice(info: CheckpointInfo) -> str:
    """Returns what to do if data or vocabularies are not those of ``info``."""
    made_with = ", ".join(f"{name} {info.versions[name]}" for name in MAKERS if name in info.versions)
    return (
        f"put the former files back, take the run's vocabulary (data.tokenizer={info.run_dir}), or install the "
        f"releases that made the data ({made_with}); or begin a new run with its weights: "
        f"checkpoint.init_from={info.run_dir}"
    )
