"""Describes the devices that a plan can be made for: their rates, links and memory.

Figures are the vendors' peaks for one accelerator (for a TPU: one core, as the paper counts); `plan.efficiency` is the
share of them that a real run reaches. A device sold with 16 GB has 16 GiB.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

from ..errors import ConfigurationError
from ..typed_section import NotNegative, Positive, nearest, read_section

GIB = 1 << 30


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


PRESETS = {
    device.name: device
    for device in (
        # NVIDIA Tesla V100 data sheet (SXM2): 15.7 TFLOP/s fp32 and no bfloat16 units, 900 GB/s; NVLink 2, 2 of 6 links
        # to a neighbour.
        Device("v100-16gb", 15.7e12, 15.7e12, 16 * GIB, 900e9, 50e9),
        # NVIDIA Tesla P100 data sheet (PCIe, 16 GB): 9.3 TFLOP/s fp32, 732 GB/s; PCIe 3.0 ×16 (the paper's table 3).
        Device("p100", 9.3e12, 9.3e12, 16 * GIB, 732e9, 12e9),
        # NVIDIA Tesla P40 data sheet: 12 TFLOP/s fp32, 24 GB, 346 GB/s; PCIe 3.0 ×16.
        Device("p40", 12e12, 12e12, 24 * GIB, 346e9, 12e9),
        # NVIDIA A100 data sheet (SXM): 19.5 TFLOP/s fp32 without TF32 (torch's default), 312 bf16; NVLink 300 GB/s.
        Device("a100-40gb", 19.5e12, 312e12, 40 * GIB, 1555e9, 300e9),
        Device("a100-80gb", 19.5e12, 312e12, 80 * GIB, 2039e9, 300e9),
        # NVIDIA H100 data sheet (SXM5): 67 TFLOP/s fp32, 989 bf16 without sparsity, 80 GB, 3.35 TB/s; NVLink 450 GB/s.
        Device("h100", 67e12, 989e12, 80 * GIB, 3350e9, 450e9),
        # NVIDIA H200 data sheet (SXM): the same units, 141 GB, 4.8 TB/s.
        Device("h200", 67e12, 989e12, 141e9, 4800e9, 450e9),
        # NVIDIA's data sheets; PCIe 4.0 ×16 to a neighbour. bfloat16 with float32 sums, without sparsity.
        Device("rtx-3090", 35.6e12, 71e12, 24 * GIB, 936e9, 25e9),
        Device("rtx-4090", 82.6e12, 165e12, 24 * GIB, 1008e9, 25e9),
        Device("a10", 31.2e12, 125e12, 24 * GIB, 600e9, 25e9),
        Device("l4", 30.3e12, 121e12, 24 * GIB, 300e9, 25e9),
        Device("l40s", 91.6e12, 362e12, 48 * GIB, 864e9, 25e9),
        Device("a6000", 38.7e12, 155e12, 48 * GIB, 768e9, 25e9),
        # Jouppi et al., "A Domain-Specific Supercomputer for Training DNNs", CACM 63(7), 2020, table 3, half a chip: v2
        # 46 TFLOP/s, 700 GB/s, 16 GB, links of 496 Gbit/s; v3 123, 900, 32, 656. float32 products are made in bfloat16.
        Device("tpu-v2", 23e12, 23e12, 8 * GIB, 350e9, 62e9),
        Device("tpu-v3", 61.5e12, 61.5e12, 16 * GIB, 450e9, 82e9),
    )
}
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
        return PRESETS[device]
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
