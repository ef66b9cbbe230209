"""Draws a measured step beside the planned one, and sample images with their predictions."""

from __future__ import annotations

import io
from collections import defaultdict
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from PIL import Image

from ..schedule.instruction import COMPUTE, Op
from ..schedule.picture import draw_panels
from ..schedule.simulate import Timeline
from ..svg import Drawing
from .breakdown import simulate_with

if TYPE_CHECKING:
    from ..distributed.pipeline import Pipeline
    from .predictions import Predictions

COLUMNS, SIDE = 8, 84  # of sample images; pixels
LONGEST_NAME = 14  # characters below an image


def draw_step(title: str, measured: Timeline, pipeline: Pipeline) -> Drawing:
    """Draws a measured step above the simulation of its schedule with the mean measured durations, in milliseconds."""
    taken: dict[tuple[Op, int], list[float]] = defaultdict(list)
    for instruction, start, end in (span for spans in measured.spans for span in spans):
        if instruction.op in COMPUTE:
            taken[instruction.op, instruction.cell].append(end - start)
    durations = {key: fmean(seconds) for key, seconds in taken.items()}
    simulated = simulate_with(pipeline.training_lists(measured.micro_batches), pipeline.placement, durations)
    return draw_panels({title: measured, "planned with the same durations": simulated}, "ms")


def draw_images(found: Predictions) -> Drawing:
    """Draws sample images, each with its predicted class and, if that is wrong, with the true class."""
    columns = min(COLUMNS, len(found.images))
    rows = -(-len(found.images) // columns)
    alt = "Images of the evaluation set with their predicted classes; wrong ones are red, with the true class"
    drawing = Drawing(8 + columns * (SIDE + 12), 8 + rows * (SIDE + 42), alt)
    stacked = torch.stack([image for _, image in found.images]).cpu().expand(-1, 3, -1, -1)
    if stacked.is_floating_point():  # of any range: all are scaled by the same factor
        low, high = stacked.float().aminmax()
        stacked = (255 * (stacked.float() - low) / (high - low).clamp(min=1e-12)).round()
    pixels = stacked.to(torch.uint8).permute(0, 2, 3, 1).numpy()
    for number, (example, _) in enumerate(found.images):
        x, y = 8.0 + number % columns * (SIDE + 12), 8.0 + number // columns * (SIDE + 42)
        label, predicted, confidence = found.rows[example]
        right = label == predicted
        picture, content = Image.fromarray(pixels[number]), io.BytesIO()
        picture.thumbnail((2 * SIDE, 2 * SIDE))
        picture.save(content, "png")
        drawing.image(x, y, SIDE, content.getvalue())
        colour, name = "green" if right else "red", found.names[int(predicted)][:LONGEST_NAME]
        drawing.text(x, y + SIDE + 10, f"{name} {confidence:.0%}", size=11, colour=colour)
        if not right:
            drawing.text(x, y + SIDE + 24, f"is {found.names[int(label)][:LONGEST_NAME]}", size=11, colour=colour)
    return drawing
