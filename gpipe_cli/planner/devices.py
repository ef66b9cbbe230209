"""Describes the devices that a plan can be made for: their rates, links and memory.

devices.yaml has those with a name. Figures are peaks; `plan.efficiency` is the share of them that a real run reaches.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

from ..errors import ConfigurationError
from ..typed_section import NotNegative, Positive, nearest, read_section


@dataclass(frozen=True)
class Device:
    """Describes one accelerator and its links to its neighbours.

    Attributes:
        name: name for tables.
        flops: FLOP/s in float32 (a multiply-add is two).
        half_flops: FLOP/s in bfloat16.
        memory: bytes.
        bandwidth: bytes/s of its memory.
        link: bytes/s to a neighbour, one way.
        latency: seconds from a send to the moment its first byte arrives.
        overhead: seconds that starting one operation costs.
        host: seconds for which a send or a receive keeps its worker from computing; 0 where it runs beside.
        kernels: see `layer_facts.kernels_of`.
    """

    name: str
    flops: Positive
    half_flops: Positive
    memory: Positive
    bandwidth: Positive
    link: Positive
    latency: NotNegative = 10e-6
    overhead: NotNegative = 5e-6
    host: NotNegative = 0.0
    kernels: Literal["accelerator", "cpu"] = "accelerator"


PRESETS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
_DESCRIBED = ("flops", "memory", "bandwidth", "link")


def describe(device: Any) -> Device:
    """Returns a preset by its name, or a device of the given figures.

    Raises:
        ConfigurationError: no such preset, or a key or value that a device does not have.
    """
    if isinstance(device, str):
        if device not in PRESETS:
            near = nearest(device, PRESETS)
            guess = f"did you mean {' or '.join(near)}? " if near else ""
            raise ConfigurationError(
                f"plan.device={device}: {guess}use one of {', '.join(PRESETS)}, this, or "
                "{flops: 1e13, memory: 16GB, bandwidth: 5e11, link: 1e10}"
            )
        device = {"name": device, **PRESETS[device]}
    if not isinstance(device, Mapping):
        raise ConfigurationError(f"plan.device={device}: use a name such as h100, this, or figures in braces")
    if missing := [key for key in _DESCRIBED if key not in device]:
        raise ConfigurationError(f"plan.device has no {', '.join(missing)}: give all of {', '.join(_DESCRIBED)}")
    defaults = {field.name: field.default for field in fields(Device) if field.default is not MISSING}
    values = {"name": "described", **device}
    values["memory"] = parse_bytes(device["memory"], "plan.device.memory")
    return read_section(Device, {**defaults, "half_flops": values["flops"], **values}, "plan.device")


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def parse_bytes(value: Any, key: str) -> int:
    """Returns the bytes that ``16GB``, ``16GiB`` or ``1.5e9`` stands for.

    Raises:
        ConfigurationError: the value is anything else; the message names ``key``.
    """
    text = str(value).strip().replace(" ", "").upper()
    digits = text.rstrip("BKMGTI")
    unit = text[len(digits) :]
    try:
        number = float(digits) * _UNITS[unit]
    except (ValueError, KeyError):
        number = 0.0
    if isinstance(value, bool) or not 0 < number < float("inf"):
        raise ConfigurationError(f"{key}={value}: use a number of bytes, as 16GB, 16GiB or 1.6e10")
    return round(number)
