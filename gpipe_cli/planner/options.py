"""Defines the section `plan`, typed. Without torch: the command refuses a wrong value before it imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ConfigurationError, Problems
from ..typed_section import Count, Positive, read_section, shown
from .devices import Device, describe, parse_bytes

THIS = "this"


@dataclass(frozen=True)
class _Typed:
    efficiency: Positive
    bandwidth_efficiency: Positive
    longest: bool
    kernels: Literal["auto", "accelerator", "plain", "cpu"]
    bytes_per_parameter: Positive | None
    best: bool
    devices: Count | None
    grow: str | None
    format: Literal["text", "json"]
    page: str | None


@dataclass(frozen=True)
class Options(_Typed):
    """Holds the section `plan`; conf/plan.yaml describes each key.

    Attributes:
        device: None: the present machine, to be measured.
        memory, fit: bytes.
        most_workers: of a replica, for which the present machine has devices; None: one for each cell.
    """

    device: Device | None
    memory: int | None
    fit: int | None
    most_workers: int | None = None

    @classmethod
    def of_this_machine(cls, most_workers: int) -> Options:
        """Returns the options of a search for the present machine, with at most so many workers of a replica."""
        return cls(
            efficiency=1.0,
            bandwidth_efficiency=1.0,
            longest=False,
            kernels="auto",
            bytes_per_parameter=None,
            best=True,
            devices=None,
            grow=None,
            format="text",
            page=None,
            device=None,
            memory=None,
            fit=None,
            most_workers=most_workers,
        )

    @classmethod
    def read(cls, section: Mapping[str, Any], problems: Problems) -> Options:
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
            values["device"] = None if free["device"] == THIS else describe(_device_of(free["device"]))
        for key in ("memory", "fit"):
            with problems.collected():
                values[key] = None if free[key] is None else parse_bytes(free[key], f"plan.{key}")
        if sum(bool(values.get(key)) for key in ("fit", "best", "grow")) > 1:
            problems.append("plan.fit, plan.best and plan.grow look for different things: give one of them")
        return object.__new__(cls) if problems else cls(**values)


def _device_of(value: Any) -> str | Mapping[str, Any]:
    if isinstance(value, (str, Mapping)):
        return value
    raise ConfigurationError(f"plan.device={value}: use a name such as h100, this, or figures in braces")


def with_free_cut(config: dict[str, Any], options: Options) -> tuple[dict[str, Any], list[str]]:
    """Returns the configuration without sizes of cells if `plan.grow` tries other layers, and a line that says so."""
    sizes = (config.get("pipeline") or {}).get("partition")
    if options.grow is None or not isinstance(sizes, list):
        return config, []
    pipeline = {**config["pipeline"], "partition": "auto"}
    return {**config, "pipeline": pipeline}, [f"plan.grow plans with pipeline.partition=auto in place of {sizes}"]


def with_enough_examples(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns a configuration that can be planned, and a line for the person where the mini-batch was made larger.

    Every micro-batch has at least one example.
    """
    lines: list[str] = []
    pipeline, data = dict(config.get("pipeline") or {}), dict(config.get("data") or {})
    size, M, replicas = data.get("batch_size"), pipeline.get("M"), pipeline.get("replicas")
    if isinstance(size, int) and isinstance(M, int) and isinstance(replicas, int) and data.get("batch_tokens") is None:
        needed = M * replicas
        if size < needed:
            lines.append(f"data.batch_size={size} has no {needed} micro-batches: planned with data.batch_size={needed}")
            data["batch_size"] = needed
    return {**config, "pipeline": pipeline, "data": data}, lines
