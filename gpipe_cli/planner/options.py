"""Defines the section `plan`, typed, and the devices that a plan can be made for: their rates, links and memory.

devices.yaml has devices with a name. Figures are peaks; `plan.efficiency` is the share of them that a real run reaches.
No torch here: the command refuses a wrong value before it imports torch.
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

from ..errors import ConfigurationError, Problems
from ..typed_section import Bytes, NotNegative, Positive, Size, nearest, read_section, shown

THIS = "this"


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
        between: bytes/s from a node to another, which its devices share; as assumed, one card of 100 Gb/s.
        latency: seconds from a send to the moment its first byte arrives.
        overhead: seconds that starting one operation costs.
        host: seconds for which a send or a receive keeps its worker from computing; 0 where it runs beside.
        kernels: whose kernels are planned (`layer_facts._AcceleratorKernels`).
    """

    name: str
    flops: Positive
    half_flops: Positive
    memory: Bytes
    bandwidth: Positive
    link: Positive
    between: Positive = 12.5e9
    latency: NotNegative = 10e-6
    overhead: NotNegative = 5e-6
    host: NotNegative = 0.0
    kernels: Literal["accelerator", "cpu"] = "accelerator"


PRESETS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("devices.yaml").read_text("utf-8"))


def describe(device: Any) -> Device:
    """Returns a preset by its name, or a device of the given figures.

    Raises:
        ConfigurationError: no such preset, or a key or value that a device does not have.
    """
    if isinstance(device, str) and device in PRESETS:
        device = {"name": device, **PRESETS[device]}
    if not isinstance(device, Mapping):
        near = nearest(str(device), PRESETS)
        guess = f"did you mean {' or '.join(near)}? " if near else ""
        figures = "{flops: 1e13, memory: 16GB, bandwidth: 5e11, link: 1e10}"
        raise ConfigurationError(f"plan.device={device}: {guess}use one of {', '.join(PRESETS)}, this, or {figures}")
    defaults = {field.name: field.default for field in fields(Device) if field.default is not MISSING}
    values = {"name": "described", "half_flops": device.get("flops", 1.0), **device}
    return read_section(Device, {**defaults, **values}, "plan.device")


def peak_flops(name: str, half: bool) -> float | None:
    """Returns the peak FLOP/s of a preset by torch's name for the device; None where it is not known.

    Args:
        name: as "NVIDIA A100-SXM4-80GB". A part of a GPU (MIG) is not known.
        half: True for the peak in 16-bit types; False: in float32 without TF32.
    """
    words = {*re.split("[^a-z0-9]+", name.lower())}
    known = [preset for preset in PRESETS if {*preset.split("-")} <= words and "mig" not in words]
    figures = PRESETS[max(known, key=len)] if known else {}
    peak: float | None = figures.get("half_flops" if half else "flops")
    return peak


@dataclass(frozen=True)
class Options:
    """Holds the section `plan`; conf/plan.yaml describes each key.

    Attributes:
        device: None: the present machine, to be measured.
        node: devices in a node; None: all are in one.
        most_workers: most workers of a replica, as this machine has devices; None: one for each cell.
    """

    device: Device | None = None
    efficiency: Positive = 1.0
    memory: Bytes | None = None
    longest: bool = False
    fit: Bytes | None = None
    best: bool = False
    devices: Size | None = None
    node: Size | None = None
    grow: str | None = None
    grow_by: Size = 1
    format: Literal["text", "json", "lists"] = "text"
    most_workers: int | None = None

    @classmethod
    def read(cls, section: Mapping[str, Any], problems: Problems) -> "Options":
        """Returns the section `plan`; with problems, of which each adds a line, not all of it."""
        if not isinstance(section, Mapping):
            problems.append(f"plan must be a section with keys, not {shown(section)}")
            return cls()
        device, options = section.get("device"), cls()
        with problems.collected():
            options = read_section(cls, {**section, "device": None, "most_workers": None}, "plan")
        with problems.collected():
            options = replace(options, device=None if device == THIS else describe(device))
        if options.fit and (options.best or options.grow):
            problems.append("plan.fit looks for other things than plan.best and plan.grow: give one of them")
        return options
