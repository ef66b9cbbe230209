"""Defines AmoebaNet (L, D), the paper's image model (sections 3 and 4), as a list of L + 6 layers.

| layer | side of its output at 480 / 331 / 299 / 224 pixels | width F |
|---|---|---|
| `stem`: 3×3 convolution, stride 2 | 239 / 165 / 149 / 111 | 32 |
| `stem_cell_1`, `stem_cell_2`: reduction cells | 120, 60 / 83, 42 / 75, 38 / 56, 28 | D/4, D/2 |
| `stack_1.*`: L/3 normal cells | 60 / 42 / 38 / 28 | D |
| `reduction_1`, `stack_2.*`: L/3 normal cells | 30 / 21 / 19 / 14 | 2D |
| `reduction_2`, `stack_3.*`: L/3 normal cells | 15 / 11 / 10 / 7 | 4D |
| `head`: classifier | 1 | |

After `stem` and after the last cell the boundary is one tensor. Between the cells it is two: the outputs of the cell
and of the layer before it. A cell of width F has 4F output channels, a reduction cell 3F (genotype D) or 2F (B).

| model | parameters, 1000 classes, without auxiliary head | in the paper |
|---|---|---|
| D (18, 208), (18, 416), (18, 544) | 81,137,437; 317,541,696; 540,196,240 | 82M, 318M, 542M (table 1) |
| D (36, 544), (72, 512) | 1,053,293,776; 1,842,610,248 | 1.05B, 1.8B (table 1) |
| B (18, 512) | 557,277,864 | 557M (section 4) |

Where the paper is silent, the model is TensorFlow's published AmoebaNet.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Literal

from pydantic import Field
from torch import nn

from ..layers import LayerBuilder
from ..typed_section import DEEPEST, Count, PartAboveZero, Positive, ShareOrZero
from . import amoebanet_layers as parts
from .amoebanet_genotypes import GENOTYPES, CellGenotype, Genotype


def amoebanet(
    L: Annotated[int, Field(ge=3, le=DEEPEST, multiple_of=3)],
    D: Annotated[int, Field(ge=16)],
    classes: Count,
    image_size: Annotated[int, Field(ge=3, le=65_536)],
    genotype: Literal["B", "D"] = "D",
    in_channels: Count = 3,
    dropout: ShareOrZero = 0.5,
    drop_path_keep: PartAboveZero = 0.7,
    batchnorm_epsilon: Positive = 1e-3,
    batchnorm_decay: ShareOrZero = 0.9997,
    auxiliary_head: bool = True,
    auxiliary_weight: Positive = 0.4,
    auxiliary_label_smoothing: ShareOrZero = 0.1,
) -> list[LayerBuilder]:
    """Returns the list of AmoebaNet (L, D): images [b, in_channels, H, W], bytes or normalised, to logits [b, classes].

    Args:
        L: normal cells, in three stacks; a multiple of 3.
        D: width of the first stack; the first stem cell's bottlenecks are a 16th of it.
        classes: number of logits.
        image_size: pixels a side of the training images; only the auxiliary head depends on it.
        genotype: B or D.
        in_channels: number of channels of the images.
        dropout: probability before the classifier.
        drop_path_keep: share of paths kept at the end of the run; it falls linearly from 1. 1: no drop path.
        batchnorm_epsilon: added to the variance.
        batchnorm_decay: decay of the moving averages, per mini-batch; 1 − torch's momentum.
        auxiliary_head: train the last cell of stack 2 with a classifier of its own, too.
        auxiliary_weight, auxiliary_label_smoothing: weight and label smoothing of its loss.
    """
    norm = partial(nn.BatchNorm2d, eps=batchnorm_epsilon, momentum=1 - batchnorm_decay)
    width = 4 * D * len(GENOTYPES[genotype].normal.concatenated)
    makers: dict[str, Callable[..., parts.AmoebaCell]] = {}
    if auxiliary_head:
        head = partial(parts.AuxiliaryHead, width // 2, norm, _pooled(image_size), classes)
        judged = partial(parts.AmoebaCellWithAuxiliaryHead, head, auxiliary_weight, auxiliary_label_smoothing)
        makers[f"stack_2.{L // 3 - 1}"] = judged
    layers = [LayerBuilder("stem", partial(parts.Stem, in_channels, norm))]
    for name, kind, shape in _cells(L, D, GENOTYPES[genotype]):
        make = makers.get(name, parts.AmoebaCell)
        layers.append(LayerBuilder(name, partial(make, kind, shape, norm, drop_path_keep)))
    return [*layers, LayerBuilder("head", partial(parts.Head, width, classes, dropout))]


def _cells(L: int, D: int, genotype: Genotype) -> Iterator[tuple[str, CellGenotype, parts.CellShape]]:
    """Yields name, genotype and shape of each cell, in order."""
    stacks = [[(f"stack_{n}.{i}", False, D * 2 ** (n - 1)) for i in range(L // 3)] for n in (1, 2, 3)]
    arrangement = [("stem_cell_1", True, D // 4), ("stem_cell_2", True, D // 2), *stacks[0]]
    arrangement += [("reduction_1", True, 2 * D), *stacks[1], ("reduction_2", True, 4 * D), *stacks[2]]
    inputs, previous, halved = parts.STEM_WIDTH, None, False
    for name, reduces, width in arrangement:
        kind = genotype.reduction if reduces else genotype.normal
        last = name == f"stack_3.{L // 3 - 1}"
        yield name, kind, parts.CellShape(inputs, previous, halved, width, stride=2 if reduces else 1, is_last=last)
        inputs, previous, halved = width * len(kind.concatenated), inputs, reduces


def _pooled(image_size: int) -> int:
    """Returns the side of the auxiliary head's map after its pooling, in pixels."""
    side = (image_size - 1) // 2  # after the stem
    for _ in range(3):  # reductions
        side = -(-side // 2)
    if side < parts.AUXILIARY_POOL:
        raise ValueError(
            f"model.auxiliary_head=true with model.image_size={image_size}: its pooling does not fit "
            f"the {side}×{side} map after stack 2: use model.auxiliary_head=false, or larger images"
        )
    return (side - parts.AUXILIARY_POOL) // parts.AUXILIARY_STRIDE + 1
