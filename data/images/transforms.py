"""Transforms images, from bytes to bytes, before a model reads them (paper, section 4).

The ImageNet transforms are those of Google's public AmoebaNet code: a crop of random area and shape, flip, shifts of
brightness and chroma; for evaluation the central 87.5 %. Transfer resizes the whole image, flips and cuts out a square.
Random numbers come from torch's global generator, which the source seeds for each example.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

Transform = Callable[[Tensor], Tensor]
"""uint8 [3, H, W] to uint8 [3, S, S]."""

CROP_SHAPES = (3 / 4, 4 / 3)  # width over height of a random crop
GREY = 128  # fills a cut-out square: about zero once the model has scaled it
RED, GREEN, BLUE = (0.0, 1.402), (-0.344136, -0.714136), (1.772, 0.0)  # shares of Cb and Cr (ITU-R BT.601)


def training_transform(
    image_size: int,
    crop_area: Sequence[float] | None,
    flip: bool,
    brightness: float,
    chroma: float,
    cutout: float,
    rand_augment: int,
    random_erasing: float,
) -> Transform:
    """Returns the random transform of training.

    Args:
        image_size: side S of the result, in pixels.
        crop_area: least and largest share of the image's area that a random crop keeps; None: the whole image.
        flip: mirror every other image, left to right.
        brightness, chroma: largest shift, as a share of the brightest value.
        cutout: side of the square that is cut out, as a share of S; 0: none.
        rand_augment: number of operations of RandAugment (Cubuk et al., 2020), of magnitude 9; 0: none.
        random_erasing: probability that a rectangle is filled with grey (Zhong et al., 2020).
    """
    from torchvision.transforms import v2  # type: ignore[import-untyped] # two seconds, only for image files

    steps: list[Transform] = []
    if crop_area is None:
        steps.append(v2.Resize((image_size, image_size), antialias=True))
    else:
        area = (crop_area[0], crop_area[1])
        steps.append(v2.RandomResizedCrop(image_size, scale=area, ratio=CROP_SHAPES, antialias=True))
    if flip:
        steps.append(v2.RandomHorizontalFlip())
    if rand_augment:
        steps.append(v2.RandAugment(rand_augment, fill=GREY))
    if brightness or chroma:
        steps.append(partial(shift_colours, brightness=brightness, chroma=chroma))
    if cutout:
        steps.append(partial(cut_out, share=cutout))
    if random_erasing:
        steps.append(v2.RandomErasing(random_erasing, value=GREY))
    return cast(Transform, v2.Compose(steps))


Mixture = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""uint8 [2, 3, S, S] and labels int64 [2] to one image, uint8 [3, S, S], and the shares of the classes, float32 [C]."""


def mixture(mixup: float, cutmix: float, classes: int) -> Mixture:
    """Returns a function that mixes two images by MixUp, CutMix, or either with equal probability.

    Args:
        mixup, cutmix: parameter α of the Beta distribution that an image's share is drawn from; 0: never, one is not 0.
        classes: number C of classes.
    """
    from torchvision.transforms import v2

    kinds = [
        kind(alpha=alpha, num_classes=classes) for kind, alpha in ((v2.MixUp, mixup), (v2.CutMix, cutmix)) if alpha
    ]
    return partial(_mix, kinds)


def _mix(kinds: Sequence[Mixture], images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mixes two images by one of these kinds, drawn with equal probability."""
    mixed, shares = kinds[int(torch.randint(len(kinds), ()))](images.float(), labels)  # MixUp refuses bytes
    return mixed[0].round().to(torch.uint8), shares[0]


def evaluation_transform(image_size: int, crop: float) -> Transform:
    """Returns the transform of evaluation: the central `crop` of height and width, resized to a square."""
    from torchvision.transforms import v2

    resize = v2.Resize((image_size, image_size), antialias=True)
    return cast(Transform, v2.Compose([partial(central_crop, share=crop), resize]))


def central_crop(image: Tensor, share: float) -> Tensor:
    """Returns the middle of an image, `share` of its height and of its width."""
    height, width = image.shape[-2:]
    top, left = (int((side - side * share) / 2) for side in (height, width))
    return image[..., top : height - top, left : width - left]


def shift_colours(image: Tensor, brightness: float, chroma: float) -> Tensor:
    """Adds one random amount to the brightness of all pixels, and one to each of their chroma values Cb and Cr."""
    light, blue, red = (torch.rand(3, dtype=torch.float64) * 2 - 1).tolist()
    shifts = [
        round(255 * (light * brightness + chroma * (blue * of_blue + red * of_red)))
        for of_blue, of_red in (RED, GREEN, BLUE)
    ]
    shifted = image.to(torch.int16) + torch.tensor(shifts, dtype=torch.int16)[:, None, None]
    return shifted.clamp_(0, 255).to(torch.uint8)


def cut_out(image: Tensor, share: float) -> Tensor:
    """Fills a square with grey; its centre is any pixel, so that it may lie partly outside (DeVries & Taylor, 2017).

    Args:
        share: side of the square as a share of the image's.
    """
    rows, columns = (_span(side, round(share * side)) for side in image.shape[-2:])
    cut = image.clone()
    cut[..., rows, columns] = GREY
    return cut


def _span(side: int, length: int) -> slice:
    """Draws a centre on a side; returns the pixels within half a `length` of it."""
    first = int(torch.randint(side, ())) - length // 2
    return slice(max(0, first), min(side, first + length))
