"""Reports on predicted classes: confusions, the worst mistakes with their images."""

import io
from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

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
    picture_of = getattr(source, "evaluation_image", None)
    counts = Counter((int(label), int(predicted)) for label, predicted, _ in predictions)
    wrong = [n for n, (label, predicted, _) in enumerate(predictions) if label != predicted]
    mistakes = list[dict[str, Any]]()
    for n in sorted(wrong, key=lambda n: -predictions[n][2])[:WORST]:
        label, predicted, probability = predictions[n]
        image = None if picture_of is None else b64encode(png(picture_of(n), THUMBNAIL)).decode()
        facts = {"example": n, "label": int(label), "predicted": int(predicted), "probability": probability}
        mistakes.append({**facts, "image": image})
    return {
        "names": [*names, *(str(number) for number in range(len(names), 1 + max(map(max, counts))))],
        "predicted": [[int(predicted), probability] for _, predicted, probability in predictions],
        "confusion": [[*pair, count] for pair, count in sorted(counts.items())],
        "worst": mistakes,
    }


def png(image: Tensor, longest: int | None = None) -> bytes:
    """Returns an image, uint8 [3, H, W], as a PNG file; ``longest`` limits the pixels of its longer side."""
    from PIL import Image

    file, picture = io.BytesIO(), Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    if longest is not None:
        picture.thumbnail((longest, longest))
    picture.save(file, "PNG")
    return file.getvalue()
