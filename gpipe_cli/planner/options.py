"""Defines the section `plan`, typed. Without torch: the command refuses a wrong value before it imports torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import Problems
from ..typed_section import Positive, Size, read_section, shown
from .devices import Device, describe, parse_bytes

THIS = "this"


@dataclass(frozen=True)
class _Typed:
    efficiency: Positive = 1.0
    longest: bool = False
    bytes_per_parameter: Positive | None = None
    best: bool = False
    devices: Size | None = None
    grow: str | None = None
    grow_by: Size = 1
    format: Literal["text", "json", "lists"] = "text"


@dataclass(frozen=True)
class Options(_Typed):
    """Holds the section `plan`; conf/plan.yaml describes each key.

    Attributes:
        device: None: the present machine, to be measured.
        memory, fit: bytes.
        most_workers: most workers of a replica, as this machine has devices; None: one for each cell.
    """

    device: Device | None = None
    memory: int | None = None
    fit: int | None = None
    most_workers: int | None = None

    @property
    def searches(self) -> bool:
        """Returns whether several plans are made."""
        return self.best or self.fit is not None or self.grow is not None

    @classmethod
    def read(cls, section: Mapping[str, Any], problems: Problems) -> "Options":
        """Returns the section `plan`; with problems, of which each adds a line, not all of it."""
        if not isinstance(section, Mapping):
            problems.append(f"plan must be a section with keys, not {shown(section)}")
            return object.__new__(cls)
        free = {key: section.get(key) for key in ("device", "memory", "fit")}
        rest = {key: value for key, value in section.items() if key not in free}
        values: dict[str, Any] = {"device": None, "memory": None, "fit": None}
        with problems.collected():
            values |= vars(read_section(_Typed, rest, "plan"))
        with problems.collected():
            values["device"] = None if free["device"] == THIS else describe(free["device"])
        for key in ("memory", "fit"):
            with problems.collected():
                values[key] = None if free[key] is None else parse_bytes(free[key], f"plan.{key}")
        if values.get("fit") and (values.get("best") or values.get("grow")):
            problems.append("plan.fit looks for other things than plan.best and plan.grow: give one of them")
        return object.__new__(cls) if problems else cls(**values)
