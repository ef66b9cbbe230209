"""Lists the parts, the most important first."""

from __future__ import annotations

from .part import Part

PARTS = (
    Part("machine", "the machine", "planned:machine_facts", 15, 40),
    Part("exact", "steps compared with a plain model, every gradient by name", "correct:exact", 60, 120),
    Part("tests", "every test marked gpu", "correct:tests", 30, 90),
    Part("bits", "the same bits at every K", "correct:bits", 40, 90),
    Part("resume", "begun on the GPU, gone on on the CPU, then on the GPU", "correct:resume", 40, 90),
    Part("precision", "the same bits at every K in 16-bit types, and compiled", "correct:precision", 60, 150),
    Part("t_6_8192_16", "the paper's T(6,8192,16)", "speed:measure", 25, 60),
    Part("amoebanet_b", "the paper's AmoebaNet-B (18, 512) at 480 × 480 pixels", "speed:measure", 30, 70),
    Part("planned", "planned and measured cells, bubble and memory", "planned:plans", 60, 120),
    Part("transformer_l", "the paper's Transformer-L, L=13", "speed:measure", 30, 70),
    Part("t_24_8192_16", "the paper's T(24,8192,16)", "speed:measure", 40, 90),
)


def part_of(name: str) -> Part:
    """Returns the part with this name."""
    return next(part for part in PARTS if part.name == name)
