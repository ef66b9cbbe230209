"""Reports on predicted classes: confusions, the worst mistakes with their images; pictures of what a network sees."""

import io
from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from math import ceil, sqrt
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ..data.source import Source

WORST = 16  # mistakes that are shown
THUMBNAIL = 96  # pixels of their longer side


def class_report(predictions: Sequence[tuple[float, float, float]], source: Source | None) -> dict[str, Any]:
    """Returns the classes of an evaluation as JSON keeps them.

    Args:
        predictions: [label, predicted class, its probability] of each example, in the source's order.
        source: gives the names of the classes and the images; where it has none, there are numbers and no images.

    Returns:
        "names" of the classes; "predicted": class and probability of each example; "confusion": rows of [label,
        predicted class, examples]; "worst": the mistakes made with the highest probability, each with "example",
        "label", "predicted", "probability" and "image" (PNG in base64, or None).
    """
    names = list(getattr(source, "class_names", ()))
    counts = Counter((int(label), int(predicted)) for label, predicted, _ in predictions)
    wrong = [n for n, (label, predicted, _) in enumerate(predictions) if label != predicted]
    worst = sorted(wrong, key=lambda n: -predictions[n][2])[:WORST]
    return {
        "names": [*names, *(str(number) for number in range(len(names), 1 + max(map(max, counts))))],
        "predicted": [[int(predicted), probability] for _, predicted, probability in predictions],
        "confusion": [[*pair, count] for pair, count in sorted(counts.items())],
        "worst": [_mistake(n, *predictions[n], source) for n in worst],
    }


def _mistake(example: int, label: float, predicted: float, probability: float, source: Source | None) -> dict[str, Any]:
    picture_of = getattr(source, "evaluation_image", None)
    image = None if picture_of is None else b64encode(png(_smaller(picture_of(example)))).decode()
    found = {"example": example, "label": int(label), "predicted": int(predicted), "probability": probability}
    return {**found, "image": image}


def _smaller(image: Tensor) -> Tensor:
    share = THUMBNAIL / max(image.shape[-2:])
    if share >= 1:
        return image
    return F.interpolate(image[None].float(), scale_factor=share, mode="area")[0].round().byte()


def png(image: Tensor) -> bytes:
    """Returns an image, uint8 [3, H, W], as a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(file, "PNG")
    return file.getvalue()


def sheet(images: Tensor) -> Tensor:
    """Returns images, uint8 [n, 3, S, S], side by side in a square, with two white pixels between them."""
    framed = F.pad(images, (1, 1, 1, 1), value=255)
    columns = ceil(sqrt(len(framed)))
    rows = ceil(len(framed) / columns)
    framed = F.pad(framed, (0, 0, 0, 0, 0, 0, 0, rows * columns - len(framed)), value=255)
    side = framed.shape[-1]
    return framed.view(rows, columns, 3, side, side).permute(2, 0, 3, 1, 4).reshape(3, rows * side, columns * side)
