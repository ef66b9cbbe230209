"""The keys of `plan`, typed. No torch: the command refuses a wrong value before it imports anything large."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

from ..errors import ConfigurationError
from ..typed_section import Count, Positive, read_section
from .devices import Device, describe, parse_bytes

THIS, AUTO = "this", "auto"
PICTURES = (".svg", ".png", ".pdf")


@dataclass(frozen=True)
class Options:
    """What is planned for, and what is looked for; conf/plan/default.yaml says what each key means.

    Attributes:
        device: None: the present machine, to be measured.
        memory, fit: bytes.
        find_M: `pipeline.M=auto`: the fastest M that fits.
        room: for how many workers of a replica the present machine has devices; None: for one a cell.
    """

    device: Device | None
    efficiency: float
    bandwidth_efficiency: float
    speeds: list[float] | None
    memory: int | None
    longest: bool
    kernels: str
    bytes_per_parameter: float | None
    fit: int | None
    best: bool
    grow: str | None
    candidates: list[int] | None
    format: str
    picture: str | None
    find_M: bool = False
    room: int | None = None

    @classmethod
    def default(cls) -> Options:
        """The values of conf/plan/default.yaml."""
        import gpipe_cli.conf

        folder = Path(next(iter(gpipe_cli.conf.__path__)))
        return cls.from_section(yaml.safe_load((folder / "plan" / "default.yaml").read_text(encoding="utf-8")))

    @classmethod
    def from_section(cls, section: Mapping[str, Any]) -> Options:
        """Checks the section `plan`.

        Raises:
            ConfigurationError: one line for each key that is wrong.
        """
        free = {key: section.get(key) for key in ("device", "memory", "fit")}
        typed = read_section(_Typed, {key: value for key, value in section.items() if key not in free}, "plan")
        device = None if free["device"] == THIS else describe(_device_of(free["device"]))
        sizes = {key: None if free[key] is None else parse_bytes(free[key], f"plan.{key}") for key in ("memory", "fit")}
        values = {field.name: getattr(typed, field.name) for field in fields(typed)}
        options = cls(device=device, memory=sizes["memory"], fit=sizes["fit"], **values)
        options._check()
        return options

    def _check(self) -> None:
        if sum(map(bool, (self.fit, self.best, self.grow))) > 1:
            raise ConfigurationError("plan.fit, plan.best and plan.grow look for different things: give one of them")
        if self.picture is not None and Path(self.picture).suffix not in PICTURES:
            raise ConfigurationError(f"plan.picture={self.picture}: the name must end in {', '.join(PICTURES)}")


@dataclass(frozen=True)
class _Typed:
    efficiency: Positive
    bandwidth_efficiency: Positive
    speeds: list[Positive] | None
    longest: bool
    kernels: Literal["auto", "accelerator", "plain", "cpu"]
    bytes_per_parameter: Positive | None
    best: bool
    grow: str | None
    candidates: list[Count] | None
    format: Literal["text", "json"]
    picture: str | None


def keys() -> list[str]:
    """Every key of the section, dotted."""
    return [f"plan.{name}" for name in ("device", "memory", "fit", *(field.name for field in fields(_Typed)))]


def _device_of(value: Any) -> str | Mapping[str, Any]:
    if isinstance(value, (str, Mapping)):
        return value
    raise ConfigurationError(f"plan.device={value}: use a name such as h100, this, or figures in braces")


def with_room(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A configuration as a plan can use it: a number for `pipeline.M=auto`, an example for each micro-batch.

    Returns:
        The configuration, and what was changed in words.
    """
    changed: dict[str, Any] = dict(config)
    lines: list[str] = []
    pipeline, data = dict(config.get("pipeline") or {}), dict(config.get("data") or {})
    if pipeline.get("M") == AUTO:
        pipeline["M"] = 1
    size, M, replicas = data.get("batch_size"), pipeline.get("M"), pipeline.get("replicas")
    if not (isinstance(size, int) and isinstance(M, int) and isinstance(replicas, int)):
        return {**changed, "pipeline": pipeline, "data": data}, lines
    if data.get("batch_tokens") is None and size < (parts := M * replicas):
        lines.append(f"data.batch_size={size} has no {parts} micro-batches: planned with data.batch_size={parts}")
        data["batch_size"] = parts
    return {**changed, "pipeline": pipeline, "data": data}, lines
