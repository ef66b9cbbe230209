"""Saves and restores a learning rate schedule: its own state, and what it has changed in the optimizer's groups."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from .files import CheckpointError, Json

GROUPS = "optimizer_groups"  # beside the keys of the schedule's own state
KIND = "python_type"  # marks a value that JSON would return with another type
KINDS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "dict": dict,
    "Counter": lambda items: Counter(dict(items)),  # MultiStepLR's milestones
}


class LRScheduleState:
    """Saves a learning rate schedule and restores it, bit for bit.

    Functions are made anew from the configuration; so are the optimizer's groups, but for what the schedule has changed
    in them since: learning rates, and momentum or betas with torch's OneCycleLR and CyclicLR.

    Args:
        lr_schedule: before its first step.
        optimizer: its optimizer.

    Raises:
        CheckpointError: the schedule keeps something that a checkpoint cannot hold; raised before any step is lost.
    """

    def __init__(self, lr_schedule: torch.optim.lr_scheduler.LRScheduler, optimizer: torch.optim.Optimizer) -> None:
        self._lr_schedule, self._optimizer = lr_schedule, optimizer
        self._begun = [copy.deepcopy(settings) for settings in self._settings()]
        self.save()

    def save(self) -> dict[str, Json]:
        """Returns the state as values for a manifest.

        Raises:
            CheckpointError: the schedule keeps something that a checkpoint cannot hold.
        """
        changed = [
            {key: value for key, value in now.items() if key == "lr" or value != begun.get(key)}
            for now, begun in zip(self._settings(), self._begun, strict=True)
        ]
        state = {**self._lr_schedule.state_dict(), GROUPS: changed}
        return {key: as_json(value, f"{type(self._lr_schedule).__name__}.{key}") for key, value in state.items()}

    def restore(self, saved: Mapping[str, Json]) -> None:
        """Restores schedule and groups to the state that `save` returned."""
        state: dict[str, Any] = {key: from_json(value) for key, value in saved.items()}
        changed = state.pop(GROUPS)
        self._lr_schedule.load_state_dict(state)
        for group, settings in zip(self._optimizer.param_groups, changed, strict=True):
            group.update(settings)

    def replay(self, steps: int) -> None:
        """Brings schedule and groups to where the present configuration has them after so many steps.

        Used where a run continues with another learning rate or schedule, for which the saved ones mean nothing.
        """
        for _ in range(steps):
            self._lr_schedule.step()

    def _settings(self) -> list[dict[str, Any]]:
        groups = self._optimizer.param_groups
        return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def as_json(value: object, name: str) -> Json:
    """Converts ``value`` to JSON values from which `from_json` restores the same types.

    Raises:
        CheckpointError: it contains something that is neither number, text, list, tuple nor dictionary.
    """
    kind = type(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if kind is list:
        return [as_json(item, name) for item in cast("list[object]", value)]
    if kind is dict and all(isinstance(key, str) for key in cast("dict[object, object]", value)):
        return {key: as_json(item, f"{name}.{key}") for key, item in cast("dict[str, object]", value).items()}
    if kind.__name__ in KINDS:
        items = [list(pair) for pair in value.items()] if isinstance(value, dict) else list(cast("tuple[Any]", value))
        return {KIND: kind.__name__, "items": as_json(items, name)}
    raise CheckpointError(
        f"lr_schedule._target_: {name} is of type {kind.__name__}, which a checkpoint cannot hold: let the schedule "
        "keep numbers, texts, and lists or dictionaries of them, and functions under other names than its "
        "state_dict() has"
    )


def from_json(value: Json) -> Any:
    """Restores what `as_json` encoded."""
    if isinstance(value, Mapping):
        if KIND in value:
            return KINDS[str(value[KIND])](from_json(value["items"]))
        return {key: from_json(item) for key, item in value.items()}
    return [from_json(item) for item in value] if isinstance(value, list) else value
