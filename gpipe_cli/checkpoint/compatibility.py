"""May a run go on from a checkpoint that was made with another configuration? No torch: the command process uses it.

Every key matters unless it stands in ``MAY_DIFFER``: the engine promises that those change no bit of the training, or
they only say how long, how often or where. How long can matter to a layer, which only a worker knows that has built it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from .files import CheckpointError, CheckpointInfo, Json, shorten

MAY_DIFFER = (
    "name",
    "pipeline.K",
    "pipeline.workers",
    "pipeline.partition",
    "pipeline.cost",
    "pipeline.remat",
    "trainer.steps",
    "trainer.epochs",
    "trainer.seconds",
    "trainer.evaluate_every",
    "trainer.evaluate_first",
    "trainer.nonfinite_limit",
    "trainer.patience",
    "trainer.samples",
    "trainer.trace_steps",
    "task.generation",
    "data.workers",
    "data.cache_dir",
    "data.evaluation_*",
    "checkpoint",
    "logging",
    "launch",
    "verify",
)
NOT_SET = "(not set)"
_PLAIN = re.compile(r"(?!(?:null|true|false|inf|nan)$)[A-Za-z_][\w./-]*", re.IGNORECASE)  # read as a string unquoted


def differences(
    saved: Mapping[str, Json], new: Mapping[str, Json], allow_changes: Iterable[str] = ()
) -> dict[str, tuple[Json, Json]]:
    """The keys that differ and matter, with their saved and new value; empty means that the run may go on.

    Args:
        allow_changes: more keys that may differ: ``optimizer.lr``, ``optimizer`` (all below it) or ``model.drop*``.

    Returns:
        Dotted key -> (saved value, new value); ``NOT_SET`` stands for a key that one side does not have.
    """
    return _differences(saved, new, (*MAY_DIFFER, *allow_changes))


def _differences(
    saved: Mapping[str, Json], new: Mapping[str, Json], patterns: Iterable[str]
) -> dict[str, tuple[Json, Json]]:
    patterns, before, now = list(patterns), _flatten(saved), _flatten(new)
    return {
        key: (before.get(key, NOT_SET), now.get(key, NOT_SET))
        for key in {**before, **now}
        if not _same(before.get(key, NOT_SET), now.get(key, NOT_SET)) and not _matches(key, patterns)
    }


def require_compatible(info: CheckpointInfo, new: Mapping[str, Json], allow_changes: Iterable[str] = ()) -> None:
    """Refuse to go on from ``info`` under a configuration that would not continue the same training.

    Raises:
        CheckpointError: it names the keys with both values, and what to type to return to the old ones or to insist.
    """
    differing = differences(info.state.configuration, new, allow_changes)
    if differing:
        raise _refusal(info, differing, allow_changes, "")


def require_same_steps(
    info: CheckpointInfo, new: Mapping[str, Json], allow_changes: Iterable[str], layers: Sequence[str]
) -> None:
    """Refuse to go on from ``info`` with another `trainer.steps` where layers go by it, as scheduled drop path does.

    Args:
        layers: the names of those layers; none: the number may differ.

    Raises:
        CheckpointError: as `require_compatible`; it names the layers too.
    """
    saved, wanted = ({"trainer.steps": _flatten(tree).get("trainer.steps")} for tree in (info.state.configuration, new))
    differing = _differences(saved, wanted, allow_changes) if layers else {}
    if differing:
        why = f"  The number of steps decides what these layers do (begin_step): {shorten(layers)}\n"
        raise _refusal(info, differing, allow_changes, why)


def _refusal(
    info: CheckpointInfo, differing: Mapping[str, tuple[Json, Json]], allow_changes: Iterable[str], why: str
) -> CheckpointError:
    lines = [f"  {key}: {_shown(old)} in the checkpoint, {_shown(now)} now" for key, (old, now) in differing.items()]
    back = (f"~{key}" if old == NOT_SET else f"{key}={_typed(old)}" for key, (old, _) in differing.items())
    insist = f"checkpoint.allow_changes=[{','.join([*allow_changes, *differing])}]"
    return CheckpointError(
        f"{info.path} was made with another configuration:\n"
        + "\n".join(lines)
        + f"\n{why}To go on as it was made, type: {shlex.join(back)}\n"
        + f"To go on with the change, type: {shlex.quote(insist)} (it is then no longer the same training)"
    )


def _flatten(tree: Mapping[str, Json], prefix: str = "") -> dict[str, Json]:
    flat: dict[str, Json] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _matches(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(key, pattern) or fnmatchcase(key, f"{pattern}.*") for pattern in patterns)


def _same(saved: Json, new: Json) -> bool:
    return saved == new and isinstance(saved, bool) == isinstance(new, bool)


def _shown(value: Json) -> str:
    text = _typed(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _typed(value: Json) -> str:
    """A value in the form that Hydra's command line reads."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value if value == NOT_SET or _PLAIN.fullmatch(value) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_typed(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_typed(entry) for entry in value) + "]"
    return repr(value)
